"""The captured step: draft and tree, commit and verification, acceptance, as three CUDA graphs over one memory pool.

They are replayed without a host sync between them. The host reads the tokens of step k while draft k + 1 runs; it may
shorten the path that they are on, because verification k + 1 commits it and is not launched before. Plain decoding is
the same with a tree of one node.
"""

import copy
import gc
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers.utils import logging

from weaver_kernels.dispatch import use_triton

from .acceptance import choose, follow, plant
from .drafter import DrafterContext, StaticContext
from .noise import GumbelField
from .proposal import DraftContext
from .scoring import is_stateless, known_warpers, process_nodes
from .target.cache import padding_of, verify_tree
from .target.fused import fuse_projections, listeners
from .target.static_cache import StaticTreeCache, cannot_stack
from .target.taps import TapStates
from .tree import TokenTree

if TYPE_CHECKING:
    from .decode_state import DecodeState, Prompt
    from .generation import WeaverCandidateGenerator
    from .modeling_weaver import WeaverModel

__all__ = ["CapturedStep", "checkout", "fingerprint", "why_eager"]

logger = logging.get_logger(__name__)

CAPTURE_FROM = 64  # new tokens from which a capture pays for itself; below, one that exists is used
MAX_RESERVED = 32768  # slots reserved for new tokens; a longer text moves to larger buffers on its way
MIN_CAPACITY = 1024
MAX_STEPS = 4  # captured at a time for one model; the one that was used longest ago goes
MAX_GRAPHS = 8  # of drafts, and of acceptances, of one step

_said: set[str] = set()


