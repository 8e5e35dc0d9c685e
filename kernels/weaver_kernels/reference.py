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
    "TreeBuffers",
    "TreeTopology",
    "causal_conv_commit",
    "causal_conv_index",
    "causal_conv_tree",
    "commit",
    "gated_delta_commit",
    "gated_delta_tree",
    "gather_nodes",
    "gating",
    "l2norm",
    "put_nodes",
    "tree_attention",
    "tree_topology",
    "visible_slots",
]


class TreeTopology(NamedTuple):
    """The shape of a batch of trees, made once a step and read by all layers.

    Attributes:
        parents, depths: int64 `[B, T]`; the root has parent -1 and depth 0; padding hangs at the root.
        ancestors: bool `[B, T, T]`.
        bits: int64 `[B, T, ceil(T / 64)]`, the same: bit `j % 64` of word `j // 64` says that `j` is `i` or above it.
        conv_index: int64 `[B, T, W]` of `causal_conv_index`.
    """

    parents: Tensor
    depths: Tensor
    ancestors: Tensor
    bits: Tensor
    conv_index: Tensor


class TreeBuffers(NamedTuple):
    """The committed state and the stash of all layers of one model on one device, stacked so that one launch moves all.

    `L` Gated DeltaNet layers, `A` attention layers (either may be 0), `S` slots, `T` nodes.

    Attributes:
        state: fp32 `[L, B, Hv, dk, dv]`; window: `[L, B, C, W]`: committed.
        rows: `[L, B, T, C]`; keys: fp32 `[L, B, Hk, T, dk]`; updates: fp32 `[L, B, Hv, T, dv]`; decay: fp32
            `[L, B, Hv, T]`: what the last verification left, see `GatedDeltaStash`.
        kv: `[A, 2, B, Hkv, S, D]`, keys and values; the nodes of the last verification lie at slots `lens[b] + node`.
    """

    state: Tensor
    window: Tensor
    rows: Tensor
    keys: Tensor
    updates: Tensor
    decay: Tensor
    kv: Tensor

    def stash(self, layer: int) -> "GatedDeltaStash":
        """The views of one Gated DeltaNet layer."""
        return GatedDeltaStash(self.keys[layer], self.updates[layer], self.decay[layer])


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


def tree_topology(parents: Tensor, width: int, ancestors: Tensor | None = None) -> TreeTopology:
    """The topology of trees with `parents` int64 `[B, T]` for convolutions of `width` columns.

    Args:
        ancestors: bool `[B, T, T]` where the caller has it.
    """
    nodes = parents.shape[1]
    if ancestors is None:
        node = torch.arange(nodes, device=parents.device)
        # Staying, or one step towards the root: squaring the relation doubles the distance that it covers.
        ancestors = (parents[..., None] == node) | (node[:, None] == node)
        for _ in range(max(nodes - 1, 1).bit_length()):
            ancestors = (ancestors.float() @ ancestors.float()) > 0
    depths = ancestors.sum(-1) - 1
    words = F.pad(ancestors, (0, -nodes % 64)).unflatten(-1, (-1, 64)).long()
    bits = (words << torch.arange(64, device=parents.device)).sum(-1)
    return TreeTopology(parents, depths, ancestors, bits, causal_conv_index(parents, depths, width))


def gating(a: Tensor, b: Tensor, A_log: Tensor, dt_bias: Tensor) -> tuple[Tensor, Tensor]:
    """Log decay `g <= 0` (fp32) and write strength `beta` (rounded to the dtype of `b`, as transformers does).

    Args:
        a, b: `[B, T, Hv]`, the projections; A_log, dt_bias: `[Hv]`.
    """
    return -A_log.float().exp() * F.softplus(a.float() + dt_bias), b.sigmoid()


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


def commit(buffers: TreeBuffers, path: Tensor, lengths: Tensor, lens: Tensor) -> None:
    """Move everything committed along the accepted path, in place, all layers at once.

    Args:
        path: int64 `[B, P]`, nodes from the root down; entries from `lengths` on are any valid node.
        lengths: int64 `[B]`, accepted entries; 0 leaves a row as it is.
        lens: int64 `[B]`, slots committed before; the caller adds `lengths` to it. Slots from `lens + lengths` on
            hold garbage afterwards.
    """
    for layer in range(len(buffers.state)):
        window = causal_conv_commit(buffers.window[layer], buffers.rows[layer], path, lengths)
        buffers.window[layer].copy_(window)
        buffers.state[layer].copy_(gated_delta_commit(buffers.state[layer], buffers.stash(layer), path, lengths))
    slots = lens[:, None] + torch.arange(path.shape[1], device=path.device)  # [B, P]
    for kv in buffers.kv.flatten(0, 1):  # [B, Hkv, S, D]
        put_nodes(kv, slots, gather_nodes(kv, lens[:, None] + path))


def gather_nodes(x: Tensor, path: Tensor) -> Tensor:
    """Rows of `x [B, H, T, D]` at the nodes of `path [B, P]`: `[B, H, P, D]`."""
    return x.gather(2, path[:, None, :, None].expand(-1, x.shape[1], -1, x.shape[-1]))


def visible_slots(
    topology: TreeTopology, lens: Tensor, slots: int, starts: Tensor | None = None, window: int | None = None
) -> Tensor:
    """The slots that each node attends to: committed ones, and its own ancestors at `lens[b] + node`.

    Args:
        lens: int64 `[B]`, committed slots; starts: int64 `[B]`, the first that is no padding, None: 0.
        slots: `S`, slots of the buffers.
        window: of sliding attention: what lies `window` positions or more behind is not seen.

    Returns:
        Bool `[B, T, S]`.
    """
    slot = torch.arange(slots, device=lens.device)
    node = slot - lens[:, None]  # [B, S]
    committed = node < 0
    if starts is not None:
        committed = committed & (slot >= starts[:, None])
    nodes = topology.parents.shape[1]
    inside = (node >= 0) & (node < nodes)
    place = node.clamp(0, nodes - 1)[:, None].expand(-1, nodes, -1)
    own = topology.ancestors.gather(2, place) & inside[:, None]
    visible = committed[:, None] | own
    if window is not None:
        depth = torch.where(inside, topology.depths.gather(1, node.clamp(0, nodes - 1)), node)  # relative position
        visible = visible & (topology.depths[..., None] - depth[:, None] < window)
    return visible


def put_nodes(x: Tensor, slots: Tensor, rows: Tensor) -> None:
    """Write `rows [B, H, P, D]` into `x [B, H, S, D]` at the slots of each text, int64 `[B, P]`, in place."""
    x.scatter_(2, slots[:, None, :, None].expand_as(rows), rows)


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
