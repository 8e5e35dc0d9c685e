"""`weaver-hf certify`: is a text that was written with trees the one that stock code writes?

A text is replayed token by token in stock code, along itself, so that one difference does not hide what comes after:
at each place stock's own choice and logits are known. What stock's prefill of the same text says there is the measure:
two ways through the same stock code round differently too, and no way through ours is asked to be closer.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from .errors import EmptyPromptError, WeaverError
from .modeling_weaver import WeaverModel
from .target.attach import unwrap
from .target.compat import CACHE_KEY

__all__ = ["Certificate", "Replay", "Text", "certify", "read_texts", "replay", "write_texts"]

# How far logits may be from stock's, of their largest: what stock's two ways differ by, some times over (trees round
# differently from both), or this where they hardly differ. Faults of a commit are a hundred times larger.
TIMES, LEAST = 8.0, 1e-4


class TextError(WeaverError, ValueError):
    """A file of texts that cannot be read."""


@dataclass(frozen=True)
class Text:
    """Token ids of a prompt and of what was written to it, greedily.

    Attributes:
        logits: fp32 `[T, V]`, the raw logits that each token was chosen by, where they are known.
        after: fp32 `[V]`, logits of a stock step on the cache that the call returned, where it is known: they show the
            last commit, which no token of the text depends on.
    """

    prompt_ids: list[int]
    output_ids: list[int]
    logits: Tensor | None = None
    after: Tensor | None = None


@dataclass
class Replay:
    """One text against stock code.

    Attributes:
        prompt_ids, output_ids: the text.
        first: index of the first token that stock would not have chosen behind those before it; None: none.
        gap: how much larger stock's logit of its own choice is there.
        allowed_gap: the gap up to which rounding explains a difference.
        differences: tokens that stock would not have chosen.
        drift: largest distance of the text's own logits from stock decoding's, of the largest logit; None: not known.
        drift_at: the token at which it is reached; the number of tokens stands for the returned cache.
        stock_differences: places where stock's prefill and its decoding choose differently on this text.
        stock_drift: largest distance of their logits, of the largest.
    """

    prompt_ids: list[int]
    output_ids: list[int]
    first: int | None
    gap: float
    allowed_gap: float
    differences: int
    drift: float | None
    drift_at: int | None
    stock_differences: int
    stock_drift: float

    @property
    def allowed_drift(self) -> float:
        return max(TIMES * self.stock_drift, LEAST)

    @property
    def identical(self) -> bool:
        """Stock decoding writes the same tokens."""
        return self.first is None

    @property
    def sound(self) -> bool:
        """What differs is rounding: no token differs by more than its gap, no logit by more than stock's own do."""
        drifts = self.drift is not None and not self.drift <= self.allowed_drift  # NaN is no rounding
        return self.gap <= self.allowed_gap and not drifts


@dataclass
class Certificate:
    """All replays of a run."""

    dtype: str
    replays: list[Replay] = field(default_factory=list)

    @property
    def identical(self) -> bool:
        return all(replay.identical for replay in self.replays)

    @property
    def sound(self) -> bool:
        return all(replay.sound for replay in self.replays)

    def as_dict(self) -> dict[str, Any]:
        return {
            "identical": self.identical,
            "sound": self.sound,
            "dtype": self.dtype,
            "tokens": sum(len(replay.output_ids) for replay in self.replays),
            "stock_differences": sum(replay.stock_differences for replay in self.replays),
            "stock_drift": max((replay.stock_drift for replay in self.replays), default=0.0),
            "texts": [{**asdict(replay), "sound": replay.sound} for replay in self.replays],
        }


def certify(
    model: Any,
    texts: Sequence[Text],
    progress: Callable[[Sequence[Text]], Any] = lambda texts: texts,
) -> Certificate:
    """Replay texts in stock code. No Weaver has a part in it: detach, or load the target anew, to be sure."""
    target = unwrap(model)
    certificate = Certificate(str(target.dtype).removeprefix("torch."))
    for text in progress(texts):
        certificate.replays.append(replay(target, text))
    return certificate