@dataclass
class CapturedStep:
    """Buffers and graphs of one model and one shape; everything that a step reads or writes lies at a fixed address.

    Attributes:
        cache: of the target.
        context: of the drafter, None where nothing is drafted from the vocabulary.
        anchors: int64 `[B, 1]`, the last emitted tokens.
        remaining: int64 `[B]`, tokens that may still be emitted.
        seeds, position: int64 `[B]`, of the noise: see `GumbelField`.
        taps: of the last verification, `[B, N, ...]`; None where the target has none.
        state_before: `[B, H]`, the final state whose logits chose the anchor.
        tree: the step's tree, static tensors.
        logits: `[B, N, V]`.
        result: int64 `[B, 2 P + 1 + 3 N + 1]`, what the host reads of a step: path, tokens and length that acceptance
            found, and the tree; `host` is its pinned copy.
    """

    model: Any
    sink: Any
    cache: StaticTreeCache
    context: StaticContext | None
    anchors: Tensor
    remaining: Tensor
    seeds: Tensor
    position: Tensor
    tree: TokenTree
    taps: TapStates | None
    state_before: Tensor | None
    result: Tensor
    host: Tensor
    logits: Tensor = field(init=False)
    verify: Callable[[], None] = field(init=False)
    drafts: dict[Any, Callable[[], None]] = field(default_factory=dict)
    accepts: dict[Any, Callable[[], None]] = field(default_factory=dict)
    pool: Any = None
    draft: Callable[[], None] = field(init=False)
    accept: Callable[[], None] | None = None
    _copied: Any = None

    # ---- the three parts, as they are captured -----------------------------------------------------------------------

    def _draft(self, generator: "WeaverCandidateGenerator", history: list[list[int]] | None = None) -> None:
        """Let the drafter read the accepted rows, and grow a tree; `history` is for builders that read the text."""
        taps = None
        if self.taps is not None and self.state_before is not None:
            path = self.cache.path[..., None].expand(-1, -1, self.taps.features.shape[-1])
            taps = TapStates(self.taps.features.gather(1, path), self.state_before[:, None])
        noise = GumbelField(self.seeds, self.position) if generator.coupled else None
        context = DraftContext(history or [], taps, self.anchors.device, noise=noise)
        context.__dict__["anchors"] = self.anchors  # on the device already
        grown = generator.get_candidate_tree(context).pad_to(self.tree.num_nodes)
        for mine, new in zip(fields(self.tree), fields(grown), strict=True):
            mine.copy_(new)
        self.tree.token_ids[:, :1] = self.anchors

    def _verify(self) -> None:
        """Commit the accepted path, and run the target over the tree."""
        self.cache.commit()
        plan = self.cache.plan(self.tree)
        # Made anew for each capture: what a tree computes lazily belongs to the capture in which it was computed.
        self.tree = TokenTree(*fields(self.tree), max_depth=self.tree.max_depth)
        self.tree.__dict__.update(ancestors=plan.topology.ancestors, depths=plan.topology.depths)
        with nullcontext() if self.sink is None else self.sink.listening():
            self.logits = verify_tree(self.model, self.tree.token_ids, plan, self.cache.cache)
        if self.sink is not None:
            for mine, new in zip(self.taps or (), self.sink.take(), strict=True):
                mine.copy_(new)

    def _accept(self, generator: "WeaverCandidateGenerator", processors: Any, ends: Tensor, sampled: bool) -> None:
        """The target's choices down the tree, cut at an end token and at the length limit."""
        tree, scores = self.tree, self.logits
        noise = GumbelField(self.seeds, self.position) if sampled else None
        warpers = known_warpers(processors)
        if generator.margin is None and warpers is not None and use_triton(scores):
            from weaver_kernels.sampling import choose_tokens  # Triton is asked for where it is used

            gumbels = None if noise is None else noise.rows(tree.depth_limit + 1, scores.shape[-1])
            choices = choose_tokens(scores, tree.depths, gumbels, **warpers)
        else:
            if processors:
                scores = process_nodes(processors, tree.token_ids, scores)
            nodes = torch.arange(tree.num_nodes, device=tree.device)
            choices = choose(tree, nodes, scores, noise, generator.margin)
        if generator.planted is not None:
            choices = plant(tree, choices, generator.planted)
        path, tokens, lengths = follow(tree, choices)
        path, tokens = path[:, : self.cache.path.shape[1]], tokens[:, : self.cache.path.shape[1]]
        place = torch.arange(path.shape[1], device=path.device)
        if len(ends):
            ended = (tokens[..., None] == ends).any(-1) & (place < lengths[:, None])
            lengths = torch.where(ended.any(-1), ended.long().argmax(-1) + 1, lengths)
        self._accepted(path, tokens, torch.minimum(lengths, self.remaining.clamp(min=1)))

    def _accepted(self, path: Tensor, tokens: Tensor, lengths: Tensor) -> None:
        last = (lengths - 1)[:, None]
        self.cache.path.copy_(path)
        self.cache.lengths.copy_(lengths)
        self.anchors.copy_(tokens.gather(1, last))
        self.remaining -= lengths
        self.position += lengths
        if self.taps is not None and self.state_before is not None:
            node = path.gather(1, last)[..., None].expand(-1, -1, self.state_before.shape[-1])
            self.state_before.copy_(self.taps.final_hidden.gather(1, node)[:, 0])
        # The probabilities travel as the integers that their bits are.
        drafted = [
            self.tree.token_ids,
            self.tree.parents,
            self.tree.log_probs.view(torch.int32),
            self.tree.sizes[:, None],
        ]
        self.result.copy_(torch.cat([path, tokens, lengths[:, None], *drafted], 1))

    # ---- around a call -----------------------------------------------------------------------------------------------

    def prepare(self, generator: "WeaverCandidateGenerator", state: "DecodeState") -> None:
        """Choose the graphs of a call, capturing those that are missing. Before `start`: a capture spoils the state."""
        own = copy.copy(generator)  # the call's own goes on with its own context
        own.context = self.context
        self.cache.lengths.zero_()
        self.cache.lens.zero_()
        self.remaining.fill_(1)
        if not hasattr(self, "logits"):
            self.verify = self._captured(self._verify)
            if not self.anchors.is_cuda:
                self._verify()  # its outputs are what the others read
        if generator.on_device:
            key = generator.signature
            if key not in self.drafts:
                self.drafts[key] = self._captured(lambda: self._draft(own))
                _bound(self.drafts, MAX_GRAPHS)
            self.draft = self.drafts[key]
        else:
            self.draft = lambda: self._draft(own, state.history)
        self.accept = None
        plain = state.scores is None and state.logits is None and not state.criteria
        if is_stateless(state.processors) and plain:
            ends = torch.tensor(sorted(state.eos_ids), device=self.anchors.device, dtype=torch.long)
            sampled, rules = state.noise is not None, [repr(vars(p)) + type(p).__name__ for p in state.processors]
            name = (tuple(rules), tuple(sorted(state.eos_ids)), sampled, generator.margin, generator.planted)
            if name not in self.accepts:
                processors = state.processors
                self.accepts[name] = self._captured(lambda: self._accept(own, processors, ends, sampled))
                _bound(self.accepts, MAX_GRAPHS)
            self.accept = self.accepts[name]

    def _captured(self, part: Callable[[], None]) -> Callable[[], None]:
        """The part as a graph; on a CPU the part itself."""
        if not self.anchors.is_cuda:
            return part
        with torch.cuda.device(self.anchors.device):  # which need not be the current one
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):  # kernels compile and libraries allocate what a capture must not
                for _ in range(2):
                    part()
            torch.cuda.current_stream().wait_stream(side)
            torch.cuda.synchronize()
            graph, collecting = torch.cuda.CUDAGraph(), gc.isenabled()
            gc.collect()
            gc.disable()  # a graph that is collected while another is captured invalidates it
            try:
                with torch.cuda.graph(graph, pool=self.pool):
                    part()
            finally:
                if collecting:
                    gc.enable()

        def replay(part: Callable[[], None] = part) -> None:  # the part owns tensors that the graph reads
            with torch.cuda.device(self.anchors.device):
                graph.replay()

        return replay

    def start(
        self, weaver: "WeaverModel", state: "DecodeState", prompt: "Prompt", context: DrafterContext | None
    ) -> None:
        """Adopt the prompt's cache and what the drafter makes of it, behind the first token."""
        starts, _ = padding_of(prompt.mask)
        self.cache.adopt(prompt.cache, starts, prompt.last_position[..., 0] + 1)
        self.anchors.fill_(state.history[0][-1])
        self.remaining.fill_(state.remaining)
        if state.noise is not None:
            self.seeds.copy_(state.noise.seeds)
            self.position.copy_(state.noise.position)
        if self.context is not None and context is not None:
            weaver.read_taps(context, prompt.taps)
            self.context.adopt(context)
        if self.state_before is not None and prompt.taps is not None:
            self.state_before.copy_(prompt.taps.final_hidden[:, -1])

    def send(self) -> None:
        """Begin to copy the accepted tokens to the host, behind what is launched so far."""
        with torch.cuda.device_of(self.result):
            self.host.copy_(self.result, non_blocking=True)
            if self.result.is_cuda:
                self._copied = torch.cuda.Event()
                self._copied.record()

    def receive(self) -> tuple[list[tuple[int, int]], TokenTree]:
        """The nodes of the accepted path with the tokens chosen there, and the tree on the host; waits for them."""
        if self._copied is not None:
            self._copied.synchronize()
        host, width, nodes = self.host.clone(), self.cache.path.shape[1], self.tree.num_nodes
        path, tokens, length, ids, parents, bits, sizes = host.split([width, width, 1, nodes, nodes, nodes, 1], 1)
        tree = TokenTree(ids, parents, bits.int().view(torch.float32), sizes[:, 0], max_depth=self.tree.max_depth)
        count = int(length)
        return list(zip(path[0, :count].tolist(), tokens[0, :count].tolist(), strict=True)), tree

    def choose(self, nodes: list[int], state: "DecodeState") -> list[int]:
        """Set the path that the host chose, whose tokens `state` has emitted; returns it."""
        width = self.cache.path.shape[1]
        rows = torch.tensor([x + [0] * (width - len(x)) for x in (nodes, state.history[0][-len(nodes) :])])
        rows = rows.to(self.anchors.device)
        self._accepted(rows[:1], rows[1:], torch.full_like(self.cache.lengths, len(nodes)))
        return nodes

    @property
    def has_room(self) -> bool:
        """Whether another verification fits into the buffers."""
        return self.cache.length + len(self.cache.pending) + self.cache.nodes <= self.cache.capacity

    def leave(self, prompt: "Prompt", emitted: int) -> tuple["Prompt", DrafterContext | None]:
        """Give the stock cache back after `emitted` tokens behind the prompt's first: where the text goes on from."""
        taps = None
        if self.taps is not None and self.state_before is not None:
            taps = TapStates(self.taps.features[:, :0], self.state_before[:, None].clone())
        self.cache.release()
        return replace(prompt, last_position=prompt.last_position + emitted, taps=taps), self.drafted(emitted)

    def drafted(self, emitted: int) -> DrafterContext | None:
        """What the drafter knows when the host has emitted so many tokens since `start`."""
        return None if self.context is None else self.context.copy_out(emitted)


