"""`chain`: the most probable token of each depth, one path; what DFlash itself drafts."""

import torch

from ..drafter import DraftBlock
from ..tree import TokenTree
from .protocol import BlockBuilder

__all__ = ["ChainBuilder"]


class ChainBuilder(BlockBuilder):
    """One chain of the block's first candidates, cut at the budget."""

    def grow(self, block: DraftBlock, anchors: torch.Tensor) -> TokenTree:
        """The chain of a block behind `anchors [B, 1]`."""
        depth = min(self.budget, block.token_ids.shape[1])
        nodes = torch.arange(depth + 1, device=anchors.device)
        return TokenTree(
            token_ids=torch.cat([anchors, block.token_ids[:, :depth, 0]], 1),
            parents=(nodes - 1).expand(len(anchors), -1).contiguous(),
            log_probs=torch.cat(
                [block.log_probs.new_zeros(len(anchors), 1), block.log_probs[:, :depth, 0].cumsum(1)], 1
            ),
            sizes=torch.full((len(anchors),), depth + 1, device=anchors.device),
        )
