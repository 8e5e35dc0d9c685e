"""Acceptance: the target's own choice at each node, followed down the tree. Exact for every tree by construction.

A choice reads the target's processed scores and the noise, never the proposal's scores, so the text is the same for
every tree. For trees built without randomness no lossless rule accepts more: each emits the target's law, and what is
accepted is at most the emitted text's longest prefix in the tree, which is what `follow` accepts. More is to be had
only from trees that guess the noise as well (`coupled`), or by giving up exactness (`lossy_margin`).
"""

from typing import NamedTuple

import torch
from torch import Tensor

from .noise import GumbelField
from .tree import TokenTree

__all__ = ["LOSSY", "RULES", "AcceptedPath", "choose", "follow", "plant"]

LOSSY = "lossy_margin"

#: Rules of `TreeConfig.acceptance`. `sample` and `coupled` make the same choices; the builders know the noise or not.
RULES = ("sample", "coupled", LOSSY)


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


def choose(
    tree: TokenTree, nodes: Tensor, scores: Tensor, noise: GumbelField | None = None, margin: float | None = None
) -> Tensor:
    """The target's choice at some nodes: the best score (greedy), or the best sum of score and noise, which is a draw.

    That the largest sum of log-probability and Gumbel noise is a draw also holds for scores that are not normalised.

    Args:
        tree: `B` trees of `N` nodes.
        nodes: int64 `[M]`, where a token is chosen.
        scores: `[B, M, V]`, the target's processed scores there.
        noise: of the position that the root decides; None for greedy decoding.
        margin: of the rule `lossy_margin`, in nats; None for a lossless choice.

    Returns:
        int64 `[B, M]`; of equal sums the lowest token.
    """
    utilities = scores
    if noise is not None:
        rows = noise.rows(tree.depth_limit + 1, scores.shape[-1])
        row = torch.arange(len(rows), device=rows.device)[:, None]
        utilities = rows[row, tree.depths[:, nodes]].add_(scores)
    if margin is not None:
        return _prefer_drafted(tree, nodes, utilities, margin)
    return utilities.argmax(-1)


def _prefer_drafted(tree: TokenTree, nodes: Tensor, utilities: Tensor, margin: float) -> Tensor:
    """`lossy_margin`: a drafted child within `margin` of the best choice is taken in its place; at 0 nothing changes.

    After AdaptiveSpec's idea of accepting what the target finds nearly as good. The text is no longer the target's.
    """
    is_child = (tree.parents[:, None] == nodes[:, None]) & tree.is_node[:, None]  # [B, M, N]
    tokens = tree.token_ids[:, None].expand_as(is_child)
    drafted = utilities.gather(-1, tokens).masked_fill(~is_child, float("-inf"))
    best = utilities.argmax(-1, keepdim=True)
    rival = drafted.argmax(-1, keepdim=True)
    near = drafted.gather(-1, rival) > utilities.gather(-1, best) - margin
    return torch.where(near, tokens.gather(-1, rival), best)[..., 0]


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


def plant(tree: TokenTree, choices: Tensor, probability: float) -> Tensor:
    """Choices that take a node's best child with this probability a depth, whatever the target chose: for timing alone.

    Args:
        tree: `B` trees of `N` nodes.
        choices: int64 `[B, N]`, what is taken otherwise.

    Returns:
        int64 `[B, N]`.
    """
    node = torch.arange(tree.num_nodes, device=tree.device)
    is_child = (tree.parents[:, None] == node[:, None]) & tree.is_node[:, None]  # [B, N, N]
    best = tree.log_probs[:, None].masked_fill(~is_child, float("-inf")).argmax(-1)
    draws = torch.rand(len(choices), tree.depth_limit + 1, device=tree.device).gather(1, tree.depths)
    return torch.where(is_child.any(-1) & (draws < probability), tree.token_ids.gather(1, best), choices)
