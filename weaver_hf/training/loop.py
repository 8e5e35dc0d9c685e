"""The loop that both trainers share: optimizers, schedule, batches, evaluation by the clock, checkpoints, log, plot.

Runs on one process or many through accelerate without a change. The folder of a run holds `train_command.txt`,
`log.jsonl` and, where matplotlib is installed, `acceptance.png`; `state/` is what a run resumes from.
"""

import json
import math
import platform
import sys
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import Any

import torch
import torch.nn as nn
import transformers
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from torch import Tensor

from .._version import __version__
from ..errors import WeaverError
from .data import Sequences

__all__ = ["TrainConfig", "TrainingDivergedError", "run"]

Batch = dict[str, Tensor]


class TrainingDivergedError(WeaverError, RuntimeError):
    """A loss that is no longer a number."""


@dataclass
class TrainConfig:
    """Settings of a run.

    Attributes:
        anchors: blocks trained in all; the run is over when they are.
        batch_size: sequences a step and process.
        anchors_per_sequence: blocks of each sequence.
        width: longest piece of a sequence.
        optimizer: `"muon"`: Muon for matrices and AdamW for the rest; `"adamw"`: AdamW for all. Muon's updates are
            scaled to AdamW's size, so that one learning rate serves both.
        learning_rate, warmup, decay, weight_decay, clip: a flat rate between warm-up and decay (both shares of the
            run).
        held_out: sequences for evaluation, from the end of the data.
        evaluate_every: seconds.
        max_seconds: a run that takes longer decays its rate to the end and stops; None for no limit.
        mixed_precision: accelerate's, `"bf16"` or `"no"`.
        compile: compile network and loss; every batch then is `width` wide.
    """

    anchors: int = 1_000_000
    batch_size: int = 32
    anchors_per_sequence: int = 64
    width: int = 448
    optimizer: str = "muon"
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
    compile: bool = False


def run(
    network: nn.Module,
    loss_of: Callable[[nn.Module, Batch], Tensor],
    evaluate: Callable[[], dict[str, Any]],
    data: Sequences,
    folder: Path,
    config: TrainConfig,
    accelerator: Accelerator,
    pad: int,
) -> dict[str, Any]:
    """Train `network` in place and return the last entry of the log.

    A folder that holds the state of an earlier run of the same settings is continued.

    Args:
        loss_of: the loss of a batch (`input_ids [B, S]`, `lengths`, `prompt_lengths`, `temperatures` `[B]`, on the
            device) under the network as accelerate wrapped it.
        evaluate: what the log shows beside the loss; called once a minute or so, on every process.

    Raises:
        TrainingDivergedError: the loss is NaN or infinite; the last saved state is from before.
    """
    clock = Clock(config, accelerator)
    network, *optimizers = accelerator.prepare(network, *make_optimizers(network, config))
    accelerator.register_for_checkpointing(clock)
    state, log = folder / "state", folder / "log.jsonl"
    folder.mkdir(parents=True, exist_ok=True)
    if state.exists():
        accelerator.load_state(str(state))
    elif accelerator.is_main_process:
        (folder / "train_command.txt").write_text(command(), encoding="utf-8")
        log.unlink(missing_ok=True)

    def checkpoint() -> dict[str, Any]:
        loss = clock.mean_loss()
        if loss is not None and not math.isfinite(loss):
            raise TrainingDivergedError(
                f"a loss of {loss} after {clock.anchors} anchors",
                "a finite loss",
                f"Lower the learning rate; {state} holds the state before.",
            )
        entry = {"anchors": clock.anchors, "seconds": round(clock.seconds, 1), "loss": loss, **evaluate()}
        if accelerator.is_main_process:
            with log.open("a", encoding="utf-8") as lines:
                lines.write(json.dumps(entry) + "\n")
            bar.console.print_json(json.dumps(entry), indent=None)
        accelerator.save_state(str(state))
        return entry

    last: dict[str, Any] = {}
    evaluated_at = -1
    with progress_bar(accelerator.is_main_process) as bar:
        task = bar.add_task("anchors", total=config.anchors, completed=clock.anchors, loss="")
        next_evaluation = clock.tick() + config.evaluate_every
        for batch in training_batches(len(data) - config.held_out, data, config, pad, accelerator, clock):
            rate = clock.rate()
            if rate <= 0:
                break
            for optimizer in optimizers:
                for group in optimizer.param_groups:
                    group["lr"] = config.learning_rate * rate
            batch = {name: tensor.to(accelerator.device) for name, tensor in batch.items()}
            loss = loss_of(network, batch)
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(network.parameters(), config.clip)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            anchors = len(batch["lengths"]) * config.anchors_per_sequence * accelerator.num_processes
            seconds = clock.step(anchors, loss.detach())
            if clock.steps % 20 == 0:
                bar.update(task, completed=clock.anchors, loss=f"loss {clock.mean_loss():.3f}")
            if seconds >= next_evaluation:
                last, evaluated_at = checkpoint(), clock.steps
                next_evaluation = clock.tick() + config.evaluate_every
        if evaluated_at != clock.steps:
            last = checkpoint()
    return last


