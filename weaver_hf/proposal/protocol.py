"""What every tree builder is given and gives."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import torch

from ..drafter import DraftBlock
from ..noise import GumbelField
from ..target.taps import TapStates
from ..tree import TokenTree

__all__ = ["BlockBuilder", "DraftContext", "TreeBuilder"]


@dataclass(frozen=True)
class DraftContext:
    """What a step knows before it drafts.

    Attributes:
        history: the committed token ids of each row, on the host; the last one is the anchor. It grows between calls.
        taps: states of the rows that entered the target's cache since the last call (the prompt at first, then each
            accepted path); None where the Weaver has no taps.
        device: where the tree belongs.
        block: what the block drafter proposes; None where the Weaver has no drafter.
        noise: what the target will draw with, from the token behind the anchor on; None for trees built without it.
    """

    history: Sequence[Sequence[int]]
    taps: TapStates | None
    device: torch.device
    block: DraftBlock | None = None
    noise: GumbelField | None = None

    @cached_property
    def anchors(self) -> torch.Tensor:
        """The last committed token of each row, int64 `[B, 1]`."""
        return torch.tensor([row[-1:] for row in self.history], device=self.device)


class TreeBuilder(Protocol):
    """Grows one tree for each row. Made anew for each call of `generate`, so it may keep an index of the text.

    One that reads the drafter's block says so with `needs_block = True`; it cannot serve a Weaver without a drafter,
    and for others the drafter does not run.
    """

    def __call__(self, context: DraftContext) -> TokenTree:
        """A tree on the context's device, rooted at the last token of each row."""
        ...


class BlockBuilder(ABC):
    """A builder that needs nothing but the drafter's block.

    Args:
        budget: drafted nodes a step.
    """

    needs_block = True

    def __init__(self, budget: int) -> None:
        self.budget = budget

    def __call__(self, context: DraftContext) -> TokenTree:
        assert context.block is not None
        return self.grow(context.block, context.anchors)

    @abstractmethod
    def grow(self, block: DraftBlock, anchors: torch.Tensor) -> TokenTree:
        """The trees of a block behind `anchors`, int64 `[B, 1]`."""
