"""`weaver-hf train drafter`: trains a block drafter for a frozen target; chosen by acceptance, not by loss."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn as nn
from accelerate import Accelerator
from torch import Tensor

from ..modeling_weaver import WeaverModel
from ..target.attach import unwrap
from ..target.families import family_of
from ..target.taps import TapSink
from .blocks import (
    BlockNetwork,
    LossConfig,
    accepted_tokens,
    block_loss,
    make_blocks,
    run_blocks,
    sample_anchors,
    target_pass,
)
from .coupling import fit_coupling
from .data import Sequences
from .loop import Batch, TrainConfig, plot, run

__all__ = ["DrafterTrainConfig", "evaluate", "fit_temperatures", "train"]

FITTED_AT = (0.0, 0.7, 1.0)  # target temperatures for which draft temperatures are fitted
DEV_ANCHORS = 16  # blocks of each held-out sequence
SMOOTH = 20.0  # a depth's temperature stays near the one above, as if that many blocks had asked for it


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
    config = replace(config, held_out=min(config.held_out, max(len(data) // 10, 1)))
    accelerator = Accelerator(
        mixed_precision=config.mixed_precision, dynamo_backend="inductor" if config.compile else "no"
    )
    target = unwrap(target).to(accelerator.device).eval().requires_grad_(False)
    weaver.config.check_target(target.config)
    weaver.to(accelerator.device, torch.float32).train()
    drafter = weaver.drafter
    assert drafter is not None
    depths = weaver.config.block_size - 1
    sink = TapSink(family_of(target).decoder_of(target), weaver.config.target_layer_ids, accelerator.device)
    loss_function = torch.compile(block_loss) if config.compile else block_loss

    def loss_of(network: nn.Module, batch: Batch) -> Tensor:
        with accelerator.autocast():
            taps, target_logits = target_pass(target, sink, batch["input_ids"])
            anchors, valid = sample_anchors(batch["lengths"], batch["prompt_lengths"], config.anchors_per_sequence)
            blocks = make_blocks(batch["input_ids"], batch["lengths"], anchors, valid, depths)
            logits = draft_logits(target, weaver, network, taps.features, batch["input_ids"], anchors)
        return loss_function(logits, target_logits, blocks, batch["temperatures"], config.loss)

    def evaluation() -> dict[str, Any]:
        return evaluate(target, weaver, data, config, pad, sink)

    last = run(BlockNetwork(drafter), loss_of, evaluation, data, folder, config, accelerator, pad)
    if accelerator.is_main_process:
        given = (target, weaver.eval(), data, config, pad, sink)
        weaver.tree_config.draft_temperature = fit_temperatures(*given)
        weaver.tree_config.coupling_temperature = fit_coupling(*given)
        weaver.to(target.dtype).save_pretrained(folder)
        plot(folder)
    accelerator.wait_for_everyone()
    return last


def draft_logits(
    target: Any, weaver: WeaverModel, network: nn.Module, features: Tensor, ids: Tensor, anchors: Tensor
) -> Tensor:
    """The drafter's logits `[B, A, D, V]` for blocks at `anchors`, by the target's embedding and head."""
    config = weaver.config
    hidden = run_blocks(
        network, target.get_input_embeddings(), config.mask_token_id, features, ids, anchors, config.block_size - 1
    )
    return target.get_output_embeddings()(hidden.to(target.dtype))


@torch.no_grad()
def held_out_blocks(
    target: Any, weaver: WeaverModel, data: Sequences, config: TrainConfig, pad: int, sink: TapSink
) -> Iterator[tuple[Tensor, Any, Tensor]]:
    """Drafter logits, blocks and temperatures of the held-out sequences, in fp32, at fixed anchors."""
    drafter = weaver.drafter
    assert drafter is not None
    generator = torch.Generator().manual_seed(0)
    device = target.device
    indices = range(len(data) - config.held_out, len(data))
    for start in range(0, len(indices), config.batch_size):
        batch = data.batch(indices[start : start + config.batch_size], config.width, pad)
        anchors, valid = sample_anchors(batch["lengths"], batch["prompt_lengths"], DEV_ANCHORS, generator)
        batch = {name: tensor.to(device) for name, tensor in batch.items()}
        anchors, valid = anchors.to(device), valid.to(device)
        taps, _ = target_pass(target, sink, batch["input_ids"])
        depths = weaver.config.block_size - 1
        blocks = make_blocks(batch["input_ids"], batch["lengths"], anchors, valid, depths)
        logits = draft_logits(target, weaver, BlockNetwork(drafter), taps.features, batch["input_ids"], anchors)
        yield logits, blocks, batch["temperatures"]


def evaluate(
    target: Any, weaver: WeaverModel, data: Sequences, config: TrainConfig, pad: int, sink: TapSink
) -> dict[str, Any]:
    """Accepted drafted tokens of chain and marginal tree (63) on the held-out text, by its temperature."""
    drafter = weaver.drafter
    assert drafter is not None
    drafter.eval()
    sums: dict[str, list[Tensor]] = {}
    for logits, blocks, temperatures in held_out_blocks(target, weaver, data, config, pad, sink):
        for temperature in temperatures.unique().tolist():
            part = blocks._replace(weights=blocks.weights * (temperatures == temperature)[:, None, None])
            for name, budget in (("chain", None), ("marginal", 63)):
                accepted, _ = accepted_tokens(logits, part, budget)
                sums.setdefault(f"{name} T={temperature:.1f}", []).append(accepted.float())
    drafter.train()
    return {name: round(float(torch.cat(rows).mean()), 4) for name, rows in sorted(sums.items())}


@torch.no_grad()
def fit_temperatures(
    target: Any, weaver: WeaverModel, data: Sequences, config: TrainConfig, pad: int, sink: TapSink
) -> dict[str, list[float]]:
    """Draft temperatures of each depth, for each temperature of the target, from the held-out text.

    A tree's path probability is a product, and a depth's factor only matters where the path above it was right: depth
    by depth from the top, the temperature of least cross entropy, each block weighted by the probability of having come
    so far. So path probabilities, not marginals, are what is calibrated.
    """
    grid = torch.linspace(math.log(0.3), math.log(3.0), 47).exp()
    golds: dict[float, list[Tensor]] = {temperature: [] for temperature in FITTED_AT}
    for logits, blocks, temperatures in held_out_blocks(target, weaver, data, config, pad, sink):
        golds_at = [gold_log_probs(logits, blocks.labels, tau) for tau in grid.tolist()]
        table = torch.stack(golds_at, -1)  # [B, A, D, grid]
        table = table.masked_fill(blocks.weights[..., None] == 0, math.nan).cpu()
        for temperature in FITTED_AT:
            golds[temperature].append(table[(temperatures - temperature).abs().cpu() < 0.05].flatten(0, 1))
    tables = {temperature: torch.cat(parts) for temperature, parts in golds.items()}
    return {
        f"{temperature:.1f}": fit_depths(table, grid) for temperature, table in tables.items() if table.isfinite().any()
    }


def fit_depths(table: Tensor, grid: Tensor) -> list[float]:
    """The temperature of each depth that `fit_temperatures` describes.

    Args:
        table: log-probability of the label for each block, depth and temperature of the grid, `[X, D, G]`, NaN where
            there is no label.
        grid: temperatures, `[G]`, evenly spaced in their logarithm.
    """
    reach = torch.ones(len(table))
    above = torch.zeros(())
    fitted = []
    for depth in range(table.shape[1]):
        losses = -(reach[:, None] * table[:, depth]).nansum(0) + SMOOTH * (grid.log() - above).square()
        best = int(losses.argmin())
        above = grid[best].log()
        reach = reach * table[:, depth, best].exp().nan_to_num(0.0)
        fitted.append(round(float(grid[best]), 4))
    return fitted


def gold_log_probs(logits: Tensor, labels: Tensor, temperature: float) -> Tensor:
    """Log-probability of each label `[..., D]` under `logits [..., D, V]` at a draft temperature."""
    return (logits.float() / temperature).log_softmax(-1).gather(-1, labels[..., None])[..., 0]
