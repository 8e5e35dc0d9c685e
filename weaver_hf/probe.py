"""A short probe of a drafter: how well it predicts its target's own text, as it is declared and as it might be meant.

The target writes a few answers; the drafter then runs on blocks at their positions, all of a text in one pass, under a
`Setup`: everything about it that an artifact can declare wrongly while its shapes still fit.
"""

import copy
import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .drafter import BlockDrafter
from .modeling_weaver import WeaverModel
from .target.families import family_of
from .target.taps import TapSink
from .training.blocks import (
    BlockBatch,
    BlockNetwork,
    adapter_logits,
    make_blocks,
    run_blocks,
    states_before,
    target_pass,
)
from .training.data import Sequences, complete, tokenizer_fingerprint

__all__ = [
    "Probe",
    "Scores",
    "Setup",
    "difference",
    "fingerprint",
    "identity",
    "neighbours",
    "questions",
    "rendered",
    "write_text",
]

QUESTIONS = (
    "Tom has 3 boxes. Each box holds 12 pencils. He gives 8 pencils to Ana. How many pencils does Tom have left?",
    "Write a Python function that returns the largest number in a list, and explain how it works.",
    "What are three things that make a good story?",
    "Explain in a few sentences why the sky is blue.",
    "A train leaves at 9:40 and arrives at 13:05. How long is the journey? Show your steps.",
    "Write a short letter to a friend about a walk by the sea.",
    "Write a Python class for a stack with push, pop and peek.",
    "Describe how to make a pot of tea, step by step.",
)
NEW_TOKENS = 64
TEMPERATURES = (0.0, 0.7, 1.0)
BLOCKS = 6  # of each text
NEAR = 8  # depths whose likelihoods are compared
ROPE_BASES = (1e4, 5e5, 1e6, 1e7)  # of published targets
MOST_MASKS = 40  # candidates that are tried
LEAST_LOG_Q = -8.0  # a certain error counts as this many nats: one token must not outweigh all others
STANDARD_ERRORS, LEAST_GAIN = 2.0, 1.03  # of a setup that is clearly better


@dataclass(frozen=True)
class Setup:
    """How a drafter is run.

    Attributes:
        taps: ids of the target's layers that it reads.
        shift: slot `k` is taken to predict the token at `anchor + k + shift`; 0 is DFlash's.
        mask: token of the slots to be predicted.
        causal, window: of each of its layers, inside the block and backwards; see `WeaverConfig.layer_types`.
        theta: of its rotary positions.
        dtype: that it computes in.
    """

    taps: tuple[int, ...]
    shift: int
    mask: int
    causal: tuple[bool, ...]
    window: tuple[int | None, ...]
    theta: float
    dtype: torch.dtype

    @classmethod
    def declared(cls, weaver: WeaverModel, dtype: torch.dtype) -> "Setup":
        """What the artifact says of itself, computed in the target's `dtype`."""
        assert weaver.drafter is not None
        layers: Iterable[Any] = weaver.drafter.layers
        return cls(
            taps=tuple(weaver.config.target_layer_ids),
            shift=0,
            mask=weaver.config.mask_token_id,
            causal=tuple(layer.self_attn.causal for layer in layers),
            window=tuple(layer.self_attn.window for layer in layers),
            theta=weaver.drafter.theta,
            dtype=dtype,
        )

    def applied(self, drafter: BlockDrafter) -> BlockDrafter:
        """The drafter run like this; it shares the weights where the dtype is theirs."""
        other = copy.deepcopy(drafter, {id(p): p for p in drafter.parameters()})
        if any(p.dtype != self.dtype for p in drafter.parameters()):
            other = copy.deepcopy(drafter).to(self.dtype)
        other.theta = self.theta
        layers: Iterable[Any] = other.layers
        for layer, causal, window in zip(layers, self.causal, self.window, strict=True):
            layer.self_attn.causal, layer.self_attn.window = causal, window
        return other


