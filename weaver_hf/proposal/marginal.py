"""`marginal`: the budget's most probable paths under independent depths (DDTree, arXiv 2604.12989).

The probability of a path is the product of its tokens' marginals, so a path is never more probable than its prefixes,
and the best `budget` paths are closed under prefixes: they are a tree, and the one with the largest expected number of
accepted tokens if the depths were independent. Found level by level at static shapes, without a heap and without a host
sync.
"""

import torch
import torch.nn.functional as F

from ..drafter import DraftBlock
from ..tree import TokenTree
from .protocol import BlockBuilder

__all__ = ["MarginalBuilder", "best"]


class MarginalBuilder(BlockBuilder):
    """The exact best `budget` paths; equal scores keep the order of their parents, then of their candidates."""

    def grow(self, block: DraftBlock, anchors: torch.Tensor) -> TokenTree:
        """The best paths of a block behind `anchors [B, 1]`."""
        budget = self.budget
        batch, depths, pool = block.token_ids.shape
        # A level keeps its best `budget` paths. Any path that is among the best of all levels is among those, and so is
        # its parent, which is at least as probable.
        scores = block.log_probs.new_zeros(batch, 1)
        levels = []
        for depth in range(depths):
            paths = (scores[..., None] + block.log_probs[:, depth, None, :]).flatten(1)  # [B, parents * K]
            scores, chosen = best(paths, budget)
            parent, candidate = chosen // pool, chosen % pool
            first = (
                1 + budget * (depth - 1) if depth else 0
            )  # where the parents' level starts in the list of all levels
            missing = budget - scores.shape[1]  # few candidates so far: fill up, so that all levels are equally wide
            scores = F.pad(scores, (0, missing), value=float("-inf"))
            tokens = F.pad(block.token_ids[:, depth].gather(1, candidate), (0, missing))
            levels.append((scores, tokens, F.pad(first + parent, (0, missing))))
        score, token, parent = (torch.cat(parts, 1) for parts in zip(*levels, strict=True))  # [B, depths * budget]
        kept, order = best(score, budget)  # stable: of equal scores the shallower comes first, so parents do
        # Old place (root 0, then the levels) -> new place.
        place = order.new_zeros(batch, 1 + score.shape[1])
        place.scatter_(1, order + 1, torch.arange(1, order.shape[1] + 1, device=order.device).expand_as(order))
        parents = place.gather(1, parent.gather(1, order))
        real = kept.isfinite()
        return TokenTree(
            token_ids=torch.cat([anchors, torch.where(real, token.gather(1, order), anchors)], 1),
            parents=torch.cat([parents.new_full((batch, 1), -1), torch.where(real, parents, 0)], 1),
            log_probs=torch.cat([kept.new_zeros(batch, 1), kept], 1),
            sizes=1 + real.sum(1),
            max_depth=min(depths, budget),
        )


def best(scores: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The `count` largest of each row with their places, the lower place first among equals."""
    values, order = torch.sort(scores, dim=-1, descending=True, stable=True)
    return values[..., :count], order[..., :count]
