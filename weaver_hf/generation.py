"""Tree decoding inside `generate`: the loop, one step, and the candidate generator.

The only file that knows all parts. A step drafts a tree, verifies it in one pass of the target, and emits the tokens
that the target itself chose along it; the accepted path is committed at the front of the next verification, because
until then a stopping rule may shorten it.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList, StoppingCriteriaList
from transformers.generation import CandidateGenerator, GenerationMode
from transformers.generation.streamers import BaseStreamer
from transformers.generation.utils import GenerationMixin

from .acceptance import LOSSY, choose, follow, plant
from .decode_state import DecodeState, Prompt, WeaverGenerateOutput, joined, own_rules
from .drafter import DrafterContext
from .errors import InvalidTreeError, TreeConfigError
from .graph import CapturedStep, checkout
from .modeling_weaver import WeaverModel
from .noise import GumbelField
from .options import check_inputs, check_options, check_prefill, require_attached
from .peft_weaver import weaver_in
from .proposal import DraftContext, make_builder
from .scoring import DraftRule, drafter_processors, is_stateless, process_nodes
from .stats import GenerationStats
from .target.cache import TreeCache, verify_tree
from .target.compat import CACHE_KEY
from .tree import TokenTree

__all__ = ["DecodeState", "WeaverCandidateGenerator", "WeaverGenerateOutput", "WeaverGenerationMixin"]

MAX_RESERVED = 4096  # KV slots reserved behind the prompt; the buffer of a longer text grows by halves


class WeaverGenerationMixin(GenerationMixin):
    """Mixed in before an attached model's class: `generate(..., assistant_model=weaver)` decodes with trees."""

    def _validate_generation_mode(
        self,
        generation_mode: GenerationMode,
        generation_config: GenerationConfig,
        generation_mode_kwargs: dict[str, Any],
    ) -> None:
        weaver = weaver_in(generation_mode_kwargs.get("assistant_model"))
        if isinstance(weaver, WeaverModel):
            generation_mode_kwargs["assistant_model"] = weaver  # `generate` hands this dict on
            check_options(self, weaver, generation_mode, generation_config, generation_mode_kwargs)
        else:
            super()._validate_generation_mode(generation_mode, generation_config, generation_mode_kwargs)

    def _get_candidate_generator(self, generation_config: GenerationConfig, **kwargs: Any) -> CandidateGenerator:
        weaver = kwargs.get("assistant_model")
        if isinstance(weaver, WeaverModel):
            context, processors = kwargs.get("context"), kwargs.get("logits_processor")
            device = kwargs["input_ids"].device
            return WeaverCandidateGenerator(weaver, generation_config, device, context, processors or ())
        return super()._get_candidate_generator(generation_config=generation_config, **kwargs)

    def _assisted_decoding(
        self,
        input_ids: Tensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        streamer: BaseStreamer | None = None,
        inputs_tensor: Tensor | None = None,
        assistant_model: Any = None,
        **kwargs: Any,
    ) -> "WeaverGenerateOutput | Tensor":
        if not isinstance(assistant_model, WeaverModel):
            return super()._assisted_decoding(
                input_ids,
                logits_processor,
                stopping_criteria,
                generation_config,
                streamer=streamer,
                inputs_tensor=inputs_tensor,
                assistant_model=assistant_model,
                **kwargs,
            )
        for name in ("synced_gpus", "tokenizer", "assistant_tokenizer"):  # checked or used up before; not model kwargs
            kwargs.pop(name, None)
        texts = generation_config.num_return_sequences
        check_inputs(input_ids, inputs_tensor, texts, kwargs)
        # `generate` has repeated every tensor for each text. They are written one after another, from one prefill.
        input_ids = input_ids[:1]
        kwargs = {name: x[::texts] if isinstance(x, Tensor) else x for name, x in kwargs.items()}
        cache, returned = kwargs[CACHE_KEY], generation_config.return_dict_in_generate
        attachment = require_attached(self, assistant_model)  # again: a streamer has seen the prompt by now
        with attachment.turn, attachment.busy():
            stats = assistant_model.stats = GenerationStats()
            sink = assistant_model.tap_sink(input_ids.device)
            runs = []
            rules = own_rules(self, texts, logits_processor, stopping_criteria, generation_config)
            for processors, criteria, seed in rules:
                generator = self._get_candidate_generator(
                    generation_config,
                    input_ids=input_ids,
                    logits_processor=processors,
                    assistant_model=assistant_model,
                    context=assistant_model.drafter_context(cache),
                )
                stats.lossy = generator.margin is not None or generator.planted is not None
                options = {"sink": sink, "stats": stats, "margin": generator.margin, "seed": seed}
                options["planted"] = generator.planted
                state = DecodeState.start(input_ids, processors, criteria, generation_config, streamer, **options)
                runs.append((generator, state))
            prompt = prefill(self, runs[-1][1], generation_config, kwargs)
            for generator, state in runs:  # the last one needs no copy of the prompt's cache
                decode(self, generator, state, prompt if state is runs[-1][1] else prompt.fork())
            # Nobody sees a cache that `generate` made and does not return: nothing needs to be committed to it.
            if texts == 1 and (returned or getattr(cache, "_is_user_defined", False)):
                state.close()
                assistant_model.keep_context(cache, generator.context, state.fresh_taps)
        output = joined([state for _, state in runs], generation_config._pad_token_tensor, cache)
        return output if returned else output.sequences


