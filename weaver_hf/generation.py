"""Tree decoding inside `generate`: the loop, one step, and the candidate generator.

The only file that knows all parts. A step drafts a tree, verifies it in one pass of the target, and emits the tokens
that the target itself chose along it; the accepted path is committed at the front of the next verification, because
until then a stopping rule may shorten it.
"""

from collections.abc import Iterable, Iterator
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList
from transformers.generation import CandidateGenerator, EosTokenCriteria, GenerationMode, MaxLengthCriteria
from transformers.generation.streamers import BaseStreamer
from transformers.generation.utils import GenerateDecoderOnlyOutput, GenerationMixin

from .acceptance import follow
from .drafter import DrafterContext
from .errors import InvalidTreeError
from .modeling_weaver import WeaverModel
from .options import check_inputs, check_options, check_prefill, require_attached
from .proposal import DraftContext, make_builder
from .stats import GenerationStats
from .target.cache import TreeCache
from .target.compat import CACHE_KEY
from .target.taps import TapSink, TapStates
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
        weaver = generation_mode_kwargs.get("assistant_model")
        if isinstance(weaver, WeaverModel):
            check_options(self, weaver, generation_mode, generation_config, generation_mode_kwargs)
        else:
            super()._validate_generation_mode(generation_mode, generation_config, generation_mode_kwargs)

    def _get_candidate_generator(self, generation_config: GenerationConfig, **kwargs: Any) -> CandidateGenerator:
        weaver = kwargs.get("assistant_model")
        if isinstance(weaver, WeaverModel):
            device = kwargs["input_ids"].device
            return WeaverCandidateGenerator(weaver, generation_config, device, kwargs.get("context"))
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
        rules = (input_ids, logits_processor, stopping_criteria, generation_config)
        if not isinstance(assistant_model, WeaverModel):
            return super()._assisted_decoding(
                *rules, streamer=streamer, inputs_tensor=inputs_tensor, assistant_model=assistant_model, **kwargs
            )
        for name in ("synced_gpus", "tokenizer", "assistant_tokenizer"):  # checked or used up before; not model kwargs
            kwargs.pop(name, None)
        check_inputs(input_ids, inputs_tensor, kwargs)
        attachment = require_attached(self, assistant_model)  # again: a streamer has seen the prompt by now
        with attachment.turn, attachment.busy():
            cache = kwargs[CACHE_KEY]
            context = assistant_model.drafter_context(cache)
            generator = self._get_candidate_generator(
                generation_config, input_ids=input_ids, assistant_model=assistant_model, context=context
            )
            state = DecodeState.start(*rules, streamer, assistant_model.tap_sink(input_ids.device))
            assistant_model.stats = state.stats
            # Nobody sees a cache that `generate` made and does not return: nothing needs to be committed to it.
            seen = generation_config.return_dict_in_generate or getattr(cache, "_is_user_defined", False)
            try:
                prefill(self, state, generation_config, kwargs, room=generator.budget + 1)
                while not state.done:
                    tree = draft(generator, state)
                    logits = verify(self, state, tree)
                    accept(state, tree, logits)
            except BaseException:
                with suppress(Exception):  # the first error is the one to tell
                    state.close()
                raise
            if seen:
                state.close()
                assistant_model.keep_context(cache, context, state.fresh_taps)
        return state.output(cache) if generation_config.return_dict_in_generate else state.sequences.clone()


# ---- one step ----


def prefill(model: Any, state: "DecodeState", config: GenerationConfig, kwargs: dict[str, Any], room: int) -> None:
    """Run the prompt through stock code, adopt its cache, and emit the first token."""
    with state.stats.timed("prefill"), state.listening():
        logits = model._prefill(state.sequences, config, kwargs).logits[:, -1:].to(state.device)
    check_prefill(kwargs[CACHE_KEY], state.sequences, config, kwargs)
    mask, positions = kwargs.get("attention_mask"), kwargs["position_ids"]
    mask = None if mask is None or bool(mask.all()) else mask.to(state.device)
    next_position = positions[..., -1].to(state.device) + 1
    state.cache = TreeCache(kwargs[CACHE_KEY], mask, next_position, min(state.remaining, MAX_RESERVED) + room)
    state.take_taps(mask=mask)
    root = TokenTree.from_lists([[0]], [[-1]], device=state.device)  # its token is never read: the prompt is committed
    state.stream(len(emit(state, visit(state, root, logits))))
    state.stats.prefilled = True


