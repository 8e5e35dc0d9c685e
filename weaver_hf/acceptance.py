"""Acceptance: the target's own choice at each node, followed down the tree. Exact for every tree by construction."""

from typing import NamedTuple

import torch
from torch import Tensor

from .tree import TokenTree

__all__ = ["AcceptedPath", "follow"]


class AcceptedPath(NamedTuple):
    """The nodes that a choice of one token a node walks through.

    Attributes:
        path: int64 `[B, N]`, nodes from the root down, entries from `lengths` on are 0.
        tokens: int64 `[B, N]`, the token chosen at each node of the path; the last one is the bonus token.
        lengths: int64 `[B]`, nodes on the path, root included, so also the tokens that the step emits.
    """

    path: Tensor
    tokens: Tensor
    lengths: Tensor


def follow(tree: TokenTree, choices: Tensor) -> AcceptedPath:
    """Follow the chosen token from the root as long as a child carries it.

    A node is on the path where it and all its ancestors carry the token chosen at their parents. Siblings carry
    different tokens, so that is one path; in index order it runs from the root down, since parents come first.

    Args:
        tree: `B` trees of `N` nodes.
        choices: int64 `[B, N]`, the target's token after each node.

    Returns:
        The path, without a host sync and at static shapes.
    """
    node = torch.arange(tree.num_nodes, device=tree.device)
    matches = (choices.gather(1, tree.parents.clamp(min=0)) == tree.token_ids) & tree.is_node
    matches[:, 0] = True
    accepted = (matches[:, None] | ~tree.ancestors).all(-1)
    lengths = accepted.sum(-1)
    order = torch.where(accepted, node, tree.num_nodes).sort(-1).values
    path = torch.where(node < lengths[:, None], order, 0)
    return AcceptedPath(path, choices.gather(1, path), lengths)