# ---- one text ----


def decode(model: Any, generator: "WeaverCandidateGenerator", state: "DecodeState", prompt: "Prompt") -> None:
    """Write one text behind the prompt, step after step."""
    try:
        begin(state, prompt)
        attachment = require_attached(model, generator.weaver)
        while not state.done:  # once, but for texts that outgrow the captured step's buffers
            context = generator.context
            step = checkout(model, attachment.steps, generator, state, prompt, attachment.asked)
            if step is None:
                decode_eagerly(model, generator, state, prompt)
            else:
                prompt, generator.context = decode_captured(step, generator, state, prompt, context)
    except BaseException:
        with suppress(Exception):  # the first error is the one to tell
            state.close()
        raise


def decode_eagerly(model: Any, generator: "WeaverCandidateGenerator", state: "DecodeState", prompt: "Prompt") -> None:
    """A step: draft a tree, verify it in one pass, emit what the target chose along it."""
    state.adopt(prompt, room=generator.budget + 1 + min(state.remaining, MAX_RESERVED))
    while not state.done:
        tree = draft(generator, state)
        logits = verify(model, state, tree)
        accept(state, tree, logits)


def decode_captured(
    step: CapturedStep,
    generator: "WeaverCandidateGenerator",
    state: "DecodeState",
    prompt: "Prompt",
    context: DrafterContext | None,
) -> tuple["Prompt", DrafterContext | None]:
    """The same steps replayed: the host reads what step k accepted while draft k + 1 runs.

    Returns:
        Where the text goes on from if it is not done but has outgrown the buffers.
    """
    first = state.length

    def redraft() -> None:
        with state.stats.timed("draft"):
            step.draft()

    step.start(generator.weaver, state, prompt, context)
    state.cache, state.fresh_taps = step.cache, None
    redraft()
    while not state.done and step.has_room:
        with state.stats.timed("verify"):
            step.cache.began()
            step.verify()
        with state.stats.timed("accept"):
            nodes = []
            if step.accept is None:  # processors in Python, or scores to return: chosen here, node after node
                nodes = step.choose(emit(state, visit(state, step.tree, step.logits)), state)
            else:
                step.accept()
            step.send()
        if generator.on_device:
            redraft()
        with state.stats.timed("accept"):
            path, tree = step.receive()
            nodes = nodes or emit(state, ((node, token, None, None) for node, token in path))
            step.cache.defer(nodes)
            state.stats.record(tree, nodes, cut=state.cut)
        state.stream(len(nodes))
        if not generator.on_device:  # reads the text on the host
            redraft()
    if state.done:
        return prompt, step.drafted(state.length - first)
    return step.leave(prompt, state.length - first)


def prefill(model: Any, state: "DecodeState", config: GenerationConfig, kwargs: dict[str, Any]) -> "Prompt":
    """Run the prompt through stock code."""
    with state.stats.timed("prefill"), state.listening():
        logits = model._prefill(state.sequences, config, kwargs).logits[:, -1:].to(state.device)
    cache = kwargs[CACHE_KEY]
    check_prefill(cache, state.sequences, config, kwargs)
    mask, positions = kwargs.get("attention_mask"), kwargs["position_ids"]
    mask = None if mask is None or bool(mask.all()) else mask.to(state.device)
    taps = None if state.sink is None else state.sink.take()
    if taps is not None and mask is not None:
        taps = taps.select(mask[:, -taps.features.shape[1] :].bool().nonzero()[:, 1][None])
    return Prompt(logits, cache, mask, positions[..., -1:].to(state.device), taps)


def begin(state: "DecodeState", prompt: "Prompt") -> None:
    """Emit the first token."""
    state.fresh_taps = prompt.taps
    if state.seed is not None:
        state.noise = GumbelField(state.seed, prompt.length)
    root = TokenTree.from_lists([[0]], [[-1]], device=state.device)  # its token is never read: the prompt is committed
    state.stream(len(emit(state, visit(state, root, prompt.logits))))
    state.stats.prefilled += 1


