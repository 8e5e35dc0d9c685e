"""The held-out sequences of a run: passes over their blocks, and the temperatures that make path probabilities true."""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..modeling_weaver import WeaverModel
from ..target.taps import TapSink
from .blocks import DraftPass, draft_pass, sample_anchors
from .data import Sequences
from .loop import TrainConfig

__all__ = ["HeldOut", "calibrate", "fit_depths"]

ANCHORS = 16  # blocks of each sequence
FITTED_AT = (0.0, 0.7, 1.0)  # target temperatures for which temperatures are fitted
GRID = torch.linspace(math.log(0.3), math.log(3.0), 47).exp()
SMOOTH = 20.0  # a depth's temperature stays near the one above, as if that many blocks had asked for it


@dataclass(frozen=True)
class HeldOut:
    """The end of a run's data, and who looks at it.

    Attributes:
        target: frozen, on its device.
        weaver: beside it.
        sink: gathers the target's taps.
        data, config, pad: of the run; `config.held_out` sequences are held out.
    """

    target: Any
    weaver: WeaverModel
    sink: TapSink
    data: Sequences
    config: TrainConfig
    pad: int

    @torch.no_grad()
    def passes(self) -> Iterator[tuple[DraftPass, Tensor]]:
        """Target and drafter on batches of the sequences at fixed anchors, and the sequences' temperatures `[B]`."""
        generator = torch.Generator().manual_seed(0)
        device = self.target.device
        indices = range(len(self.data) - self.config.held_out, len(self.data))
        for start in range(0, len(indices), self.config.batch_size):
            batch = self.data.batch(indices[start : start + self.config.batch_size], self.config.width, self.pad)
            anchors, valid = sample_anchors(batch["lengths"], batch["prompt_lengths"], ANCHORS, generator)
            batch = {name: tensor.to(device) for name, tensor in batch.items()}
            passed = draft_pass(self.target, self.weaver, self.sink, batch, anchors.to(device), valid.to(device))
            yield passed, batch["temperatures"]


def calibrate(scored: Iterable[tuple[Tensor, Tensor, Tensor, Tensor]]) -> dict[str, list[float]]:
    """Temperatures of each depth, for each temperature of the target.

    A tree's path probability is a product, and a depth's factor only matters where the path above it was right: depth
    by depth from the top, the temperature of least cross entropy, each block weighted by the probability of having come
    so far. So path probabilities, not the factors, are what is calibrated.

    Args:
        scored: for each batch, logits `[B, A, D, K]`; where the label stands among them, int64 `[B, A, D, 1]`; where
            there is one, bool `[B, A, D]`; and the temperatures at which the sequences were drawn, `[B]`.
    """
    golds: dict[float, list[Tensor]] = {temperature: [] for temperature in FITTED_AT}
    for logits, place, seen, temperatures in scored:
        log_probs = [(logits.float() / tau).log_softmax(-1).gather(-1, place)[..., 0] for tau in GRID.tolist()]
        table = torch.stack(log_probs, -1).masked_fill(~seen[..., None], math.nan).cpu()  # [B, A, D, grid]
        for temperature in FITTED_AT:
            golds[temperature].append(table[(temperatures - temperature).abs().cpu() < 0.05].flatten(0, 1))
    tables = {temperature: torch.cat(parts) for temperature, parts in golds.items()}
    return {f"{temperature:.1f}": fit_depths(table) for temperature, table in tables.items() if table.isfinite().any()}


def fit_depths(table: Tensor) -> list[float]:
    """The temperature of each depth that `calibrate` describes.

    Args:
        table: log-probability of the label for each block, depth and temperature of `GRID`, `[X, D, G]`, NaN where
            there is no label.
    """
    reach = torch.ones(len(table))
    above = torch.zeros(())
    fitted = []
    for depth in range(table.shape[1]):
        losses = -(reach[:, None] * table[:, depth]).nansum(0) + SMOOTH * (GRID.log() - above).square()
        best = int(losses.argmin())
        above = GRID[best].log()
        reach = reach * table[:, depth, best].exp().nan_to_num(0.0)
        fitted.append(round(float(GRID[best]), 4))
    return fitted