def draft(generator: "WeaverCandidateGenerator", state: "DecodeState") -> TokenTree:
    """Grow a tree at the last emitted token."""
    with state.stats.timed("draft"):
        taps, state.fresh_taps = state.fresh_taps, None
        context = DraftContext(state.history, taps, state.device)
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
        outputs = model(
            input_ids=tree.token_ids,
            position_ids=plan.position_ids,
            attention_mask=dict.fromkeys(model.config.layer_types),  # none: the plan says what a node sees
            use_cache=True,
            return_dict=True,
            weaver_tree=plan,
            **{CACHE_KEY: state.cache.cache},
        )
        state.cache.check_verified(plan)
    return outputs.logits.to(state.device)


def accept(state: "DecodeState", tree: TokenTree, logits: Tensor) -> None:
    """Emit the target's choices down the tree until it is left or a stopping rule fires; defer the path's commit."""
    with state.stats.timed("accept"):
        nodes = emit(state, visit(state, tree, logits))
        path = torch.tensor([nodes], device=state.device)
        state.cache.defer(path, torch.full_like(state.cache.lens, len(nodes)), len(nodes))
        state.take_taps(path)
        state.stats.record(tree, nodes, cut=state.cut)
    state.stream(len(nodes))


def visit(state: "DecodeState", tree: TokenTree, logits: Tensor) -> Iterator[tuple[int, int, Tensor, Tensor]]:
    """Node, chosen token, processed scores and raw logits (both `[1, V]`) down the path that the choices walk.

    Lazy: a logits processor sees each visited prefix once, in order, and none that a stopping rule leaves unvisited.
    """
    if not state.processors:
        path, tokens, lengths = follow(tree, logits.argmax(-1))
        packed = torch.cat([path[0], tokens[0], lengths]).tolist()  # the one sync of a step
        for i in range(packed[-1]):
            raw = logits[:, packed[i]]
            yield packed[i], packed[tree.num_nodes + i], raw, raw
        return
    children = tree.children()
    node: int | None = 0
    while node is not None:
        raw = logits[:, node].float()
        scores = state.processors(state.sequences, raw.clone())
        token = int(scores.argmax(-1))
        yield node, token, scores, raw
        node = children.get((node, token))


def emit(state: "DecodeState", visits: Iterable[tuple[int, int, Tensor, Tensor]]) -> list[int]:
    """Append the visited tokens one by one until a stopping rule fires; returns the nodes they were chosen at."""
    path = []
    for node, token, scores, raw in visits:
        path.append(node)
        state.append(token, scores, raw)
        if state.done:
            break
    return path


# ---- the state of a call ----