def draft(generator: "WeaverCandidateGenerator", state: "DecodeState") -> TokenTree:
    """Grow a tree at the last emitted token."""
    with state.stats.timed("draft"):
        taps, state.fresh_taps = state.fresh_taps, None
        context = DraftContext(state.history, taps, state.device, noise=state.noise)
        tree = generator.get_candidate_tree(context)
        if tree.batch_size != len(state.history):
            raise InvalidTreeError(
                f"{tree.batch_size} trees from builder {generator.tree_config.builder!r}",
                f"{len(state.history)}, one a sequence",
                "Fix the builder.",
            )
        # Whatever a builder drafts, the tree hangs at the text: a draft can cost speed, never change a token.
        return replace(tree, token_ids=torch.cat([context.anchors, tree.token_ids[:, 1:]], 1))


def verify(model: Any, state: "DecodeState", tree: TokenTree) -> Tensor:
    """The target's logits `[B, N, V]` after every node in one pass, once the previous step's path is committed."""
    with state.stats.timed("commit"):
        state.cache.commit()
    with state.stats.timed("verify"), state.listening():
        plan = state.cache.plan(tree)
        logits = verify_tree(model, tree.token_ids, plan, state.cache.cache)
    return logits.to(state.device)


def accept(state: "DecodeState", tree: TokenTree, logits: Tensor) -> None:
    """Emit the target's choices down the tree until it is left or a stopping rule fires; defer the path's commit."""
    with state.stats.timed("accept"):
        nodes = emit(state, visit(state, tree, logits))
        path = torch.tensor([nodes], device=state.device)
        assert isinstance(state.cache, TreeCache)
        state.cache.defer(path, torch.full_like(state.cache.lens, len(nodes)), len(nodes))
        state.take_taps(path)
        state.stats.record(tree, nodes, cut=state.cut)
    state.stream(len(nodes))


def visit(state: "DecodeState", tree: TokenTree, logits: Tensor) -> Iterator[tuple[int, int, Tensor, Tensor]]:
    """Node, chosen token, processed scores and raw logits (both `[1, V]`) down the path that the choices walk.

    Processors that read the scores alone are applied to all nodes at once. Any other sees each visited prefix once, in
    order, and none that a stopping rule leaves unvisited, because this is lazy.
    """
    if is_stateless(state.processors):
        untouched = not state.processors and state.noise is None
        scores = logits if untouched else process_nodes(state.processors, state.sequences, logits)
        nodes = torch.arange(tree.num_nodes, device=tree.device)
        choices = choose(tree, nodes, scores, state.noise, state.margin)
        if state.planted is not None:
            choices = plant(tree, choices, state.planted)
        path, tokens, lengths = follow(tree, choices)
        packed = torch.cat([path[0], tokens[0], lengths]).tolist()  # the one sync of a step
        for i in range(packed[-1]):
            yield packed[i], packed[tree.num_nodes + i], scores[:, packed[i]], logits[:, packed[i]]
        return
    children = tree.children()
    node: int | None = 0
    while node is not None:
        raw = logits[:, node].float()
        scores = state.processors(state.sequences, raw.clone())
        here = torch.tensor([node], device=tree.device)
        token = int(choose(tree, here, scores[:, None], state.noise, state.margin))
        yield node, token, scores, raw
        node = children.get((node, token))


def emit(state: "DecodeState", visits: Iterable[tuple[int, int, Tensor | None, Tensor | None]]) -> list[int]:
    """Append the visited tokens one by one until a stopping rule fires; returns the nodes they were chosen at."""
    path = []
    for node, token, scores, raw in visits:
        path.append(node)
        state.append(token, scores, raw)
        if state.done:
            break
    if state.noise is not None:
        state.noise = state.noise.advance(len(path))
    return path


# ---- the candidate generator ----