@dataclass(frozen=True)
class Scores:
    """How well a drafter predicts the text.

    Attributes:
        accepted: `[X]`, drafted tokens that each block accepts before the first wrong one or the text's end.
        expected: `[X]`, the same if the drafter drew its tokens: smooth, so that short texts tell setups apart.
        log_q: `[X]`, mean log-probability of each block's next tokens, NaN where it has none to compare.
        texts: int64 `[X]`, the text that each block is from.
        top1: share of right tokens by depth, None where no text reaches it.
    """

    accepted: Tensor
    expected: Tensor
    log_q: Tensor
    texts: Tensor
    top1: list[float | None]

    @property
    def mean(self) -> float:
        """Drafted tokens accepted a step."""
        return float(self.accepted.mean())

    def clearly_better_than(self, other: "Scores") -> bool:
        """No fewer tokens accepted, more expected, and both smooth measures higher by some standard errors.

        Of the two, likelihood alone would reward doubt, and expected acceptance alone sharpness.
        """
        gains = self.mean >= other.mean and float(self.expected.mean()) > LEAST_GAIN * float(other.expected.mean())
        return gains and all(
            errors(mine - theirs, self.texts) > STANDARD_ERRORS
            for mine, theirs in ((self.expected, other.expected), (self.log_q, other.log_q))
        )

    @classmethod
    def of(cls, parts: Sequence[tuple[Tensor, Tensor, Tensor]]) -> "Scores":
        """From right tokens, valid labels (bool) and log-probabilities, `[A, D]` each, of every text."""
        hits = torch.cat([hit & valid for hit, valid, _ in parts])
        valid = torch.cat([valid for _, valid, _ in parts])
        log_q = torch.cat([part[2] for part in parts]).double().nan_to_num(LEAST_LOG_Q).clamp(min=LEAST_LOG_Q)
        texts = torch.cat([torch.full((len(part[0]),), i) for i, part in enumerate(parts)])
        counts = valid.sum(0)
        return cls(
            accepted=hits.double().cumprod(-1).sum(-1),
            expected=(log_q.exp() * valid).cumprod(-1).sum(-1),
            log_q=log_q.masked_fill(~valid, torch.nan)[:, :NEAR].nanmean(-1),
            texts=texts,
            top1=[float(right) / int(n) if n else None for right, n in zip(hits.sum(0), counts)],
        )


def errors(gains: Tensor, texts: Tensor) -> float:
    """By how many standard errors the mean of `gains [X]` is above 0; texts, not their blocks, are independent."""
    known = ~gains.isnan()
    gains, texts = gains[known], texts[known]
    if not len(gains):
        return 0.0
    sums = gains.new_zeros(int(texts.max()) + 1).index_add_(0, texts, gains - gains.mean())
    return float(gains.sum() / sums.norm().clamp(min=1e-9))


class Passed(NamedTuple):
    """What one pass of the target over one text leaves.

    Attributes:
        ids: int64 `[1, S]`; blocks: at some of its own positions.
        layers: its states `[1, S, H]` by layer id; before: those of the rows that chose the anchors, `[1, A, H]`.
    """

    ids: Tensor
    blocks: BlockBatch
    layers: dict[int, Tensor]
    before: Tensor


class Drafted(NamedTuple):
    """The drafter's final states `[1, A, D, H]` and logits `[1, A, D, V]` on one text."""

    passed: Passed
    hidden: Tensor
    logits: Tensor


