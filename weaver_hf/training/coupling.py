"""Fits the temperatures of coupled drafts: how sharply (log q + G) predicts the token that the target draws with G.

No text needs to be drawn again. At every held-out position the target's own law is known, so its draw under fresh noise
is; the drafter's or the adapter's score of that token, given the same noise, is what decoding will see.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..noise import gumbel
from ..scoring import candidate_log_probs
from .blocks import adapter_logits, rows_before
from .held_out import HeldOut

__all__ = ["fit_adapter_coupling", "fit_coupling"]

GRID = torch.linspace(-1.6, 1.6, 33).exp()  # 0.2 to 5
TEMPERATURES = (0.7, 1.0)


class Slots(NamedTuple):
    """Blocks of one held-out sequence under the noise of one draw.

    Attributes:
        temperature: of the target.
        logits: the drafter's, `[A, D, V]`.
        hidden: the drafter's final states, `[A, D, H]`.
        states: the target's final states before the anchors, `[A, H]`.
        tokens: int64 `[A, D]`, the anchor and the labels before each depth.
        weights: `[A, D]`, 0 where there is no label.
        law: the target's logits there by its temperature, `[A, D, V]`.
        noise: `[A, D, V]`.
        drawn: int64 `[A, D, 1]`, what the target draws there.
    """

    temperature: float
    logits: Tensor
    hidden: Tensor
    states: Tensor
    tokens: Tensor
    weights: Tensor
    law: Tensor
    noise: Tensor
    drawn: Tensor


@torch.no_grad()
def fit_coupling(held_out: HeldOut, temperatures: Sequence[float] = TEMPERATURES) -> dict[str, list[float]]:
    """`tree_config.coupling_temperature`: tau of each depth, for each temperature of the target.

    The least cross entropy, on the held-out sequences, of the token that the target draws under the noise, from
    `candidate_log_probs` given the same noise; on the sequences drawn at the temperature nearest to each.

    Args:
        temperatures: of the target, above 0.
    """
    fit = Fit(temperatures, held_out.weaver.config.block_size - 1)
    for slots in held_out_slots(held_out, temperatures):
        scale = torch.tensor(slots.temperature, device=slots.logits.device)  # as the target's own logits
        fit.add(slots, candidate_log_probs(slots.logits, scale) + slots.noise, slots.drawn, slots.weights)
    return fit.best()


@torch.no_grad()
def fit_adapter_coupling(held_out: HeldOut, temperatures: Sequence[float] = TEMPERATURES) -> dict[str, list[float]]:
    """`tree_config.adapter_coupling_temperature`: the same for the adapter's scores of the perturbed pools.

    Where the draw is outside the pool nothing can be predicted; such slots are left out.
    """
    adapter = held_out.weaver.adapter
    assert adapter is not None
    fit = Fit(temperatures, held_out.weaver.config.block_size - 1)
    for slots in held_out_slots(held_out, temperatures):
        scale = torch.tensor(slots.temperature, device=slots.logits.device)
        perturbed = candidate_log_probs(slots.logits, scale) + slots.noise
        ids = perturbed.topk(adapter.config.pool_size, -1).indices
        raw = slots.logits.gather(-1, ids)
        logits = adapter_logits(held_out.target, adapter, slots.states, slots.hidden, slots.tokens, raw, ids)
        found = ids == slots.drawn
        fit.add(
            slots,
            candidate_log_probs(logits, scale) + slots.noise.gather(-1, ids),
            found.float().argmax(-1, keepdim=True),
            slots.weights * found.any(-1),
        )
    return fit.best()


class Fit:
    """Cross entropies of the drawn tokens by temperature, tau and depth."""

    def __init__(self, temperatures: Sequence[float], depths: int) -> None:
        self.losses = {temperature: torch.zeros(len(GRID), depths) for temperature in temperatures}

    def add(self, slots: Slots, perturbed: Tensor, drawn: Tensor, weights: Tensor) -> None:
        """`perturbed [A, D, K]` is what is divided by tau; `drawn [A, D, 1]` indexes it."""
        for i, tau in enumerate(GRID.to(perturbed.device)):
            log_p = perturbed.gather(-1, drawn)[..., 0] / tau - (perturbed / tau).logsumexp(-1)
            self.losses[slots.temperature][i] -= (weights * log_p).sum(0).cpu()

    def best(self) -> dict[str, list[float]]:
        return {
            f"{temperature:.1f}": [round(float(GRID[i]), 4) for i in table.argmin(0).tolist()]
            for temperature, table in self.losses.items()
            if table.abs().sum() > 0
        }


def held_out_slots(held_out: HeldOut, temperatures: Sequence[float]) -> Iterator[Slots]:
    """The blocks of each held-out sequence that was drawn at the temperature nearest to one of these."""
    drawn_at = torch.tensor(sorted(set(held_out.data.temperatures.tolist()) - {0.0}))
    if not len(drawn_at):  # greedy text alone says nothing of draws
        return
    first = 0  # number of the batch's first sequence, which seeds its noise
    for passed, drawn_temperatures in held_out.passes():
        before = rows_before(passed.blocks, passed.target_logits.shape[1])
        for temperature in temperatures:
            nearest = float(drawn_at[(drawn_at - temperature).abs().argmin()])
            for row in (drawn_temperatures - nearest).abs().lt(0.05).nonzero()[:, 0].tolist():
                logits = passed.logits[row]
                seed = torch.tensor([first + row], device=logits.device)
                noise = gumbel(seed, before[row].flatten()[None], logits.shape[-1]).view_as(logits)
                law = passed.target_logits[row, before[row]].float() / temperature
                yield Slots(
                    temperature,
                    logits,
                    passed.hidden[row],
                    passed.states[row],
                    passed.tokens[row],
                    passed.blocks.weights[row],
                    law,
                    noise,
                    (law + noise).argmax(-1, keepdim=True),
                )
        first += len(drawn_temperatures)