class WeaverCandidateGenerator(CandidateGenerator):
    """Drafts for one call of `generate`: trees for our loop, their best chain for the stock one (dense targets).

    Args:
        weaver: whose `tree_config` is copied, so that a change of it affects the next call.
        generation_config: its `max_length` and EOS bound the chains.
        device: the target's.
        context: what the drafter knows of the text already; None for a Weaver without a drafter.
        processors: the target's; the drafter applies those that it can to its own scores.

    Attributes:
        coupled: the builder is told the noise that the target draws with.
        on_device: drafting needs nothing of the host, so that it can be captured.
        depth_limit: of its trees.
        margin: of the rule `lossy_margin`; None for a lossless one.
        planted: an acceptance for timing, see `WeaverModel.planted_acceptance`.

    Raises:
        TreeConfigError: no such builder, or coupled acceptance with one that has no scores.
        MissingDrafterError: the builder needs a drafter, and the Weaver has none.
    """

    requires_model_outputs = False

    def __init__(
        self,
        weaver: WeaverModel,
        generation_config: GenerationConfig,
        device: torch.device,
        context: DrafterContext | None = None,
        processors: Sequence[LogitsProcessor] = (),
    ) -> None:
        self.weaver, self.context = weaver, context
        self.tree_config = replace(weaver.tree_config)
        self.budget = self.tree_config.nodes_on(device.type)
        self.max_length = generation_config.max_length
        eos = getattr(generation_config, "_eos_token_tensor", None)
        self.eos_ids = frozenset() if eos is None else frozenset(eos.tolist())
        self._build = make_builder(
            self.tree_config, self.budget, has_drafter=context is not None, has_adapter=weaver.has_adapter
        )
        self._conditional = getattr(self._build, "needs_adapter", False)
        self._pool = weaver.pool_size(self.tree_config) if self._conditional else self.budget
        self._scored = getattr(self._build, "needs_block", False)
        if self.tree_config.acceptance == "coupled" and not self._scored:
            raise TreeConfigError(
                f"acceptance 'coupled' with builder {self.tree_config.builder!r}, which does not score the vocabulary",
                "a builder that reads the drafter's scores",
                "Set `weaver.tree_config.acceptance = None`: coupled where the builder can, otherwise 'sample'.",
            )
        self.coupled = generation_config.do_sample and self._scored and self.tree_config.acceptance != "sample"
        self.margin = self.tree_config.lossy_margin if self.tree_config.acceptance == LOSSY else None
        temperature = (generation_config.temperature or 1.0) if generation_config.do_sample else 0.0
        given = (self.tree_config, temperature, weaver.config.block_size - 1)
        own: dict[str, Any] = {"coupled": self.coupled, "filters": drafter_processors(processors)}
        self._marginals, self._conditionals = DraftRule.of(*given, **own), DraftRule.of(*given, adapter=True, **own)
        self.planted = weaver.planted_acceptance
        self.on_device = self._scored or self.budget == 0
        self.depth_limit = min(self.budget, weaver.config.block_size - 1) if self._scored else self.budget

    @property
    def signature(self) -> tuple[Any, ...]:
        """Equal where two generators of one Weaver draft alike."""
        filters = tuple(type(f).__name__ + repr(vars(f)) for f in self._marginals.filters)
        rules = (self._marginals, self._conditionals)
        scales = tuple((tuple(r.temperatures), tuple(r.couplings)) for r in rules)
        return (repr(self.tree_config), self.coupled, self._pool, filters, scales)

    def get_candidate_tree(self, context: DraftContext) -> TokenTree:
        """A tree of at most `budget` drafted nodes, rooted at the last token of each row."""
        if self.context is not None:
            self.weaver.read_taps(self.context, context.taps)
        if self.budget == 0:  # plain decoding
            anchors = context.anchors
            ones = torch.ones_like(anchors)
            return TokenTree(anchors, -ones, torch.zeros_like(anchors, dtype=torch.float32), ones[:, 0], max_depth=0)
        if not self.coupled:
            context.noise = None
        if self.context is not None and self._scored:
            block = self.weaver.draft(context.anchors, self.context, self._marginals, self._pool, context.noise)
            context.block = block
            context.score = self.weaver.scorer(block, context.taps, self._conditionals) if self._conditional else None
        return self._build(context)

    def get_candidates(self, input_ids: Tensor, **kwargs: Any) -> tuple[Tensor, None]:
        """transformers' contract: `input_ids` with the tree's most probable chain behind them, and no logits.

        The chain ends at the first EOS and leaves room for the bonus token, as the stock loop expects.
        """
        tree = self.get_candidate_tree(DraftContext(input_ids.tolist(), None, input_ids.device))
        tokens = tree.token_ids[0].tolist()
        chain = [tokens[node] for node in tree.path(tree.best_leaf())[1:]]
        chain = chain[: max(self.max_length - input_ids.shape[1] - 1, 0)]
        ends = [i for i, token in enumerate(chain) if token in self.eos_ids]
        chain = chain[: ends[0] + 1] if ends else chain
        drafted = torch.tensor([chain], dtype=input_ids.dtype, device=input_ids.device).view(1, -1)
        return torch.cat([input_ids, drafted], 1), None

    def update_candidate_strategy(self, input_ids: Tensor, scores: Tensor, num_matches: int) -> None:
        """Nothing to adapt: the builder reads the accepted text at its next call."""