class Probe:
    """A target and a Weaver beside it (attached or not) on the target's own text.

    Args:
        target: unwrapped, of a supported family.
        weaver: on the target's device and in its dtype, with a drafter of its hidden size and vocabulary.
        text: what the target wrote, see `write_text`.
    """

    def __init__(self, target: Any, weaver: WeaverModel, text: Sequences) -> None:
        self.target, self.weaver, self.text = target, weaver, text
        self.declared = Setup.declared(weaver, target.dtype)
        self._scores: dict[Setup, Scores] = {}

    @cached_property
    def passes(self) -> list[Passed]:
        """The target on every text, all layers kept that the drafter could be meant to read."""
        target, depths = self.target, self.weaver.config.block_size - 1
        count = target.config.get_text_config().num_hidden_layers
        near = {tap + shift for tap in self.declared.taps for shift in (-2, -1, 0, 1, 2)}  # a repair's neighbours too
        kept = sorted(near & set(range(count)))
        sink = TapSink(family_of(target).decoder_of(target), kept, target.device)
        passes = []
        for index in range(len(self.text)):
            first, length = int(self.text.prompt_lengths[index]), int(self.text.lengths[index])
            if length - first < 2:  # nothing behind the first anchor
                continue
            ids = self.text.batch([index], length, 0)["input_ids"].to(target.device)
            taps, _ = target_pass(target, sink, ids)
            blocks = min(BLOCKS, length - 1 - first)
            anchors = torch.linspace(first, length - 2, blocks, device=target.device).round().long()[None]
            valid = torch.ones_like(anchors, dtype=torch.bool)
            made = make_blocks(ids, torch.tensor([length], device=target.device), anchors, valid, depths)
            layers = dict(zip(kept, taps.features.to(target.dtype).chunk(len(kept), -1), strict=True))
            passes.append(Passed(ids, made, layers, states_before(taps, anchors).to(target.dtype)))
        return passes

    @torch.no_grad()
    def drafts(self, setup: Setup) -> Iterator[Drafted]:
        """The drafter under `setup` on every text."""
        target, drafter = self.target, self.weaver.drafter
        assert drafter is not None
        network = BlockNetwork(setup.applied(drafter))
        for passed in self.passes:
            features = torch.cat([passed.layers[tap] for tap in setup.taps], -1).to(setup.dtype)
            depths = passed.blocks.labels.shape[-1]
            embedding = target.get_input_embeddings()
            args = (embedding, setup.mask, features, passed.ids, passed.blocks.anchors, depths)
            hidden = run_blocks(network, *args)
            yield Drafted(passed, hidden, target.get_output_embeddings()(hidden.to(target.dtype)))

    def scores(self, setup: Setup) -> Scores:
        """What chains of the drafter's best tokens would have accepted of the text under `setup`."""
        if setup not in self._scores:
            parts: dict[int, list[tuple[Tensor, Tensor, Tensor]]] = {shift: [] for shift in (-1, 0, 1)}
            for draft in self.drafts(setup):
                for part, found in zip(parts.values(), matches(draft.logits[0], draft.passed.blocks, list(parts))):
                    part.append(found)  # alignment needs no pass of its own
            for shift, part in parts.items():
                self._scores[replace(setup, shift=shift)] = Scores.of(part)
        return self._scores[setup]

    @torch.no_grad()
    def adapter_scores(self, setup: Setup, pool: int) -> Scores:
        """The same for the adapter's best tokens of the drafter's `pool` best; likelihoods within the pool."""
        adapter, dtype = self.weaver.adapter, self.target.dtype
        parts: list[tuple[Tensor, Tensor, Tensor]] = []
        assert adapter is not None
        for passed, hidden, logits in self.drafts(setup):
            raw, ids = logits.topk(pool, -1)
            tokens = torch.cat([passed.ids.gather(1, passed.blocks.anchors)[..., None], passed.blocks.labels], -1)
            given = (passed.before, hidden.to(dtype), tokens[..., :-1], raw, ids)
            conditional = adapter_logits(self.target, adapter, *given)
            whole = torch.full_like(logits, float("-inf"), dtype=torch.float32).scatter(-1, ids, conditional)
            parts += matches(whole[0], passed.blocks, [0])
        return Scores.of(parts)

    def reach(self, setup: Setup, pools: Sequence[int]) -> list[float]:
        """What the best scorer could accept of the drafter's `pool` best tokens a depth, for each of `pools`."""
        held: list[list[Tensor]] = [[] for _ in pools]
        for passed, _, logits in self.drafts(setup):
            inside = logits.topk(max(pools), -1).indices == passed.blocks.labels[..., None]
            for part, pool in zip(held, pools):
                right = inside[0, ..., :pool].any(-1) & (passed.blocks.weights[0] > 0)
                part.append(right.long().cumprod(-1).sum(-1).float())
        return [float(torch.cat(part).mean()) for part in held]


def matches(logits: Tensor, blocks: BlockBatch, shifts: Sequence[int]) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """For each shift: where the best of `logits [A, D, V]` is the token at the slot's place plus the shift, where there
    is such a token, and its log-probability; `[A, D]` each.

    Shifted, depths count from the first slot whose token is a label: the next one's (ahead), or slot 2 (behind).
    """
    best, total = logits.argmax(-1), logits.float().logsumexp(-1)
    depths = logits.shape[1]
    for shift in shifts:
        slots, places = slice(max(-shift, 0), depths - max(shift, 0)), slice(max(shift, 0), depths - max(-shift, 0))
        labels, valid = blocks.labels[0, :, places], blocks.weights[0, :, places] > 0
        log_q = logits[:, slots].gather(-1, labels[..., None])[..., 0].float() - total[:, slots]
        yield (best[:, slots] == labels).cpu(), valid.cpu(), log_q.cpu()


def questions(tokenizer: Any, **options: Any) -> list[list[int]]:
    """The built-in prompts as token ids: a user's turn each, or plain text where the tokenizer has no chat template.

    Args:
        options: of the chat template, e.g. `enable_thinking`.
    """
    return [tokenizer(rendered(tokenizer, question, **options)).input_ids for question in QUESTIONS]


def rendered(tokenizer: Any, question: str, **options: Any) -> str:
    """A question as the target reads it."""
    if not tokenizer.chat_template:
        return question
    chat = [{"role": "user", "content": question}]
    return tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True, **options)


def write_text(target: Any, prompts: Sequence[list[int]], max_new_tokens: int = NEW_TOKENS) -> Sequences:
    """What the target writes to each prompt, greedily (up to where it starts to loop) and drawn at 0.7 and 1.

    torch's generators are as before afterwards.
    """
    pad = target.config.get_text_config().pad_token_id or 0
    with torch.random.fork_rng(devices=[target.device] if target.device.type == "cuda" else []):
        torch.manual_seed(0)
        parts = [complete(target, prompts, temperature, max_new_tokens, pad) for temperature in TEMPERATURES]
    joined = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
    lengths = joined["lengths"].long()
    prompt_lengths, temperatures = joined["prompt_lengths"].long(), joined["temperatures"]
    return Sequences(joined["tokens"], lengths.cumsum(0) - lengths, lengths, prompt_lengths, temperatures)