def write_texts(
    model: Any,
    weaver: WeaverModel,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    progress: Callable[[Sequence[Any]], Any] = lambda prompts: prompts,
) -> list[Text]:
    """Let an attached target answer prompts (token ids) with the Weaver, greedily.

    Raises:
        EmptyPromptError: a prompt without a token.
    """
    target, texts = unwrap(model), []
    for prompt in progress(prompts):
        if not len(prompt):
            raise EmptyPromptError("a prompt of 0 tokens", "at least 1 token", "Pass a text to continue.")
        ids = torch.tensor([list(prompt)], device=target.device)
        output = target.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            assistant_model=weaver,
            max_new_tokens=max_new_tokens,
            do_sample=False,
            return_dict_in_generate=True,
            output_logits=True,
        )
        tokens = output.sequences[0, ids.shape[1] :].tolist()
        with torch.no_grad():
            after = step(target, tokens[-1:], output[CACHE_KEY])
        logits = torch.cat(output.logits).float().cpu()
        texts.append(Text(list(prompt), tokens, logits, after[0].float().cpu()))
    return texts


def step(target: Any, tokens: Sequence[int], cache: Any, kept: int = 1) -> Tensor:
    """Stock logits after the last `kept` of `tokens`, `[kept, V]`; the cache moves on."""
    ids = torch.tensor([list(tokens)], device=target.device)
    return target(ids, use_cache=True, logits_to_keep=kept, **{CACHE_KEY: cache}).logits[0]


@torch.no_grad()
def replay(target: Any, text: Text) -> Replay:
    """One text in stock code: decoded along itself, and prefilled whole.

    Raises:
        EmptyPromptError: a text without prompt or output.
    """
    if not text.prompt_ids or not text.output_ids:
        raise EmptyPromptError("a text without prompt or output", "at least 1 token of each", "Take it out.")
    count = len(text.output_ids)
    cache = DynamicCache(config=target.config)
    rows = [step(target, text.prompt_ids, cache)]
    rows += [step(target, [token], cache) for token in text.output_ids]
    decoded = torch.cat(rows).float().cpu()  # [T + 1, V]
    whole = step(target, text.prompt_ids + text.output_ids, DynamicCache(config=target.config), count + 1).float().cpu()

    written = torch.tensor(text.output_ids)
    own = decoded[:count]
    gaps = own.max(-1).values - own.gather(-1, written[:, None])[:, 0]
    # Not by the argmax, which picks one of equal logits.
    wrong = (gaps > 0).nonzero()[:, 0].tolist()
    drifts = None
    if text.logits is not None:
        given = text.logits if text.after is None else torch.cat([text.logits, text.after[None]])
        drifts = distance(given, decoded[: len(given)])
    stock = distance(whole, decoded)
    scale = float(decoded.abs().max())
    allowed = max(TIMES * float(stock.max()), LEAST) * scale
    return Replay(
        prompt_ids=text.prompt_ids,
        output_ids=text.output_ids,
        first=wrong[0] if wrong else None,
        gap=float(gaps[wrong].max()) if wrong else 0.0,
        allowed_gap=allowed,
        differences=len(wrong),
        drift=None if drifts is None else float(drifts.max()),
        drift_at=None if drifts is None else int(drifts.argmax()),
        stock_differences=int((whole.argmax(-1) != decoded.argmax(-1)).sum()),
        stock_drift=float(stock.max()),
    )


def distance(a: Tensor, b: Tensor) -> Tensor:
    """Largest difference of each row, of the row's largest logit; `[R]`."""
    return (a - b).abs().max(-1).values / b.abs().max(-1).values.clamp(min=1e-6)


def read_texts(path: Path) -> list[Text]:
    """Texts of a file that `certify --json` wrote: `texts`, each with `prompt_ids` and `output_ids`.

    Raises:
        TextError: the file is of another form.
        OSError: it cannot be read.
    """
    try:
        rows = json.loads(path.read_text(encoding="utf-8"))["texts"]
        texts = [Text([int(i) for i in row["prompt_ids"]], [int(i) for i in row["output_ids"]]) for row in rows]
    except (ValueError, KeyError, TypeError) as error:
        raise TextError(
            f"a file {path} of another form ({error!r})",
            'JSON with "texts", each with "prompt_ids" and "output_ids"',
            "Write it with `weaver-hf certify --json`, or in this form.",
        ) from error
    if not texts:
        raise TextError(f"no text in {path}", "at least one", "Write it with `weaver-hf certify --json`.")
    return texts