def make_optimizers(network: nn.Module, config: TrainConfig) -> list[torch.optim.Optimizer]:
    """Muon for matrices and AdamW for the rest, or AdamW for all."""
    matrices = [p for p in network.parameters() if p.requires_grad and p.ndim == 2]
    others = [p for p in network.parameters() if p.requires_grad and p.ndim != 2]
    if config.optimizer == "adamw":
        groups = [{"params": matrices, "weight_decay": config.weight_decay}, {"params": others, "weight_decay": 0.0}]
        return [torch.optim.AdamW(groups, lr=config.learning_rate, betas=(0.9, 0.95))]
    if config.optimizer != "muon":
        raise ValueError(f"Found optimizer {config.optimizer!r}; expected 'muon' or 'adamw'.")
    return [
        torch.optim.Muon(
            matrices, lr=config.learning_rate, weight_decay=config.weight_decay, adjust_lr_fn="match_rms_adamw"
        ),
        torch.optim.AdamW(others, lr=config.learning_rate, betas=(0.9, 0.95), weight_decay=0.0),
    ]


class Clock:
    """How far a run is, by anchors and by the main process's time, and the share of the rate that belongs there."""

    def __init__(self, config: TrainConfig, accelerator: Accelerator) -> None:
        self.config, self.accelerator = config, accelerator
        self.anchors = self.steps = 0
        self.seconds = self.before = 0.0
        self.started = monotonic()
        self._losses: deque[Tensor] = deque(maxlen=50)

    def tick(self) -> float:
        """Read the clock. Processes that read their own would stop, or evaluate, at different steps."""
        self.seconds = self.before + monotonic() - self.started
        if self.accelerator.num_processes > 1:
            (self.seconds,) = broadcast_object_list([self.seconds])
        return self.seconds

    def step(self, anchors: int, loss: Tensor) -> float:
        self.anchors += anchors
        self.steps += 1
        self._losses.append(loss)
        return self.tick()

    def mean_loss(self) -> float | None:
        """Over the last steps, of this process."""
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
    count: int, data: Sequences, config: TrainConfig, pad: int, accelerator: Accelerator, clock: Clock
) -> Iterator[Batch]:
    """Batches of shuffled sequences without end; each process takes its own, and a resumed run draws new ones."""
    generator = torch.Generator().manual_seed(config.seed + clock.steps)
    batch_size = min(config.batch_size, count // accelerator.num_processes)
    while True:
        order = torch.randperm(count, generator=generator).tolist()[
            accelerator.process_index : count - count % accelerator.num_processes : accelerator.num_processes
        ]
        for i in range(0, len(order) - batch_size + 1, batch_size):
            batch = data.batch(order[i : i + batch_size], config.width, pad)
            if not config.compile:
                widest = int(batch["lengths"].max())
                batch["input_ids"] = batch["input_ids"][:, : -(-widest // 64) * 64]
            yield batch


def progress_bar(shown: bool) -> Progress:
    """Anchors, loss and time on a terminal."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[loss]}"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        disable=not shown,
    )


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
        from matplotlib.figure import Figure  # not pyplot, whose backend is the caller's (a notebook's, say)
    except ImportError:
        return
    rows = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    figure = Figure(figsize=(6, 4))
    axes = figure.subplots()
    for name in [key for key in rows[-1] if " T=" in key]:
        axes.plot([row["anchors"] / 1e6 for row in rows], [row[name] for row in rows], marker=".", label=name)
    axes.set_xlabel("anchors trained (millions)")
    axes.set_ylabel("accepted drafted tokens a step")
    axes.legend(loc="upper left", bbox_to_anchor=(1, 1))
    figure.savefig(folder / "acceptance.png", dpi=120, bbox_inches="tight")
