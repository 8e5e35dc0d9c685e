"""What training the drafter and training the adapter share around the loop: set up, train one part, fit, save."""

from collections.abc import Callable, Mapping
from dataclasses import replace
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
from .data import Sequences
from .held_out import HeldOut
from .loop import Batch, TrainConfig, plot, run

__all__ = ["train_part"]


def train_part(
    part: nn.Module,
    loss_of: Callable[[nn.Module, Batch, HeldOut, Accelerator], Tensor],
    evaluate: Callable[[HeldOut], dict[str, Any]],
    fits: Mapping[str, Callable[[HeldOut], dict[str, list[float]]]],
    target: Any,
    weaver: WeaverModel,
    data: Sequences,
    folder: Path,
    config: TrainConfig,
    pad: int,
) -> dict[str, Any]:
    """Train one part of a Weaver in place beside a frozen target, and save the Weaver; returns the last evaluation.

    Args:
        part: the network with the weights of `weaver` that are trained.
        loss_of: of the network as accelerate wrapped it, on a batch.
        evaluate: what the log shows beside the loss.
        fits: setting of `tree_config` -> how it is fitted once the part is trained; in this order.
        target, weaver, data, folder, config, pad: of the run.

    Raises:
        CheckpointError: the Weaver was made for another kind of target.
    """
    config = replace(config, held_out=min(config.held_out, max(len(data) // 10, 1)))
    accelerator = Accelerator(
        cpu=not torch.cuda.is_available(),  # else several processes without GPUs would each train on their own
        mixed_precision=config.mixed_precision,
        dynamo_backend="inductor" if config.compile else "no",
    )
    target = unwrap(target).to(accelerator.device).eval().requires_grad_(False)
    weaver.config.check_target(target.config)
    weaver.to(accelerator.device, torch.float32).train()
    sink = TapSink(family_of(target).decoder_of(target), weaver.config.target_layer_ids, accelerator.device)
    held_out = HeldOut(target, weaver, sink, data, config, pad)

    def evaluation() -> dict[str, Any]:
        weaver.eval()
        result = evaluate(held_out)
        weaver.train()
        return result

    def loss(network: nn.Module, batch: Batch) -> Tensor:
        return loss_of(network, batch, held_out, accelerator)

    last = run(part, loss, evaluation, data, folder, config, accelerator, pad)
    if accelerator.is_main_process:
        weaver.eval()
        for setting, fit in fits.items():
            setattr(weaver.tree_config, setting, fit(held_out))
        weaver.to(target.dtype).save_pretrained(folder)
        plot(folder)
    accelerator.wait_for_everyone()
    return last
