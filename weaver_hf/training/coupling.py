"""Fits the temperatures of coupled drafts: how sharply (log q + G) predicts the token that the target draws with G.

No text needs to be drawn again. At every held-out position the target's own law is known, so its draw under fresh noise
is; the drafter's score of that token, given the same noise, is what decoding will see.
"""

from collections.abc import Sequence
from typing import Any

import torch

from ..modeling_weaver import WeaverModel
from ..noise import gumbel
from ..scoring import candidate_log_probs
from ..target.taps import TapSink
from .blocks import BlockNetwork, make_blocks, sample_anchors, target_pass
from .data import Sequences
from .drafter import TrainConfig, draft_logits

__all__ = ["fit_coupling"]

GRID = torch.linspace(-1.6, 1.6, 33).exp()  # 0.2 to 5
ANCHORS = 16  # blocks a sequence


@torch.no_grad()
def fit_coupling(
    target: Any,
    weaver: WeaverModel,
    data: Sequences,
    config: TrainConfig,
    pad: int,
    sink: TapSink,
    temperatures: Sequence[float] = (0.7, 1.0),
) -> dict[str, list[float]]:
    """`tree_config.coupling_temperature`: tau of each depth, for each temperature of the target.

    The least cross entropy, on the held-out sequences, of the token that the target draws under the noise, from
    `candidate_log_probs` given the same noise; on the sequences drawn at the temperature nearest to each.

    Args:
        target, weaver, data, config, pad, sink: as for `fit_temperatures`.
        temperatures: of the target, above 0.
    """
    drafter = weaver.drafter
    assert drafter is not None
    depths, device = weaver.config.block_size - 1, target.device
    generator = torch.Generator().manual_seed(0)
    drawn_at = torch.tensor(sorted(set(data.temperatures.tolist()) - {0.0}))
    grid = GRID.to(device)
    losses = {temperature: torch.zeros(len(grid), depths) for temperature in temperatures}
    indices = range(len(data) - config.held_out, len(data))
    for start in range(0, len(indices), config.batch_size):
        batch = data.batch(indices[start : start + config.batch_size], config.width, pad)
        anchors, valid = sample_anchors(batch["lengths"], batch["prompt_lengths"], ANCHORS, generator)
        batch = {name: tensor.to(device) for name, tensor in batch.items()}
        anchors, valid = anchors.to(device), valid.to(device)
        features, target_logits = target_pass(target, sink, batch["input_ids"])
        weights = make_blocks(batch["input_ids"], batch["lengths"], anchors, valid, depths).weights
        logits = draft_logits(target, weaver, BlockNetwork(drafter), features, batch["input_ids"], anchors)
        before = (anchors[..., None] + torch.arange(depths, device=device)).clamp(max=target_logits.shape[1] - 1)
        for temperature in temperatures:
            nearest = float(drawn_at[(drawn_at - temperature).abs().argmin()])
            scale = torch.tensor(temperature, device=device)  # as the target's own logits
            for row in (batch["temperatures"] - nearest).abs().lt(0.05).nonzero()[:, 0].tolist():
                noise = gumbel(
                    torch.tensor([start + row], device=device), before[row].flatten()[None], logits.shape[-1]
                )
                noise = noise.view_as(logits[row])
                drawn = (target_logits[row, before[row]].float() / temperature + noise).argmax(-1, keepdim=True)
                perturbed = candidate_log_probs(logits[row], scale) + noise  # [A, D, V], to be divided by tau
                for i, tau in enumerate(grid):
                    log_p = perturbed.gather(-1, drawn)[..., 0] / tau - (perturbed / tau).logsumexp(-1)
                    losses[temperature][i] -= (weights[row] * log_p).sum(0).cpu()
    return {
        f"{temperature:.1f}": [round(float(GRID[i]), 4) for i in table.argmin(0).tolist()]
        for temperature, table in losses.items()
        if table.abs().sum() > 0
    }
