"""From logits to the scores that decide: the target's at every node, the drafter's for its candidates."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList
from transformers.generation import logits_process as stock

from .configuration_weaver import TreeConfig

__all__ = ["DraftRule", "candidate_log_probs", "drafter_processors", "is_stateless", "known_warpers", "process_nodes"]

# Processors of transformers whose output depends on the scores alone, row by row: one call serves all nodes. By exact
# type, because a subclass may read the history.
_FILTERS: tuple[type, ...] = (
    stock.TopKLogitsWarper,
    stock.TopPLogitsWarper,
    stock.MinPLogitsWarper,
    stock.TopHLogitsWarper,
    stock.TypicalLogitsWarper,
    stock.EpsilonLogitsWarper,
    stock.EtaLogitsWarper,
)
_STATELESS: tuple[type, ...] = (
    *_FILTERS,
    stock.TemperatureLogitsWarper,
    stock.SuppressTokensLogitsProcessor,
    stock.InfNanRemoveLogitsProcessor,
    stock.LogitNormalization,
)


def is_stateless(processors: Sequence[LogitsProcessor]) -> bool:
    """Whether every processor is known to read the scores alone.

    One that is not makes the whole list sequential: the order of a list is part of its meaning.
    """
    return all(type(processor) in _STATELESS for processor in processors)


# The warpers that the acceptance kernel knows, in transformers' own order, with their argument's name.
_WARPERS: tuple[tuple[type, str], ...] = (
    (stock.TemperatureLogitsWarper, "temperature"),
    (stock.TopKLogitsWarper, "top_k"),
    (stock.TopPLogitsWarper, "top_p"),
    (stock.MinPLogitsWarper, "min_p"),
)


def known_warpers(processors: Sequence[LogitsProcessor]) -> dict[str, Any] | None:
    """Arguments of `weaver_kernels.sampling.choose_tokens` for a list of processors, None where it cannot serve it."""
    arguments: dict[str, Any] = {}
    places = []
    for processor in processors:
        place = next((i for i, (kind, _) in enumerate(_WARPERS) if type(processor) is kind), None)
        usual = (getattr(processor, "filter_value", -math.inf), getattr(processor, "min_tokens_to_keep", 1))
        if place is None or usual != (-math.inf, 1):
            return None
        places.append(place)
        name = _WARPERS[place][1]
        arguments[name] = float(getattr(processor, name)) if name != "top_k" else int(processor.top_k)
    return arguments if places == sorted(set(places)) else None


def process_nodes(processors: Sequence[LogitsProcessor], sequences: Tensor, logits: Tensor) -> Tensor:
    """Stateless processors on all rows at once: `logits [..., V]` to fp32 scores `[..., V]`.

    Args:
        processors: a list that `is_stateless`.
        sequences: the text so far, which these processors are given and do not read.
    """
    scores = logits.flatten(0, -2).float()
    for processor in processors:
        scores = processor(sequences, scores)
    return scores.reshape(logits.shape)


def drafter_processors(processors: Sequence[LogitsProcessor]) -> LogitsProcessorList:
    """Those of the target's processors that a drafter applies to its own scores: the known filters.

    Not the temperature, which a drafter applies itself, depth by depth.
    """
    return LogitsProcessorList([processor for processor in processors if type(processor) in _FILTERS])


@dataclass(frozen=True)
class DraftRule:
    """How a drafter's or an adapter's raw scores become the log-probabilities that trees are built from.

    Attributes:
        temperatures: a divisor of the logits for each depth.
        couplings: tau of each depth, read where the noise is known.
        filters: of `drafter_processors`.
    """

    temperatures: Sequence[float]
    couplings: Sequence[float] = ()
    filters: Sequence[LogitsProcessor] = ()

    @classmethod
    def of(
        cls,
        settings: TreeConfig,
        temperature: float,
        depths: int,
        *,
        coupled: bool,
        adapter: bool = False,
        filters: Sequence[LogitsProcessor] = (),
    ) -> "DraftRule":
        """The rule of a call of `generate` at the target's `temperature` (0: greedy), the drafter's or the adapter's.

        Given the noise, drafter and adapter stand in for the target itself, at the target's temperature and by its
        filters: what is left to fit is how far they can be trusted. Without it, their temperatures calibrate them.
        """
        fitted = settings.temperatures_at(temperature, depths, adapter=adapter)
        return cls(
            [temperature] * depths if coupled else fitted,
            settings.couplings_at(temperature, depths, adapter=adapter),
            filters if coupled else (),
        )

    def log_probs(self, logits: Tensor, gumbels: Tensor | None = None, depths: Tensor | None = None) -> Tensor:
        """`candidate_log_probs` of `logits [B, D, K]`, one depth a row, or of rows that belong to `depths [B, W]`."""
        scales = self._scales_on(logits.device)
        scales = scales[:, None, : logits.shape[1]] if depths is None else scales[:, depths]
        return candidate_log_probs(logits, scales[0, ..., None], self.filters, gumbels, scales[1, ..., None])

    def scales(self, depths: int, device: torch.device) -> Tensor:
        """Temperatures and taus of the first `depths` depths, fp32 `[2, depths]`, contiguous."""
        return self._scales_on(device)[:, :depths].contiguous()

    def _scales_on(self, device: torch.device) -> Tensor:
        """Temperatures and taus `[2, D]`, uploaded once: an upload waits for the device, and a tree asks each round."""
        if device not in self._uploaded:
            taus = self.couplings or [1.0] * len(self.temperatures)
            self._uploaded[device] = torch.tensor([list(self.temperatures), list(taus)], device=device)
        return self._uploaded[device]

    @cached_property
    def _uploaded(self) -> dict[torch.device, Tensor]:
        return {}


def candidate_log_probs(
    logits: Tensor,
    temperature: Tensor,
    processors: Sequence[LogitsProcessor] = (),
    gumbels: Tensor | None = None,
    coupling_temperature: Tensor | None = None,
) -> Tensor:
    """Log-probabilities that a drafter gives the tokens of a position, those that trees are built from.

    Without noise: `log_softmax(logits / temperature)`, after the target's filters. Coupled, i.e. given the noise G with
    which the target will draw: `log_softmax((log q + G) / tau)`, the probability that the draw falls on the token. The
    target draws the largest `log p + G`, so with q = p the best candidate is the draw itself; the worse q is, the
    larger the fitted tau. So q is made as p is, at the target's temperature and by its filters. The draw stays exact,
    because it never reads these scores.

    Args:
        logits: `[..., V]`, over the vocabulary or over a pool of candidates.
        temperature, coupling_temperature: broadcast against `[..., 1]`.
        processors: filters of `drafter_processors`.
        gumbels: fp32 `[..., V]`, the noise of the same tokens; None for trees that are built without it.

    Returns:
        fp32 `[..., V]`.
    """
    scores = process_nodes(processors, torch.empty(0), logits.float() / temperature)
    log_probs = scores.log_softmax(-1)
    if gumbels is not None:
        assert coupling_temperature is not None
        log_probs = ((log_probs + gumbels) / coupling_temperature).log_softmax(-1)
    return log_probs.clamp(max=0)  # rounding can put it above
