"""Hidden states of the target that a drafter reads, taken by forward hooks.

Hooks, because `output_hidden_states=[ids]` changed its meaning between transformers releases and a chunked prefill
returns its last chunk alone.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from threading import get_ident
from typing import Any, NamedTuple

import torch
import torch.nn as nn
from torch import Tensor

__all__ = ["TapSink", "TapStates"]


class TapStates(NamedTuple):
    """States of `R` rows of text.

    Attributes:
        features: `[B, R, n * H]`, outputs of the tapped decoder layers, concatenated in the order of the ids.
        final_hidden: `[B, R, H]`, output of the final norm.
    """

    features: Tensor
    final_hidden: Tensor

    def select(self, path: Tensor) -> "TapStates":
        """The rows at `path`, int64 `[B, P]`."""
        return TapStates(*(x.gather(1, path[..., None].expand(-1, -1, x.shape[-1])) for x in self))


class TapSink:
    """Collects tap states of the forwards that run inside `listening()`.

    Args:
        decoder: the module with `layers` and the final `norm`.
        layer_ids: 0-based ids of the decoder layers whose outputs are taken.
        device: where the states are gathered (layers may live on several devices).
    """

    def __init__(self, decoder: nn.Module, layer_ids: list[int], device: torch.device) -> None:
        self._modules = [decoder.get_submodule(f"layers.{i}") for i in layer_ids] + [decoder.get_submodule("norm")]
        self._chunks: list[list[Tensor]] = [[] for _ in self._modules]
        self._device = device

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Takes the forwards that this thread runs inside this block, and no others (guidance, another thread)."""
        thread = get_ident()

        def take(chunks: list[Tensor], module: nn.Module, args: Any, output: Tensor) -> None:
            if get_ident() == thread:
                chunks.append(output.to(self._device))

        pairs = zip(self._modules, self._chunks, strict=True)
        handles = [module.register_forward_hook(partial(take, chunks)) for module, chunks in pairs]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def take(self) -> TapStates:
        """What was collected since the last call, the chunks of a prefill joined."""
        *taps, final = (torch.cat(chunks, 1) for chunks in self._chunks)
        self._chunks = [[] for _ in self._modules]
        return TapStates(torch.cat(taps, -1), final)
