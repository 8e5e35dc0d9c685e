"""`weaver-hf train drafter`: trains a block drafter for a frozen target.

Runs on one process or many through accelerate without a change. Every minute: acceptance on the held-out tail of the
data; chosen by acceptance, not by loss. The folder holds the artifact, `train_command.txt`, `log.jsonl` and, where
matplotlib is installed, `acceptance.png`; `state/` is what a run resumes from.
"""

import json
import math
import platform
import sys
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from time import monotonic
from typing import Any

import torch
import torch.nn as nn
import transformers
from accelerate import Accelerator
from torch import Tensor

from .._version import __version__
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
from .data import Sequences

__all__ = ["TrainConfig", "evaluate", "fit_temperatures", "train"]

FITTED_AT = (0.0, 1.0)  # target temperatures for which draft temperatures are fitted


@dataclass
class TrainConfig:
    """Settings of a run.

    Attributes:
        anchors: blocks trained in all; the run is over when they are.
        batch_size: sequences a step and process.
        anchors_per_sequence: blocks of each sequence.
        width: longest piece of a sequence.
        learning_rate, warmup, decay, weight_decay, clip: AdamW with a flat rate between warm-up and decay (shares of
        the
            run).
        held_out: sequences for evaluation, from the end of the data.
        evaluate_every: seconds.
        max_seconds: a run that takes longer decays its rate to the end and stops; None for no limit.
    """

    anchors: int = 1_000_000
    batch_size: int = 32
    anchors_per_sequence: int = 64
    width: int = 448
    learning_rate: float = 1e-3
    warmup: float = 0.04
    decay: float = 0.3
    weight_decay: float = 0.01
    clip: float = 1.0
    held_out: int = 256
    evaluate_every: float = 60.0
    max_seconds: float | None = None
    seed: int = 0
    mixed_precision: str = "no"
    loss: LossConfig = field(default_factory=LossConfig)


