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

__all__ = ["BlockBuilder", "DraftContext", "Scorer", "TreeBuilder"]


class Scorer(Protocol):
    """Conditional scores of a block's candidates, for the nodes of a growing tree.

    A tree has a fixed number of slots `M`; node 0 is the anchor. The search asks for every node once, parents before
    children, so a scorer can keep what it computed for a node under the node's slot.
    """

    def __call__(
        self, token_ids: torch.Tensor, depths: torch.Tensor, ancestors: torch.Tensor, first: int
    ) -> torch.Tensor:
        """Log-probabilities of the candidates of the next depth, `[B, W, K]`, for `W` nodes.

        Args:
            token_ids: int64 `[B, W]`, the nodes' own tokens.
            depths: int64 `[B, W]`, 0 at the anchor; candidates are those of depth `depths + 1`. What is given for a
                node at the last depth is not read.
            ancestors: bool `[B, W, M]`, the slots of each node's ancestors and its own.
            first: slot of the first node; they lie at `first..first + W - 1`.
        """
        ...


@dataclass
class DraftContext:
    """What a step knows before it drafts. Made once a step, and filled in where it is: a copy would lose the anchors.

    Attributes:
        history: the committed token ids of each row, on the host; the last one is the anchor. It grows between calls.
        taps: states of the rows that entered the target's cache since the last call (the prompt at first, then each
            accepted path); None where the Weaver has no taps.
        device: where the tree belongs.
        block: what the block drafter proposes; None where the Weaver has no drafter.
        score: of the block's candidates given their paths; None where the builder needs no adapter.
        noise: what the target will draw with, from the token behind the anchor on; None for trees built without it.
    """

    history: Sequence[Sequence[int]]
    taps: TapStates | None
    device: torch.device
    block: DraftBlock | None = None
    score: Scorer | None = None
    noise: GumbelField | None = None

    @cached_property
    def anchors(self) -> torch.Tensor:
        """The last committed token of each row, int64 `[B, 1]`; uploaded once."""
        return torch.tensor([row[-1:] for row in self.history], device=self.device)


class TreeBuilder(Protocol):
    """Grows one tree for each row. Made anew for each call of `generate`, so it may keep an index of the text.

    One that reads the drafter's block says so with `needs_block = True`; it cannot serve a Weaver without a drafter,
    and for others the drafter does not run. One that reads conditional scores also says `needs_adapter = True`. A class
    that is made with more than the budget names those fields of `TreeConfig` as `options`.
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
