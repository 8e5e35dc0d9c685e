"""The operations of tree verification, each as a kernel where `dispatch` says so and in plain torch elsewhere."""

import torch
from torch import Tensor

from . import reference
from .dispatch import takes, use_triton
from .reference import GatedDeltaStash, TreeBuffers, TreeTopology

__all__ = ["causal_conv_tree", "commit", "gated_delta_tree", "tree_attention", "tree_topology"]


def tree_topology(parents: Tensor, width: int) -> TreeTopology:
    """See `reference.tree_topology`."""
    if use_triton(parents):
        from .causal_conv import tree_topology as kernel  # Triton is asked for where it is used

        return kernel(parents, width)
    return reference.tree_topology(parents, width)


def causal_conv_tree(
    rows: Tensor, window: Tensor, weight: Tensor, index: Tensor, bias: Tensor | None = None, stash: Tensor | None = None
) -> Tensor:
    """See `reference.causal_conv_tree`, with SiLU; the raw rows are left in `stash [B, T, C]` where that is given."""
    if use_triton(rows):
        from .causal_conv import causal_conv_tree as kernel

        return kernel(rows, window, weight, index, bias, stash=stash)
    if stash is not None:
        stash.copy_(rows)
    return reference.causal_conv_tree(rows, window, weight, index, bias)


def gated_delta_tree(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    a: Tensor,
    b: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    state: Tensor,
    topology: TreeTopology,
    stash: GatedDeltaStash | None = None,
) -> tuple[Tensor, GatedDeltaStash]:
    """`reference.gated_delta_tree` behind `reference.gating`; the stash is written into `stash` where that is given."""
    if use_triton(value):
        from .gated_delta import gated_delta_tree as kernel
        from .gated_delta import unsupported

        if takes(unsupported(query, value)):
            return kernel(query, key, value, a, b, A_log, dt_bias, state, topology, stash)
    g, beta = reference.gating(a, b, A_log, dt_bias)
    output, new = reference.gated_delta_tree(query, key, value, g, beta, state, topology.ancestors)
    output = output.contiguous()
    if stash is None:
        return output, new
    for kept, made in zip(stash, new, strict=True):
        kept.copy_(made)
    return output, stash


def tree_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    lens: Tensor,
    topology: TreeTopology,
    scaling: float,
    starts: Tensor | None = None,
    visible: Tensor | None = None,
    gate: Tensor | None = None,
    window: int | None = None,
) -> Tensor:
    """Attention of nodes over the committed slots of `key, value [B, Hkv, S, D]` and their own ancestors behind them.

    Args:
        query: `[B, Hq, T, D]`; the nodes' own keys and values lie at slots `lens[b] + node`.
        lens, starts, window: see `reference.visible_slots`.
        visible: the same as bool `[B, T, S]` where the caller has it; used by the plain version.
        gate: `[B, T, Hq, D]`, whose sigmoid the output is multiplied with; None for none.

    Returns:
        `[B, T, Hq, D]`.
    """
    if use_triton(query):
        from .attention import tree_attention as kernel

        if takes(_attention_unsupported(query)):
            with torch.cuda.device_of(query):
                return kernel(query, key, value, lens, topology, scaling, starts, window, gate=gate)
    if visible is None:
        visible = reference.visible_slots(topology, lens, key.shape[2], starts, window)
    output = reference.tree_attention(query, key, value, visible, scaling)
    return (output if gate is None else output * gate.sigmoid()).contiguous()


def commit(buffers: TreeBuffers, path: Tensor, lengths: Tensor, lens: Tensor) -> None:
    """See `reference.commit`."""
    if use_triton(path):
        from .commit import commit as kernel

        kernel(buffers, path, lengths, lens)
    else:
        reference.commit(buffers, path, lengths, lens)


def _attention_unsupported(query: Tensor) -> str | None:
    dim = query.shape[-1]
    if query.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        return f"attention in {query.dtype}"
    return None if dim % 16 == 0 and 16 <= dim <= 256 else f"attention heads of width {dim}"
