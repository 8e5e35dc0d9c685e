"""The state of one text while `generate` writes it, and what a call returns of it."""

import copy
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList
from transformers.cache_utils import Cache
from transformers.generation import EosTokenCriteria, MaxLengthCriteria
from transformers.generation.streamers import BaseStreamer
from transformers.generation.utils import GenerateDecoderOnlyOutput

from .errors import UnsupportedOptionError
from .noise import GumbelField, row_seeds
from .stats import GenerationStats
from .target.cache import TreeCache
from .target.compat import CACHE_KEY
from .target.static_cache import StaticTreeCache
from .target.taps import TapSink, TapStates

__all__ = ["DecodeState", "Prompt", "WeaverGenerateOutput", "joined", "own_rules"]


@dataclass
class Prompt:
    """What the prefill leaves: the texts go on from it.

    Attributes:
        logits: `[B, 1, V]`, after the last token.
        cache: the stock cache that holds the prompt.
        mask: bool or int `[B, L]` over the cache's slots, None where none is masked.
        last_position: int64 `[B, 1]` or `[planes, B, 1]`, position ids of the last token.
        taps: what the drafter reads of it.
    """

    logits: Tensor
    cache: Cache
    mask: Tensor | None
    last_position: Tensor
    taps: TapStates | None

    @property
    def length(self) -> Tensor:
        """Tokens without padding, int64 `[B]`: the position of the next one in the text."""
        if self.mask is not None:
            return self.mask.sum(-1)
        return torch.full(self.logits.shape[:1], self.cache.get_seq_length(), device=self.logits.device)

    def fork(self) -> "Prompt":
        """The same prompt with a cache of its own."""
        return replace(self, cache=copy.deepcopy(self.cache))


@dataclass
class DecodeState:
    """Everything that writing one text changes.

    Attributes:
        tokens: int64 `[1, capacity]`, of which `length` are used; `history` mirrors them on the host.
        max_length: where the text must end, prompt included.
        eos_ids: tokens that end it.
        criteria: stopping criteria other than length and EOS, asked after every token.
        seed: int64 `[1]`, of the text's noise, None under greedy decoding.
        noise: what the next step draws with.
        margin: of the lossy rule, None for lossless acceptance.
        planted: an acceptance for timing, None for the target's own choices.
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
    stats: GenerationStats
    seed: Tensor | None = None
    margin: float | None = None
    planted: float | None = None
    cache: TreeCache | StaticTreeCache = field(init=False)
    noise: GumbelField | None = None
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
        **options: Any,
    ) -> "DecodeState":
        """The state before the prefill, from what `generate` prepared; `options` are fields."""
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
            scores=() if returned and config.output_scores else None,
            logits=() if returned and config.output_logits else None,
            **options,
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

    def append(self, token: int, scores: Tensor | None, raw: Tensor | None) -> None:
        """Add one token, and set `done` where a stopping rule fires on it."""
        if self.length == self.tokens.shape[1]:
            self.tokens = torch.cat([self.tokens, self.tokens.new_zeros(1, max(64, self.length))], 1)
        self.tokens[:, self.length] = token
        self.length += 1
        self.history[0].append(token)
        if self.scores is not None and scores is not None:
            self.scores += (scores.to(torch.float32, copy=True),)  # a view would keep all nodes' logits alive
        if self.logits is not None and raw is not None:
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

    def adopt(self, prompt: Prompt, room: int) -> None:
        """Decode eagerly from the prompt's cache, with `room` slots behind it."""
        self.cache = TreeCache(prompt.cache, prompt.mask, prompt.last_position[..., 0] + 1, room)

    def listening(self) -> Any:
        return nullcontext() if self.sink is None else self.sink.listening()

    def take_taps(self, path: Tensor) -> None:
        """Keep the tap states of the nodes on `path` of the last forward, int64 `[B, P]`."""
        if self.sink is not None:
            self.fresh_taps = self.sink.take().select(path)

    def close(self) -> None:
        """Give the stock cache back, with everything emitted but the last token; also after an error."""
        if hasattr(self, "cache"):
            self.cache.release()


@dataclass
class WeaverGenerateOutput(GenerateDecoderOnlyOutput):
    """transformers' output of decoding without beams, with what the Weaver did.

    Attributes:
        stats: acceptance and time of this call.
    """

    stats: GenerationStats | None = None


def own_rules(
    model: PreTrainedModel,
    texts: int,
    processors: LogitsProcessorList,
    criteria: StoppingCriteriaList,
    config: GenerationConfig,
) -> Iterator[tuple[LogitsProcessorList, StoppingCriteriaList, Tensor | None]]:
    """Processors, stopping criteria and seed of each text of a call.

    Processors may remember what they have seen (guidance, grammars), so every text but the first gets copies, which
    share the model. One seed is drawn from torch's CPU generator; text `i` is the same however many there are.

    Raises:
        UnsupportedOptionError: something among them cannot be copied.
    """
    seeds: list[Tensor | None] = [None] * texts
    if config.do_sample:
        seeds = list(row_seeds(int(torch.randint(2**63 - 1, ())), texts, model.device).split(1))
    try:
        copies = [copy.deepcopy((processors, criteria), {id(model): model}) for _ in range(texts - 1)]
    except Exception as error:
        raise UnsupportedOptionError(
            f"a logits processor or stopping criterion that cannot be copied ({error})",
            f"ones that can be: each of the {texts} sequences needs its own",
            "Call `generate` once for each sequence, with a new processor.",
        ) from error
    for (own_processors, own_criteria), seed in zip([(processors, criteria), *copies], seeds, strict=True):
        yield own_processors, own_criteria, seed


def joined(states: list[DecodeState], pad: Tensor | None, cache: Cache) -> WeaverGenerateOutput:
    """The output of a call: its texts below each other, the shorter ones filled up with the padding token.

    A text that has ended scores the padding token with 0 and all else with -inf from there on. The cache is returned
    for a single text; those of several differ in length and are not.
    """
    if len(states) == 1:
        state = states[0]
        output = WeaverGenerateOutput(sequences=state.sequences.clone(), scores=state.scores, logits=state.logits)
        output[CACHE_KEY] = cache
    else:
        filler = 0 if pad is None else int(pad)
        rows = [state.sequences[0] for state in states]
        sequences = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=filler)
        output = WeaverGenerateOutput(
            sequences=sequences,
            scores=_stacked([state.scores for state in states], filler),
            logits=_stacked([state.logits for state in states], filler),
        )
    output.stats = states[0].stats
    return output


def _stacked(rows: list[tuple[Tensor, ...] | None], filler: int) -> tuple[Tensor, ...] | None:
    """Per-token tensors `[1, V]` of each text as per-token tensors `[texts, V]`."""
    given = [row for row in rows if row is not None]
    if len(given) < len(rows):
        return None
    ended = torch.full_like(given[0][0], float("-inf"))
    ended[:, filler] = 0.0
    length = max(len(row) for row in given)
    return tuple(torch.cat([row[i] if i < len(row) else ended for row in given]) for i in range(length))