def identity(target: Any, tokenizer: Any) -> dict[str, str | None]:
    """SHA-256 of what a drafter is made for: the target's weights, its tokenizer's vocabulary, and a rendered turn.

    Weights are sampled (8 of each tensor, in bf16, so that a cast does not matter); None where some are offloaded.
    """
    weights = hashlib.sha256()
    parameters = sorted(target.named_parameters())
    for name, parameter in parameters:
        if not parameter.is_meta:
            places = torch.linspace(0, parameter.numel() - 1, 8, device=parameter.device).round().long()
            sample = parameter.detach().flatten()[places].to(torch.bfloat16).view(torch.int16)
            weights.update(f"{name}{sample.tolist()}".encode())
    offloaded = any(parameter.is_meta for _, parameter in parameters)
    return {
        "weights": None if offloaded else weights.hexdigest(),
        "vocabulary": tokenizer_fingerprint(tokenizer),
        "turn": fingerprint(rendered(tokenizer, QUESTIONS[0])),
    }


def fingerprint(text: str) -> str:
    """SHA-256 of a text."""
    return hashlib.sha256(text.encode()).hexdigest()


def neighbours(target: Any, tokenizer: Any, setup: Setup) -> Iterator[tuple[str, Setup]]:
    """Setups that differ in one respect, with its name."""
    text = target.config.get_text_config()
    for shift in (-1, 1):
        taps = tuple(tap + shift for tap in setup.taps)
        if all(0 <= tap < text.num_hidden_layers for tap in taps):
            yield "taps", replace(setup, taps=taps)
    for shift in (-1, 1):
        if setup.shift == 0:
            yield "alignment", replace(setup, shift=shift)
    for mask in mask_candidates(tokenizer, text.vocab_size):
        if mask != setup.mask:
            yield "mask_token", replace(setup, mask=mask)
    for causal in (False, True):
        if setup.causal != (causal,) * len(setup.causal):
            yield "causality", replace(setup, causal=(causal,) * len(setup.causal))
    full = (None,) * len(setup.window)
    if setup.window != full:
        yield "window", replace(setup, window=full)
        yield "window", replace(setup, window=full, causal=(False,) * len(setup.causal))
    rope = getattr(text, "rope_parameters", None) or {}
    for theta in sorted({*ROPE_BASES, float(rope.get("rope_theta", ROPE_BASES[0]))}):
        if theta != setup.theta:
            yield "rope", replace(setup, theta=theta)
    if setup.dtype != torch.float32:
        yield "dtype", replace(setup, dtype=torch.float32)


def mask_candidates(tokenizer: Any, size: int) -> list[int]:
    """Tokens that could have been meant: special and added ones, those named mask first, and the row behind them."""
    added = {str(token): index for index, token in tokenizer.added_tokens_decoder.items()}
    order = sorted(added, key=lambda token: ("mask" not in token.lower(), added[token]))
    ids = [added[token] for token in order] + list(tokenizer.all_special_ids) + [len(tokenizer)]
    return [index for index in dict.fromkeys(ids) if 0 <= index < size][:MOST_MASKS]


def difference(name: str, before: Setup, after: Setup) -> tuple[str, str, str]:
    """What was declared, what does better, and the line to change."""
    if name == "taps":
        ids = list(after.taps)
        return f"target_layer_ids {list(before.taps)}", f"{ids}", f'Set "target_layer_ids": {ids} in config.json.'
    if name == "alignment":
        where = "next" if after.shift > 0 else "previous"
        fix = "Convert or train it for slots that predict their own position; check its labels for a shift by one."
        return f"slots that predict the {where} position", "slots that predict their own position", fix
    if name == "mask_token":
        fix = f'Set "mask_token_id": {after.mask} in config.json.'
        return f"mask_token_id {before.mask}", f"{after.mask}", fix
    if name == "causality":
        value = str(after.causal[0]).lower()
        fix = f'Set "is_causal": {value} in config.json.'
        return f"causal blocks {list(before.causal)}", f"{list(after.causal)}", fix
    if name == "window":
        types = ["full_attention"] * len(after.window)
        fix = f'Set "layer_types": {types} in config.json.'.replace("'", '"')
        return f"windows {list(before.window)}", "none", fix
    if name == "rope":
        return f"rope_theta {before.theta:g}", f"{after.theta:g}", f'Set "rope_theta": {after.theta:g} in config.json.'
    fix = "Load the target in bfloat16 or float32; the drafter follows its dtype."
    return f"a drafter that computes in {before.dtype}", f"{after.dtype}", fix.replace("torch.", "")
