"""`weaver` and `weaver-paper`: best-first trees over conditional scores (Weaver, arXiv 2607.06763).

A node's children depend on its path, so each node must be scored before its children are known, and scoring is a pass
of a network. Growth is therefore batched: every round takes the best open candidates of the tree so far, makes nodes of
them, and scores their children together. All shapes are static, and nothing waits for the host.

`weaver` grows, then prunes: all candidates that were scored compete for the budget at the end. `weaver-paper` keeps
what it took, and does not score the last batch.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from weaver_kernels.dispatch import use_triton

from ..tree import TokenTree
from .marginal import best
from .protocol import DraftContext, Scorer

__all__ = ["PaperBuilder", "WeaverBuilder", "grow"]

ROUNDS = 16
CHILDREN = 16
PAPER_CHILDREN = 8


class ConditionalBuilder:
    """A builder that grows by the scores of an adapter, or of whoever else scores a block's candidates.

    Args:
        budget: drafted nodes a step.
        widths: nodes that each round makes; the first is the root's and has 1.
        children: candidates of a node that compete.
        prune: whether all that was scored competes in the end, or what was taken is kept.
    """

    needs_block = True
    needs_adapter = True

    def __init__(self, budget: int, widths: Sequence[int], children: int, *, prune: bool) -> None:
        self.budget, self.widths, self.children, self.prune = budget, widths, children, prune

    def __call__(self, context: DraftContext) -> TokenTree:
        assert context.block is not None
        assert context.score is not None
        parts = getattr(context.score, "parts", None)
        if self.prune and parts is not None and use_triton(context.anchors):
            from .conditional_kernels import grow_adapter  # Triton is asked for where it is used

            tree: dict[str, Any] = {"budget": self.budget, "widths": self.widths, "children": self.children}
            with torch.cuda.device_of(context.anchors):
                return grow_adapter(anchors=context.anchors, **tree, **parts)
        return self.grow(context.block.token_ids, context.anchors, context.score)

    def grow(self, token_ids: Tensor, anchors: Tensor, score: Scorer) -> TokenTree:
        """The trees of candidates `[B, D, K]` behind `anchors`, int64 `[B, 1]`."""
        return grow(token_ids, anchors, score, self.budget, self.widths, self.children, prune=self.prune)


class WeaverBuilder(ConditionalBuilder):
    """Grows `rounds` times, `parents` nodes a round with `children` candidates each, then prunes to the budget.

    Args:
        budget: drafted nodes a step.
        rounds: passes of the scorer, the root's included. None: 16, or as many as the budget, which with one node a
            round finds the best tree there is.
        parents: nodes scored in every later pass. None: enough for `rounds` passes to score as many nodes as are kept.
        children: candidates of a node that compete.
    """

    options = ("rounds", "parents", "children")

    def __init__(
        self, budget: int, rounds: int | None = None, parents: int | None = None, children: int | None = None
    ) -> None:
        rounds = rounds or max(1, min(ROUNDS, budget))
        widths = [1] + [parents or -(-budget // rounds)] * (rounds - 1)
        super().__init__(budget, widths, children or CHILDREN, prune=True)


class PaperBuilder(ConditionalBuilder):
    """The paper's rule: about 16 batches whatever the budget, the 8 best children of a node, taken means kept.

    Args:
        budget: drafted nodes a step.
    """

    def __init__(self, budget: int) -> None:
        width = max(1, -(-budget // 16))
        widths = [1] + [width] * (budget // width) + ([budget % width] if budget % width else [])
        super().__init__(budget, widths, PAPER_CHILDREN, prune=False)


@torch.no_grad()
def grow(
    token_ids: Tensor,
    anchors: Tensor,
    score: Scorer,
    budget: int,
    widths: Sequence[int],
    children: int,
    *,
    prune: bool,
) -> TokenTree:
    """Grow trees behind the anchors by batched best-first search over a scorer's conditional log-probabilities.

    Every node owns the cells of its `children` best candidates (of equal ones the lower index in the pool); a round
    takes the best cells (of equal ones the lower index) and makes nodes of them. A child never scores above its parent.

    Args:
        token_ids: int64 `[B, D, K]`, the candidates of each depth, distinct within a depth.
        anchors: int64 `[B, 1]`.
        score: of the candidates given the path, see `Scorer`.
        budget: drafted nodes kept a row.
        widths: nodes that each round makes; the first is the root's and has 1.
        children: cells of a node.
        prune: keep the best of all nodes and cells, or the nodes alone (whose last batch is then not scored).

    Returns:
        Trees of at most `1 + budget` nodes, at a static width.
    """
    batch, depths, pool = token_ids.shape
    slots, children = sum(widths), min(children, pool)
    # Nodes, the root first. Slots that a round cannot fill keep the score -inf.
    node_token = anchors.expand(-1, slots).clone()
    node_parent, node_depth = torch.zeros_like(node_token), torch.zeros_like(node_token)
    node_score = torch.full(node_token.shape, float("-inf"), device=anchors.device)
    node_score[:, 0] = 0
    ancestors = torch.eye(slots, dtype=torch.bool, device=anchors.device).repeat(batch, 1, 1)
    # Cells: candidates that are not nodes yet. Those of node `s` are `s * children` and the next; taken ones are -inf.
    cell_parent = torch.arange(slots * children, device=anchors.device) // children
    cell_token = anchors.expand(-1, slots * children).clone()
    cell_score = torch.full(cell_token.shape, float("-inf"), device=anchors.device)

    first = 0
    for turn, width in enumerate(widths):
        nodes = slice(first, first + width)
        if turn:
            reach = max(first * children, width)  # no later cell is filled yet
            open_scores = cell_score[:, :reach]
            if prune:  # a leaf need not be a node to be kept
                leaf = node_depth[:, cell_parent[:reach]] + 1 >= depths
                open_scores = open_scores.masked_fill(leaf, float("-inf"))
            taken, cell = best(open_scores, width)
            real, parent = taken.isfinite(), cell_parent[cell]
            node_token[:, nodes] = torch.where(real, cell_token.gather(1, cell), anchors)
            node_parent[:, nodes] = torch.where(real, parent, 0)
            node_depth[:, nodes] = torch.where(real, node_depth.gather(1, parent) + 1, 0)
            node_score[:, nodes] = taken
            ancestors[:, nodes] |= ancestors.gather(1, parent[..., None].expand(-1, -1, slots)) & real[..., None]
            cell_score.scatter_(1, cell, torch.where(real, float("-inf"), cell_score.gather(1, cell)))
        if turn + 1 < len(widths) or prune:
            depth = node_depth[:, nodes]
            log_q = score(node_token[:, nodes], depth, ancestors[:, nodes], first)
            edge, candidate = best(log_q.float(), children)
            path = node_score[:, nodes, None]
            reached = torch.minimum(path + edge, path)
            alive = (depth[..., None] < depths) & (reached <= path) & path.isfinite()  # also drops a NaN
            ids = token_ids.gather(1, depth.clamp(max=depths - 1)[..., None].expand(-1, -1, pool))
            cells = slice(first * children, (first + width) * children)
            cell_token[:, cells] = ids.gather(2, candidate).flatten(1)
            cell_score[:, cells] = torch.where(alive, reached, float("-inf")).flatten(1)
        first += width

    parts = [(node_score[:, 1:], node_token[:, 1:], node_parent[:, 1:])]
    if prune:
        parts.append((cell_score, cell_token, cell_parent.expand(batch, -1)))
    scores, tokens, parents = (torch.cat(part, 1) for part in zip(*parts, strict=True))
    tree = keep_best(anchors, scores, tokens, parents, slots, budget)
    return replace(tree, max_depth=min(depths, budget))


def keep_best(anchors: Tensor, scores: Tensor, tokens: Tensor, parents: Tensor, slots: int, budget: int) -> TokenTree:
    """The best `budget` entries of a list of nodes as trees; the list holds slots 1.. first, parents before children.

    A parent scores at least as much as its child and stands before it, so what a stable sort keeps is closed under
    ancestors. The kept ones stay in the order of the list.
    """
    count = scores.shape[1]
    kept, order = best(scores, min(budget, count))
    order = torch.where(kept.isfinite(), order, count).sort(-1).values
    real = order < count
    order = order.clamp(max=count - 1)
    # Slot -> new index. Entries that are no slots are nobody's parents; they and what is dropped share a last place.
    place = torch.zeros(len(order), slots + 1, dtype=torch.long, device=order.device)
    index = torch.arange(1, order.shape[1] + 1, device=order.device).expand_as(order)
    place.scatter_(1, torch.where(real & (order < slots - 1), order + 1, slots), index)
    new_parents = place.gather(1, parents.gather(1, order))
    return TokenTree(
        token_ids=torch.cat([anchors, torch.where(real, tokens.gather(1, order), anchors)], 1),
        parents=torch.cat([torch.full_like(anchors, -1), torch.where(real, new_parents, 0)], 1),
        log_probs=torch.cat(
            [scores.new_zeros(len(order), 1), torch.where(real, scores.gather(1, order), float("-inf"))], 1
        ),
        sizes=1 + real.sum(1),
    )
