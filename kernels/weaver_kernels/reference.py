"""Tree verification and commit in plain torch: the contract that every kernel of this package is tested against.

Shapes: `B` rows, `T` tree nodes (node 0 is the root; a parent's index is smaller than its child's), `Hk` key heads,
`Hv` value heads (`Hv` a multiple of `Hk`; value head `h` reads key head `h // (Hv // Hk)`), `dk`/`dv` head dimensions,
`C` convolution channels, `W` convolution width. `ancestors[b, i, j]` says that node `j` is node `i` or an ancestor of
it.

The recurrence is the gated delta rule (Yang et al., arXiv 2412.06464). Its tree form, a masked triangular solve over
the ancestor relation, was published with Weaver (arXiv 2607.06763) and independently by Bole (arXiv 2608.01651) and
TreeWY (arXiv 2608.20961). On one root-to-leaf path it is that path's ordinary chunk form, so branches never mix.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = [
    "GatedDeltaStash",
    "causal_conv_commit",
    "causal_conv_index",
    "causal_conv_tree",
    "gated_delta_commit",
    "gated_delta_tree",
    "gather_nodes",
    "l2norm",
    "tree_attention",
]


class GatedDeltaStash(NamedTuple):
    """What a later commit needs of one layer's verification, in fp32 (fp64 for fp64 inputs).

    Rounding any of it to bf16 makes the committed state drift by 2e-3 (measured), so nothing here is rounded.
    """

    keys: Tensor  # [B, Hk, T, dk], L2-normalised
    updates: Tensor  # [B, Hv, T, dv], the corrected values u
    decay: Tensor  # [B, Hv, T], path sums G of the log decay


def l2norm(x: Tensor) -> Tensor:
    """`x / sqrt(sum(x^2) + 1e-6)` over the last axis, as transformers and flash-linear-attention define it."""
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6)


def gated_delta_tree(
    query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, state: Tensor, ancestors: Tensor
) -> tuple[Tensor, GatedDeltaStash]:
    """Outputs of the gated delta rule at every node of a tree, each from its own path, without a state per node.

    Args:
        query, key: `[B, T, Hk, dk]`, before the L2 norm (it is applied here; the query is then scaled by `dk ** -0.5`).
        value: `[B, T, Hv, dv]`.
        g: `[B, T, Hv]`, log decay, <= 0.
        beta: `[B, T, Hv]`, write strength.
        state: `[B, Hv, dk, dv]`, the committed state; only read.
        ancestors: bool `[B, T, T]`.

    Returns:
        The outputs `[B, T, Hv, dv]` in the dtype of `value`, and the stash for `gated_delta_commit`.
    """
    groups = value.shape[2] // key.shape[2]
    work = torch.promote_types(value.dtype, torch.float32)  # never below fp32: u and G feed the committed state
    q, k, v = (x.transpose(1, 2).to(work) for x in (query, key, value))  # [B, H, T, d]
    log_decay, b = (x.transpose(1, 2).to(work) for x in (g, beta))  # [B, Hv, T]
    s0 = state.to(work)
    q, k = l2norm(q) * q.shape[-1] ** -0.5, l2norm(k)

    tree = ancestors[:, None]  # [B, 1, T, T]
    path_decay = (tree.to(work) @ log_decay[..., None])[..., 0]  # G
    # Mask before exp: off the tree the difference can be large and positive, and inf * 0 would be NaN. On ancestor
    # pairs it is never positive.
    ratio = (path_decay[..., :, None] - path_decay[..., None, :]).masked_fill(~tree, float("-inf")).exp()
    from_state = path_decay.exp()[..., None]  # [B, Hv, T, 1]

    # Gram products once per key head, masks and decays per value head.
    gram = (k @ k.transpose(-1, -2)).repeat_interleave(groups, 1)
    scores = (q @ k.transpose(-1, -2)).repeat_interleave(groups, 1) * ratio
    q_state = q.repeat_interleave(groups, 1) @ s0
    k_state = k.repeat_interleave(groups, 1) @ s0

    # (I + A) u = beta (v - e^G S0^T k). `unitriangular` ignores the diagonal of what it is given, so A needs no eye.
    # Substitution, never a product of squarings: powers of A explode when keys repeat.
    system = gram * ratio * b[..., None]
    updates = torch.linalg.solve_triangular(
        system, b[..., None] * (v - from_state * k_state), upper=False, unitriangular=True
    )
    output = from_state * q_state + scores @ updates
    return output.transpose(1, 2).to(value.dtype), GatedDeltaStash(k, updates, path_decay)


def gated_delta_commit(state: Tensor, stash: GatedDeltaStash, path: Tensor, lengths: Tensor) -> Tensor:
    """The committed state after the accepted path, in closed form: nothing is rolled back and nothing is re-run.

    `S = e^{G_l} S0 + sum_j e^{G_l - G_j} k_j u_j^T` over the nodes `j` of the path that ends in `l`.

    Args:
        state: `[B, Hv, dk, dv]`, the state that the verification read.
        stash: that verification's stash.
        path: int64 `[B, P]`, nodes from the root down; entries from `lengths` on are ignored (any valid node).
        lengths: int64 `[B]`, how many entries of `path` each row accepts (0 leaves the row's state as it is).

    Returns:
        The new state, `[B, Hv, dk, dv]`, in the dtype of `state`.
    """
    groups = stash.updates.shape[1] // stash.keys.shape[1]
    keys = gather_nodes(stash.keys, path).repeat_interleave(groups, 1)  # [B, Hv, P, dk]
    updates = gather_nodes(stash.updates, path)  # [B, Hv, P, dv]
    decay = gather_nodes(stash.decay[..., None], path)[..., 0]  # [B, Hv, P]
    used = torch.arange(path.shape[1], device=path.device) < lengths[:, None]  # [B, P]
    last = (lengths - 1).clamp(min=0)[:, None, None].expand(-1, decay.shape[1], 1)
    total = decay.gather(-1, last).masked_fill(lengths[:, None, None] == 0, 0.0)  # [B, Hv, 1]: G of the last node
    weight = (total - decay).masked_fill(~used[:, None], float("-inf")).exp()
    new = total.exp()[..., None] * state + (keys * weight[..., None]).transpose(-1, -2) @ updates
    return new.to(state.dtype)


def causal_conv_index(parents: Tensor, depths: Tensor, width: int) -> Tensor:
    """Where each node's convolution taps lie in `concat(window, node rows)`, once per step for all layers.

    Args:
        parents, depths: int64 `[B, T]`; the root has parent -1 and depth 0.
        width: `W`, also the number of columns of the committed window.

    Returns:
        int64 `[B, T, W]`; entry `t` is the tap of age `W - 1 - t` (the last one is the node itself). An ancestor that
        the tree does not reach is a column of the window.
    """
    node = torch.arange(parents.shape[1], device=parents.device).expand_as(parents)
    taps = []
    for age in range(width):
        taps.append(torch.where(depths >= age, width + node, width - (age - depths)))
        node = parents.gather(1, node).clamp(min=0)
    return torch.stack(taps[::-1], -1)


def causal_conv_tree(
    rows: Tensor, window: Tensor, weight: Tensor, index: Tensor, bias: Tensor | None = None, activation: bool = True
) -> Tensor:
    """Depthwise causal convolution whose taps run along each node's ancestors and then into the committed window.

    Args:
        rows: `[B, T, C]`, the nodes' inputs before the convolution.
        window: `[B, C, W]`, the last `W` committed inputs; only read.
        weight: `[C, W]`.
        index: int64 `[B, T, W]` of `causal_conv_index`.
        bias: `[C]` or None.
        activation: apply SiLU.

    Returns:
        `[B, T, C]` in the dtype of `rows`, accumulated in fp32.
    """
    batch, nodes, width = index.shape
    inputs = torch.cat([window.transpose(1, 2).to(rows.dtype), rows], 1)  # [B, W + T, C]
    taps = inputs.gather(1, index.reshape(batch, -1, 1).expand(-1, -1, inputs.shape[-1]))
    taps = taps.view(batch, nodes, width, -1)
    work = torch.promote_types(rows.dtype, torch.float32)
    out = (taps.to(work) * weight.t().to(work)).sum(2)
    if bias is not None:
        out = out + bias.to(work)
    return (F.silu(out) if activation else out).to(rows.dtype)


def causal_conv_commit(window: Tensor, rows: Tensor, path: Tensor, lengths: Tensor) -> Tensor:
    """The committed window after the accepted path: the last `W` entries of `concat(window, accepted rows)`.

    Args:
        window: `[B, C, W]`; rows: `[B, T, C]` as given to `causal_conv_tree`; path: int64 `[B, P]`; lengths: int64
        `[B]`.

    Returns:
        `[B, C, W]` in the dtype of `window`.
    """
    width = window.shape[-1]
    accepted = rows.gather(1, path[..., None].expand(-1, -1, rows.shape[-1]))  # [B, P, C]
    line = torch.cat([window, accepted.transpose(1, 2).to(window.dtype)], -1)  # [B, C, W + P]
    columns = lengths[:, None] + torch.arange(width, device=path.device)  # [B, W]
    return line.gather(-1, columns[:, None].expand(-1, line.shape[1], -1))


def gather_nodes(x: Tensor, path: Tensor) -> Tensor:
    """Rows of `x [B, H, T, D]` at the nodes of `path [B, P]`: `[B, H, P, D]`."""
    return x.gather(2, path[:, None, :, None].expand(-1, x.shape[1], -1, x.shape[-1]))


def tree_attention(query: Tensor, key: Tensor, value: Tensor, visible: Tensor, scaling: float) -> Tensor:
    """Softmax attention of tree nodes over the committed slots and their own ancestors, grouped heads kept grouped.

    Args:
        query: `[B, Hq, T, D]`; key, value: `[B, Hkv, S, D]` with `Hq` a multiple of `Hkv`.
        visible: bool `[B, T, S]`, which slots each node may read (every node sees at least itself).
        scaling: factor on the scores.

    Returns:
        `[B, T, Hq, D]` in the dtype of `query`; the softmax runs in fp32.
    """
    batch, heads, nodes, dim = query.shape
    kv_heads = key.shape[1]
    q = query.reshape(batch, kv_heads, -1, dim)  # the query heads of one KV head stacked: no copy of K and V
    scores = (q @ key.transpose(-1, -2)).view(batch, kv_heads, -1, nodes, key.shape[2]) * scaling
    work = torch.promote_types(scores.dtype, torch.float32)
    weights = scores.to(work).masked_fill(~visible[:, None, None], float("-inf")).softmax(-1).to(value.dtype)
    out = weights.view(batch, kv_heads, -1, key.shape[2]) @ value
    return out.view(batch, heads, nodes, dim).transpose(1, 2)