@dataclass
class DecodeState:
    """Everything that one call of `generate` changes.

    Attributes:
        tokens: int64 `[1, capacity]`, of which `length` are used; `history` mirrors them on the host.
        max_length: where the text must end, prompt included.
        eos_ids: tokens that end it.
        criteria: stopping criteria other than length and EOS, asked after every token.
        scores, logits: processed scores and raw logits of each new token, None where they are not returned.
        fresh_taps: tap states of the rows that entered the cache last.
        cut: a length limit ended the text.
    """

    tokens: Tensor
    length: int
    history: list[list[int]]
    max_length: int
    eos_ids: frozenset[int]
    criteria: StoppingCriteriaList
    processors: LogitsProcessorList
    streamer: BaseStreamer | None
    sink: TapSink | None
    scores: tuple[Tensor, ...] | None
    logits: tuple[Tensor, ...] | None
    cache: TreeCache = field(init=False)
    stats: GenerationStats = field(default_factory=GenerationStats)
    fresh_taps: TapStates | None = None
    done: bool = False
    cut: bool = False

    @classmethod
    def start(
        cls,
        input_ids: Tensor,
        processors: LogitsProcessorList,
        criteria: StoppingCriteriaList,
        config: GenerationConfig,
        streamer: BaseStreamer | None,
        sink: TapSink | None,
    ) -> "DecodeState":
        """The state before the prefill, from what `generate` prepared."""
        limits = [c.max_length for c in criteria if type(c) is MaxLengthCriteria]
        eos = [c.eos_token_id.tolist() for c in criteria if type(c) is EosTokenCriteria]
        others = [c for c in criteria if type(c) not in (MaxLengthCriteria, EosTokenCriteria)]
        returned = config.return_dict_in_generate
        return cls(
            tokens=input_ids.clone(),
            length=input_ids.shape[1],
            history=input_ids.tolist(),
            max_length=min([config.max_length, *limits]),
            eos_ids=frozenset(token for ids in eos for token in ids),
            criteria=StoppingCriteriaList(others),
            processors=processors,
            streamer=streamer,
            sink=sink,
            scores=() if returned and config.output_scores else None,
            logits=() if returned and config.output_logits else None,
        )

    @property
    def sequences(self) -> Tensor:
        """Prompt and emitted tokens, int64 `[1, length]`."""
        return self.tokens[:, : self.length]

    @property
    def device(self) -> torch.device:
        return self.tokens.device

    @property
    def remaining(self) -> int:
        return self.max_length - self.length

    def append(self, token: int, scores: Tensor, raw: Tensor) -> None:
        """Add one token, and set `done` where a stopping rule fires on it."""
        if self.length == self.tokens.shape[1]:
            self.tokens = torch.cat([self.tokens, self.tokens.new_zeros(1, max(64, self.length))], 1)
        self.tokens[:, self.length] = token
        self.length += 1
        self.history[0].append(token)
        if self.scores is not None:
            self.scores += (scores.to(torch.float32, copy=True),)  # a view would keep all nodes' logits alive
        if self.logits is not None:
            self.logits += (raw.to(torch.float32, copy=True),)
        self.cut = self.remaining <= 0 and token not in self.eos_ids
        self.done = self.cut or token in self.eos_ids
        if self.criteria and bool(self.criteria(self.sequences, self.scores).all()):
            self.done, self.cut = True, False

    def stream(self, count: int) -> None:
        """Hand the streamer the last `count` tokens, those of one step."""
        if self.streamer is not None:
            self.streamer.put(torch.tensor(self.history[0][-count:]))
            if self.done:
                self.streamer.end()

    def listening(self) -> Any:
        return nullcontext() if self.sink is None else self.sink.listening()

    def take_taps(self, path: Tensor | None = None, mask: Tensor | None = None) -> None:
        """Keep the tap states of the last forward: of the nodes on `path`, or of the rows that `mask` does not pad."""
        if self.sink is None:
            return
        states = self.sink.take()
        if mask is not None:
            path = mask[:, -states.features.shape[1] :].bool().nonzero()[:, 1][None]
        self.fresh_taps = states if path is None else states.select(path)

    def close(self) -> None:
        """Give the stock cache back, with everything emitted but the last token; also after an error."""
        if hasattr(self, "cache"):
            self.cache.release()

    def output(self, cache: Any) -> "WeaverGenerateOutput":
        return WeaverGenerateOutput(
            sequences=self.sequences.clone(),
            scores=self.scores,
            logits=self.logits,
            stats=self.stats,
            **{CACHE_KEY: cache},
        )


@dataclass
class WeaverGenerateOutput(GenerateDecoderOnlyOutput):
    """transformers' output of greedy decoding, with what the Weaver did.

    Attributes:
        stats: acceptance and time of this call.
    """

    stats: GenerationStats | None = None


# ---- the candidate generator ----


class WeaverCandidateGenerator(CandidateGenerator):
    """Drafts for one call of `generate`: trees for our loop, their best chain for the stock one (dense targets).

    Args:
        weaver: whose `tree_config` is copied, so that a change of it affects the next call.
        generation_config: its `max_length` and EOS bound the chains.
        device: the target's.
        context: what the drafter knows of the text already; None for a Weaver without a drafter.
    """

    requires_model_outputs = False

    def __init__(
        self,
        weaver: WeaverModel,
        generation_config: GenerationConfig,
        device: torch.device,
        context: DrafterContext | None = None,
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
        depths = weaver.config.block_size - 1
        self._temperatures = self.tree_config.temperatures_at(0.0, depths)
        self._warmths = self.tree_config.temperatures_at(0.0, depths, adapter=True)

    def get_candidate_tree(self, context: DraftContext) -> TokenTree:
        """A tree of at most `budget` drafted nodes, rooted at the last token of each row."""
        if self.context is not None:
            self.weaver.read_taps(self.context, context.taps)
            if getattr(self._build, "needs_block", False):
                block = self.weaver.draft(context.anchors, self.context, self._temperatures, pool=self._pool)
                score = self.weaver.scorer(block, context.taps, self._warmths) if self._conditional else None
                context = replace(context, block=block, score=score)
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
