"""Fits the temperatures of coupled drafts: how sharply (log q + G) predicts the token that the target draws with G.

No text needs to be drawn again. At every held-out position the target's own law is known, so its draw under fresh noise
is; the drafter's or the adapter's score of that token, given the same noise, is what decoding will see.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..adapter import head_product
from ..modeling_weaver import WeaverModel
from ..noise import gumbel
from ..scoring import candidate_log_probs
from ..target.taps import TapSink
from .blocks import BlockNetwork, make_blocks, rows_before, run_blocks, sample_anchors, states_before, target_pass
from .data import Sequences
from .loop import TrainConfig

__all__ = ["fit_adapter_coupling", "fit_coupling"]

GRID = torch.linspace(-1.6, 1.6, 33).exp()  # 0.2 to 5
ANCHORS = 16  # blocks a sequence
TEMPERATURES = (0.7, 1.0)


class Slots(NamedTuple):
    """Blocks of one held-out sequence under the noise of one draw.

    Attributes:
        temperature: of the target.
        logits: the drafter's, `[A, D, V]`.
        hidden: the drafter's final states, `[A, D, H]`.
        target_hidden: the target's final states before the anchors, `[A, H]`.
        tokens: int64 `[A, D]`, the anchor and the labels before each depth.
        weights: `[A, D]`, 0 where there is no label.
        law: the target's logits there by its temperature, `[A, D, V]`.
        noise: `[A, D, V]`.
        drawn: int64 `[A, D, 1]`, what the target draws there.
    """

    temperature: float
    logits: Tensor
    hidden: Tensor
    target_hidden: Tensor
    tokens: Tensor
    weights: Tensor
    law: Tensor
    noise: Tensor
    drawn: Tensor


@torch.no_grad()
def fit_coupling(
    target: Any,
    weaver: WeaverModel,
    data: Sequences,
    config: TrainConfig,
    pad: int,
    sink: TapSink,
    temperatures: Sequence[float] = TEMPERATURES,
) -> dict[str, list[float]]:
    """`tree_config.coupling_temperature`: tau of each depth, for each temperature of the target.

    The least cross entropy, on the held-out sequences, of the token that the target draws under the noise, from
    `candidate_log_probs` given the same noise; on the sequences drawn at the temperature nearest to each.

    Args:
        target, weaver, data, config, pad, sink: as for `fit_temperatures`.
        temperatures: of the target, above 0.
    """
    fit = Fit(temperatures, weaver.config.block_size - 1)
    for slots in held_out_slots(target, weaver, data, config, pad, sink, temperatures):
        scale = torch.tensor(slots.temperature, device=slots.logits.device)  # as the target's own logits
        fit.add(slots, candidate_log_probs(slots.logits, scale) + slots.noise, slots.drawn, slots.weights)
    return fit.best()


@torch.no_grad()
def fit_adapter_coupling(
    target: Any,
    weaver: WeaverModel,
    data: Sequences,
    config: TrainConfig,
    pad: int,
    sink: TapSink,
    temperatures: Sequence[float] = TEMPERATURES,
) -> dict[str, list[float]]:
    """`tree_config.adapter_coupling_temperature`: the same for the adapter's scores of the perturbed pools.

    Where the draw is outside the pool nothing can be predicted; such slots are left out.
    """
    adapter = weaver.adapter
    assert adapter is not None
    depths = weaver.config.block_size - 1
    embedding, head = target.get_input_embeddings(), target.get_output_embeddings()
    fit = Fit(temperatures, depths)
    for slots in held_out_slots(target, weaver, data, config, pad, sink, temperatures):
        scale = torch.tensor(slots.temperature, device=slots.logits.device)
        marginals = candidate_log_probs(slots.logits, scale)
        ids = (marginals + slots.noise).topk(adapter.config.pool_size, -1).indices
        queries = adapter(slots.target_hidden, slots.hidden, embedding(slots.tokens).to(slots.hidden.dtype))
        residual = head_product(head, queries.to(target.dtype)).float().gather(-1, ids)
        scores = candidate_log_probs(slots.logits.float().gather(-1, ids) + residual, scale)
        found = ids == slots.drawn
        fit.add(
            slots,
            scores + slots.noise.gather(-1, ids),
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


def held_out_slots(
    target: Any,
    weaver: WeaverModel,
    data: Sequences,
    config: TrainConfig,
    pad: int,
    sink: TapSink,
    temperatures: Sequence[float],
) -> Iterator[Slots]:
    """The blocks of each held-out sequence that was drawn at the temperature nearest to one of these."""
    drafter = weaver.drafter
    assert drafter is not None
    depths, device = weaver.config.block_size - 1, target.device
    embedding, head = target.get_input_embeddings(), target.get_output_embeddings()
    generator = torch.Generator().manual_seed(0)
    drawn_at = torch.tensor(sorted(set(data.temperatures.tolist()) - {0.0}))
    if not len(drawn_at):  # greedy text alone says nothing of draws
        return
    indices = range(len(data) - config.held_out, len(data))
    for start in range(0, len(indices), config.batch_size):
        batch = data.batch(indices[start : start + config.batch_size], config.width, pad)
        anchors, valid = sample_anchors(batch["lengths"], batch["prompt_lengths"], ANCHORS, generator)
        batch = {name: tensor.to(device) for name, tensor in batch.items()}
        ids, anchors, valid = batch["input_ids"], anchors.to(device), valid.to(device)
        taps, target_logits = target_pass(target, sink, ids)
        blocks = make_blocks(ids, batch["lengths"], anchors, valid, depths)
        hidden = run_blocks(
            BlockNetwork(drafter), embedding, weaver.config.mask_token_id, taps.features, ids, anchors, depths
        )
        logits = head(hidden.to(target.dtype))
        tokens = torch.cat([ids.gather(1, anchors)[..., None], blocks.labels[..., :-1]], -1)
        before, states = rows_before(blocks, ids.shape[1]), states_before(taps, anchors)
        for temperature in temperatures:
            nearest = float(drawn_at[(drawn_at - temperature).abs().argmin()])
            for row in (batch["temperatures"] - nearest).abs().lt(0.05).nonzero()[:, 0].tolist():
                seed = torch.tensor([start + row], device=device)
                noise = gumbel(seed, before[row].flatten()[None], logits.shape[-1]).view_as(logits[row])
                law = target_logits[row, before[row]].float() / temperature
                drawn = (law + noise).argmax(-1, keepdim=True)
                yield Slots(
                    temperature,
                    logits[row],
                    hidden[row],
                    states[row],
                    tokens[row],
                    blocks.weights[row],
                    law,
                    noise,
                    drawn,
                )
