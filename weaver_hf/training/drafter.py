"""`weaver-hf train drafter`: trains a block drafter for a frozen target; chosen by acceptance, not by loss."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn as nn
from accelerate import Accelerator
from torch import Tensor

from ..modeling_weaver import WeaverModel
from .blocks import BlockNetwork, LossConfig, accepted_tokens, block_loss, draft_pass, sample_anchors
from .coupling import fit_coupling
from .data import Sequences
from .held_out import HeldOut, calibrate
from .loop import Batch, TrainConfig
from .part import train_part

__all__ = ["DrafterTrainConfig", "evaluate", "fit_temperatures", "train"]


@dataclass
class DrafterTrainConfig(TrainConfig):
    """Settings of a drafter's run: the loop's, and the loss."""

    loss: LossConfig = field(default_factory=LossConfig)


def train(
    target: Any, weaver: WeaverModel, data: Sequences, folder: Path, config: DrafterTrainConfig, pad: int
) -> dict[str, Any]:
    """Train `weaver.drafter` in place and save it, its draft temperatures fitted; returns the last evaluation.

    A folder that holds the state of an earlier run of the same settings is continued.
    """
    assert weaver.drafter is not None
    loss_function = torch.compile(block_loss) if config.compile else block_loss

    def loss_of(network: nn.Module, batch: Batch, held_out: HeldOut, accelerator: Accelerator) -> Tensor:
        with accelerator.autocast():
            anchors, valid = sample_anchors(batch["lengths"], batch["prompt_lengths"], config.anchors_per_sequence)
            passed = draft_pass(held_out.target, weaver, held_out.sink, batch, anchors, valid, network)
        return loss_function(passed.logits, passed.target_logits, passed.blocks, batch["temperatures"], config.loss)

    fits = {"draft_temperature": fit_temperatures, "coupling_temperature": fit_coupling}
    return train_part(BlockNetwork(weaver.drafter), loss_of, evaluate, fits, target, weaver, data, folder, config, pad)


def evaluate(held_out: HeldOut) -> dict[str, Any]:
    """Accepted drafted tokens of chain and marginal tree (63) on the held-out text, by its temperature."""
    sums: dict[str, list[Tensor]] = {}
    for passed, temperatures in held_out.passes():
        for temperature in temperatures.unique().tolist():
            chosen = (temperatures == temperature)[:, None, None]
            part = passed.blocks._replace(weights=passed.blocks.weights * chosen)
            for name, budget in (("chain", None), ("marginal", 63)):
                accepted, _ = accepted_tokens(passed.logits, part, budget)
                sums.setdefault(f"{name} T={temperature:.1f}", []).append(accepted.float())
    return {name: round(float(torch.cat(rows).mean()), 4) for name, rows in sorted(sums.items())}


@torch.no_grad()
def fit_temperatures(held_out: HeldOut) -> dict[str, list[float]]:
    """Draft temperatures of each depth, for each temperature of the target, from the held-out text; see `calibrate`."""
    return calibrate(
        (passed.logits, passed.blocks.labels[..., None], passed.blocks.weights > 0, temperatures)
        for passed, temperatures in held_out.passes()
    )