def train(
    target: Any, weaver: WeaverModel, data: Sequences, folder: Path, config: TrainConfig, pad: int
) -> dict[str, Any]:
    """Train `weaver.drafter` in place and save it; returns the last evaluation.

    A folder that holds the state of an earlier run of the same settings is continued.
    """
    config = replace(config, held_out=min(config.held_out, max(len(data) // 10, 1)))
    accelerator = Accelerator(mixed_precision=config.mixed_precision)
    target = unwrap(target).to(accelerator.device).eval().requires_grad_(False)
    weaver.to(accelerator.device, torch.float32).train()
    drafter = weaver.drafter
    assert drafter is not None
    matrices = [p for p in drafter.parameters() if p.ndim > 1]
    vectors = [p for p in drafter.parameters() if p.ndim == 1]
    groups = [{"params": matrices, "weight_decay": config.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=config.learning_rate, betas=(0.9, 0.95))
    progress = Progress(config)
    network, optimizer = accelerator.prepare(BlockNetwork(drafter), optimizer)
    accelerator.register_for_checkpointing(progress)
    state, log = folder / "state", folder / "log.jsonl"
    folder.mkdir(parents=True, exist_ok=True)
    if state.exists():
        accelerator.load_state(str(state))
    elif accelerator.is_main_process:
        (folder / "train_command.txt").write_text(command(), encoding="utf-8")
        log.unlink(missing_ok=True)
    sink = TapSink(family_of(target).decoder_of(target), weaver.config.target_layer_ids, accelerator.device)
    last: dict[str, Any] = {}

    def checkpoint() -> dict[str, Any]:
        result = evaluate(target, weaver, data, config, pad, sink)
        entry = {
            "anchors": progress.anchors,
            "seconds": round(progress.seconds, 1),
            "loss": progress.mean_loss(),
            **result,
        }
        if accelerator.is_main_process:
            with log.open("a", encoding="utf-8") as lines:
                lines.write(json.dumps(entry) + "\n")
            print(json.dumps(entry), flush=True)
        accelerator.save_state(str(state))
        return entry

    evaluated_at = -1
    next_evaluation = config.evaluate_every
    for batch in training_batches(len(data) - config.held_out, data, config, pad, accelerator, progress):
        rate = progress.rate()
        if rate <= 0:
            break
        for group in optimizer.param_groups:
            group["lr"] = config.learning_rate * rate
        batch = {name: tensor.to(accelerator.device) for name, tensor in batch.items()}
        with accelerator.autocast():
            features, target_logits = target_pass(target, sink, batch["input_ids"])
            depths = weaver.config.block_size - 1
            anchors, valid = sample_anchors(batch["lengths"], batch["prompt_lengths"], config.anchors_per_sequence)
            blocks = make_blocks(batch["input_ids"], batch["lengths"], anchors, valid, depths)
            logits = draft_logits(target, weaver, network, features, batch["input_ids"], anchors)
        loss = block_loss(logits, target_logits, blocks, batch["temperatures"], config.loss)
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(network.parameters(), config.clip)
        optimizer.step()
        optimizer.zero_grad()
        progress.step(int(anchors.numel()) * accelerator.num_processes, loss.detach())
        if progress.seconds >= next_evaluation:
            last, evaluated_at = checkpoint(), progress.steps
            next_evaluation = progress.seconds + config.evaluate_every
    if evaluated_at != progress.steps:
        last = checkpoint()
    if accelerator.is_main_process:
        weaver.tree_config.draft_temperature = fit_temperatures(target, weaver.eval(), data, config, pad, sink)
        weaver.to(target.dtype).save_pretrained(folder)
        plot(folder)
    return last


class Progress:
    """How far a run is, and the share of the learning rate that belongs there."""

    def __init__(self, config: TrainConfig) -> None:
        self.config = config
        self.anchors = self.steps = 0
        self.before = 0.0
        self.started = monotonic()
        self._losses: deque[Tensor] = deque(maxlen=50)

    @property
    def seconds(self) -> float:
        return self.before + monotonic() - self.started

    def step(self, anchors: int, loss: Tensor) -> None:
        self.anchors += anchors
        self.steps += 1
        self._losses.append(loss)

    def mean_loss(self) -> float | None:
        """Over the last steps."""
        return float(torch.stack(list(self._losses)).mean()) if self._losses else None

    def rate(self) -> float:
        """Warm-up, flat, linear decay to 0 by anchors, or by time where that ends first."""
        done = self.anchors / self.config.anchors
        if self.config.max_seconds is not None:
            done = max(done, self.seconds / self.config.max_seconds)
        warm = (done + 1e-9) / self.config.warmup if self.config.warmup else 1.0
        return min(1.0, max(warm, 1e-3), (1 - done) / self.config.decay)

    def state_dict(self) -> dict[str, Any]:
        return {"anchors": self.anchors, "steps": self.steps, "seconds": self.seconds}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.anchors, self.steps, self.before = state["anchors"], state["steps"], state["seconds"]
        self.started = monotonic()


def training_batches(
    count: int, data: Sequences, config: TrainConfig, pad: int, accelerator: Accelerator, progress: Progress
) -> Iterator[dict[str, Tensor]]:
    """Batches of shuffled sequences without end; each process takes its own, and a resumed run goes on where it was."""
    generator = torch.Generator().manual_seed(config.seed + progress.steps)
    while True:
        order = torch.randperm(count, generator=generator).tolist()[
            accelerator.process_index :: accelerator.num_processes
        ]
        for i in range(0, len(order) - config.batch_size + 1, config.batch_size):
            batch = data.batch(order[i : i + config.batch_size], config.width, pad)
            widest = int(batch["lengths"].max())
            batch["input_ids"] = batch["input_ids"][:, : -(-widest // 64) * 64]
            yield batch


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
        anchors, valid = sample_anchors(batch["lengths"], batch["prompt_lengths"], 16, generator)
        batch = {name: tensor.to(device) for name, tensor in batch.items()}
        anchors, valid = anchors.to(device), valid.to(device)
        features, _ = target_pass(target, sink, batch["input_ids"])
        depths = weaver.config.block_size - 1
        blocks = make_blocks(batch["input_ids"], batch["lengths"], anchors, valid, depths)
        logits = draft_logits(target, weaver, BlockNetwork(drafter), features, batch["input_ids"], anchors)
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
    """Draft temperatures of each depth, for each temperature of the target: least cross entropy of the held-out text.

    That makes the marginals calibrated, so that path probabilities of different depths compare.
    """
    grid = torch.linspace(math.log(0.3), math.log(3.0), 47).exp()
    depths = weaver.config.block_size - 1
    losses = {temperature: torch.zeros(len(grid), depths) for temperature in FITTED_AT}
    for logits, blocks, temperatures in held_out_blocks(target, weaver, data, config, pad, sink):
        for temperature in FITTED_AT:
            chosen = blocks.weights * (temperatures - temperature).abs().lt(0.05)[:, None, None]
            for i, tau in enumerate(grid.tolist()):
                log_q = (logits.float() / tau).log_softmax(-1).gather(-1, blocks.labels[..., None])[..., 0]
                losses[temperature][i] -= (chosen * log_q).sum((0, 1)).cpu()
    return {
        f"{temperature:.1f}": [round(float(grid[i]), 4) for i in table.argmin(0).tolist()]
        for temperature, table in losses.items()
        if table.abs().sum() > 0
    }


def command() -> str:
    """How this run was started, and what it ran on."""
    card = torch.cuda.get_device_name(0) if torch.cuda.is_available() else platform.processor() or "cpu"
    return (
        f"{' '.join(['weaver-hf', *sys.argv[1:]])}\n"
        f"weaver_hf {__version__}, torch {torch.__version__}, transformers {transformers.__version__}, "
        f"Python {platform.python_version()}, {card}\n"
    )


def plot(folder: Path) -> None:
    """Acceptance over anchors from `log.jsonl`, where matplotlib is installed."""
    try:
        import matplotlib
    except ImportError:
        return
    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    figure, axes = pyplot.subplots(figsize=(6, 4))
    for name in [key for key in rows[-1] if key.startswith(("chain", "marginal"))]:
        axes.plot([row["anchors"] / 1e6 for row in rows], [row[name] for row in rows], marker=".", label=name)
    axes.set_xlabel("anchors trained (millions)")
    axes.set_ylabel("accepted drafted tokens a step")
    axes.legend(loc="upper left", bbox_to_anchor=(1, 1))
    figure.savefig(folder / "acceptance.png", dpi=120, bbox_inches="tight")
    pyplot.close(figure)