def fields(tree: TokenTree) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The tensors that a tree is."""
    return tree.token_ids, tree.parents, tree.log_probs, tree.sizes


def _bound(graphs: dict[Any, Any], most: int) -> None:
    while len(graphs) > most:
        del graphs[next(iter(graphs))]


# ---- which step serves a call ----------------------------------------------------------------------------------------


def fingerprint(model: Any, weaver: Any) -> int:
    """Changes where a capture of the model would no longer be the model, or one of the Weaver no longer the Weaver."""
    everything = (*model.parameters(), *model.buffers(), *weaver.parameters())
    tensors = tuple((t.data_ptr(), t._version) for t in everything)
    tuners = [m for m in model.modules() if hasattr(type(m), "merged")]  # PEFT's; asking every instance is slow
    adapters = tuple(f"{m.active_adapters} {m.merged}" for m in tuners)
    return hash((tensors, adapters, model.training, model.config._attn_implementation))


def why_eager(model: Any, prompt: "Prompt") -> str | None:
    """Why a call cannot be captured, None where it can."""
    device = prompt.logits.device
    if device.type != "cuda":
        return f"tensors on {device.type}"
    if {p.device for p in model.parameters()} != {device}:
        return "weights on several devices, or offloaded"
    for name, module in model.named_modules():
        if hasattr(module, "_hf_hook") or listeners(module):
            return f"hooks on {name or 'the model'}, which a replay would leave out"
    if padding_of(prompt.mask)[1] is not None:
        return "padding inside the prompt"
    return cannot_stack(prompt.cache)


def checkout(
    model: Any,
    steps: dict[Any, CapturedStep],
    generator: "WeaverCandidateGenerator",
    state: "DecodeState",
    prompt: "Prompt",
    asked: int | None = None,
) -> CapturedStep | None:
    """A captured step for a call, made where it is worth it; None where the call runs eagerly, and the log says why.

    Args:
        steps: of the model, kept between calls.
        asked: new tokens that a capture is wanted for even if this call writes fewer.
    """
    reason = why_eager(model, prompt)
    if reason is not None:
        _say(f"The step runs eagerly: {reason}.")
        return None
    nodes, length = generator.budget + 1, prompt.cache.get_seq_length()
    planes = tuple(prompt.last_position.shape[:-2])
    mark = fingerprint(model, generator.weaver)
    for key in [key for key in steps if key[1] == id(generator.weaver) and key[0] != mark]:
        del steps[key]
    need = length + min(asked or state.remaining, MAX_RESERVED) + nodes
    kind = (id(generator.weaver), nodes, generator.depth_limit, planes)
    fits = [key for key in steps if key[1:5] == kind and key[5] >= need]
    if fits:
        key = min(fits, key=lambda k: k[5])
        step = steps.pop(key)
    elif (asked or state.remaining) < CAPTURE_FROM:
        _say(f"The step runs eagerly: fewer than {CAPTURE_FROM} new tokens, and nothing captured that fits.")
        return None
    else:
        capacity = max(MIN_CAPACITY, 1 << (need - 1).bit_length())
        if prompt.logits.is_cuda and fuse_projections(
            model
        ):  # weights move: what was captured before reads the old ones
            mark = fingerprint(model, generator.weaver)
            for key in [key for key in steps if key[0] != mark]:
                del steps[key]
        key = (mark, *kind, capacity)
        _bound(steps, MAX_STEPS - 1)
        step = make_step(model, generator, prompt, nodes, capacity)
    try:
        step.prepare(generator, state)
    except (RuntimeError, NotImplementedError) as error:
        _say(f"The step runs eagerly: its capture failed ({type(error).__name__}: {error}).")
        return None
    steps[key] = step
    return step


def make_step(
    model: Any, generator: "WeaverCandidateGenerator", prompt: "Prompt", nodes: int, capacity: int
) -> CapturedStep:
    """Buffers for a step of `nodes` rows, from the shapes of a prefilled prompt; nothing is captured yet."""
    weaver, device = generator.weaver, prompt.logits.device
    batch = len(prompt.logits)
    cache = StaticTreeCache(
        prompt.cache, nodes, capacity, generator.depth_limit, tuple(prompt.last_position.shape[:-2])
    )
    taps = state_before = context = None
    if prompt.taps is not None:
        rows = [x.new_zeros(batch, nodes, x.shape[-1]) for x in prompt.taps]
        taps, state_before = TapStates(*rows), rows[1][:, 0].clone()
        if weaver.drafter is not None:
            like = weaver.drafter.context_rows(rows[0][:, :1].to(weaver.dtype), torch.zeros_like(cache.path[:, :1]))
            context = StaticContext(like, capacity + max(cache.path.shape[1], weaver.config.block_size), cache.lengths)
    integers = {"dtype": torch.long, "device": device}
    parents = torch.zeros(batch, nodes, **integers)  # type: ignore[call-overload]
    parents[:, 0] = -1
    tree = TokenTree(
        torch.zeros_like(parents), parents, torch.zeros(batch, nodes, device=device), torch.ones_like(cache.lens),
        max_depth=generator.depth_limit,
    )  # fmt: skip
    result = torch.zeros(batch, 2 * cache.path.shape[1] + 1 + 3 * nodes + 1, **integers)  # type: ignore[call-overload]
    return CapturedStep(
        model=model,
        sink=weaver.tap_sink(device),
        cache=cache,
        context=context,
        anchors=torch.zeros_like(cache.lens)[:, None],
        remaining=torch.ones_like(cache.lens),
        seeds=torch.zeros_like(cache.lens),
        position=torch.zeros_like(cache.lens),
        tree=tree,
        taps=taps,
        state_before=state_before,
        result=result,
        host=torch.zeros_like(result, device="cpu", pin_memory=device.type == "cuda"),
        pool=torch.cuda.graph_pool_handle() if device.type == "cuda" else None,
    )


def _say(message: str) -> None:
    """Once a message."""
    if message not in _said:
        _said.add(message)
        logger.warning(message) if "failed" in message else logger.info(message)
