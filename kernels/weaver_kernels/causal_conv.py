# mypy: disallow-untyped-defs=False
"""Triton kernels of the convolution over tree nodes, and of the tree's topology, which is made once a step.

Both equal their namesakes in `reference`. One launch each, nothing read back, so both can be captured in a CUDA graph.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .reference import TreeTopology

__all__ = ["ConvConfig", "causal_conv_tree", "tree_topology"]

WORD = 64  # ancestors in a word of bits
WALK = 8  # steps towards the root between two looks at whether all nodes have arrived there


class ConvConfig(NamedTuple):
    """How the convolution is cut into programs: powers of two; a program has `nodes` x `channels` outputs."""

    nodes: int
    channels: int
    warps: int


def causal_conv_tree(
    rows: Tensor,
    window: Tensor,
    weight: Tensor,
    index: Tensor,
    bias: Tensor | None = None,
    activation: bool = True,
    stash: Tensor | None = None,
    config: ConvConfig | None = None,
) -> Tensor:
    """`reference.causal_conv_tree`, which also leaves the raw rows where the commit will look for them.

    Args:
        rows: `[B, T, C]`, the nodes' inputs before the convolution; may be columns of a wider projection.
        window: `[B, C, W]`, the last `W` committed inputs; only read.
        weight: `[C, W]`, any strides.
        index: int64 `[B, T, W]` of `causal_conv_index`; its last entries are the nodes themselves.
        bias: `[C]` or None.
        activation: apply SiLU.
        stash: `[B, T, C]` or None: gets a copy of `rows`.
        config: None: by shape.

    Returns:
        `[B, T, C]`, contiguous, in the dtype of `rows`, accumulated in fp32.
    """
    batch, nodes, channels = rows.shape
    width = weight.shape[1]
    if index.shape != (batch, nodes, width) or window.shape != (batch, channels, width):
        raise ValueError(
            f"index is {list(index.shape)} and window {list(window.shape)}; rows {list(rows.shape)} and a weight of "
            f"{width} taps want {[batch, nodes, width]} and {[batch, channels, width]}"
        )
    if rows.stride(2) != 1 or (stash is not None and (stash.shape != rows.shape or stash.stride(2) != 1)):
        raise ValueError("channels must be contiguous in rows and stash, and stash as large as rows")
    config = config or default_config(nodes, channels)
    output = torch.empty((batch, nodes, channels), dtype=rows.dtype, device=rows.device)
    kept = output if stash is None else stash
    grid = (triton.cdiv(channels, config.channels), triton.cdiv(nodes, config.nodes), batch)
    with torch.cuda.device_of(rows):
        _conv_kernel[grid](
            rows,
            window,
            weight,
            bias,
            index,
            output,
            kept,
            nodes,
            channels,
            *rows.stride()[:2],
            *window.stride(),
            *weight.stride(),
            *index.stride(),
            *kept.stride()[:2],
            WIDTH=width,
            ACTIVATION=activation,
            STASH=stash is not None,
            NODES=config.nodes,
            CHANNELS=config.channels,
            num_warps=config.warps,
        )
    return output


def default_config(nodes: int, channels: int) -> ConvConfig:
    """Enough programs for all processors: latency is what a small tree pays, so its programs hold fewer nodes."""
    block = min(256, triton.next_power_of_2(channels))
    return ConvConfig(nodes=2 if nodes <= 64 else 8, channels=block, warps=2)


def tree_topology(parents: Tensor, width: int) -> TreeTopology:
    """`reference.tree_topology` in one launch: every node walks to the root.

    Args:
        parents: int64 `[B, T]`; the root has parent -1, and a parent's index is smaller than its child's.
        width: taps of the convolution.
    """
    batch, nodes = parents.shape
    words = triton.cdiv(nodes, WORD)
    depths = torch.empty((batch, nodes), dtype=torch.int64, device=parents.device)
    bits = torch.empty((batch, nodes, words), dtype=torch.int64, device=parents.device)
    conv_index = torch.empty((batch, nodes, width), dtype=torch.int64, device=parents.device)
    ancestors = torch.empty((batch, nodes, nodes), dtype=torch.bool, device=parents.device)
    block = 32  # a lane a node
    with torch.cuda.device_of(parents):
        _topology_kernel[(triton.cdiv(nodes, block), words, batch)](
            parents,
            depths,
            ancestors.view(torch.uint8),
            bits,
            conv_index,
            nodes,
            *parents.stride(),
            WIDTH=width,
            BLOCK=block,
            WORD_BITS=WORD,
            STEPS=WALK,
            num_warps=1,
        )
    return TreeTopology(parents, depths, ancestors, bits, conv_index)


@triton.jit
def _conv_kernel(
    rows,
    window,
    weight,
    bias,
    index,
    output,
    stash,
    nodes,
    channels,
    rows_b,
    rows_t,
    window_b,
    window_c,
    window_w,
    weight_c,
    weight_w,
    index_b,
    index_t,
    index_w,
    stash_b,
    stash_t,
    WIDTH: tl.constexpr,
    ACTIVATION: tl.constexpr,
    STASH: tl.constexpr,
    NODES: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    """A block of nodes and channels. The taps of a node are rows: contiguous over channels, mostly from the cache."""
    batch = tl.program_id(2).to(tl.int64)
    node = tl.program_id(1) * NODES + tl.arange(0, NODES)
    channel = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)
    in_tree = node < nodes
    in_row = channel < channels
    both = in_tree[:, None] & in_row[None, :]
    rows += batch * rows_b
    window += batch * window_b
    index += batch * index_b
    # Whether any node here reads the window: one whose oldest tap does. Most blocks of a large tree do not.
    oldest = tl.load(index + node * index_t, in_tree, other=WIDTH)
    near_root = tl.min(oldest, 0) < WIDTH
    work = tl.zeros([NODES, CHANNELS], tl.float32)
    # Always in the order of age, so that a sum does not depend on which taps are committed already.
    for tap in tl.static_range(WIDTH - 1):
        column = tl.load(index + node * index_t + tap * index_w, in_tree, other=WIDTH)
        above = both & (column >= WIDTH)[:, None]
        value = tl.load(rows + (column - WIDTH)[:, None] * rows_t + channel[None, :], above, other=0.0)
        if near_root:
            before = both & (column < WIDTH)[:, None]
            place = channel[None, :] * window_c + column[:, None] * window_w
            value = tl.where(before, tl.load(window + place, before, other=0.0).to(value.dtype), value)
        factor = tl.load(weight + channel * weight_c + tap * weight_w, in_row, other=0.0).to(tl.float32)
        work += value.to(tl.float32) * factor[None, :]
    # The last tap is the node itself: read without waiting for the index, and what the stash wants.
    own = tl.load(rows + node[:, None] * rows_t + channel[None, :], both, other=0.0)
    if STASH:
        tl.store(stash + batch * stash_b + node[:, None] * stash_t + channel[None, :], own, both)
    factor = tl.load(weight + channel * weight_c + (WIDTH - 1) * weight_w, in_row, other=0.0).to(tl.float32)
    work += own.to(tl.float32) * factor[None, :]
    if bias is not None:
        work += tl.load(bias + channel, in_row, other=0.0).to(tl.float32)[None, :]
    if ACTIVATION:
        work *= tl.sigmoid(work)
    place = (batch * nodes + node)[:, None] * channels + channel[None, :]
    tl.store(output + place, work.to(output.dtype.element_ty), both)


@triton.jit
def _topology_kernel(
    parents,
    depths,
    ancestors,
    bits,
    conv_index,
    nodes,
    parents_b,
    parents_t,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    WORD_BITS: tl.constexpr,
    STEPS: tl.constexpr,
):
    """A block of nodes and one word of their bits; the programs of the first word also write depths and taps."""
    batch = tl.program_id(2).to(tl.int64)
    word = tl.program_id(1)
    words = tl.num_programs(1)
    node = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    valid = node < nodes
    parents += batch * parents_b
    place = batch * nodes + node

    one = tl.full([BLOCK], 1, tl.int64)
    at = tl.where(valid, node, -1).to(tl.int64)
    mask = tl.zeros([BLOCK], tl.int64)
    depth = tl.full([BLOCK], -1, tl.int64)
    steps = 0
    # Bounded by the number of nodes too, so that parents which are no tree cannot hang the device.
    while (tl.max(at, 0) >= 0) & (steps < nodes):
        for _ in tl.static_range(STEPS):
            depth += (at >= 0).to(tl.int64)
            mask |= tl.where((at >= 0) & (at // WORD_BITS == word), one << (at % WORD_BITS), 0)
            at = tl.load(parents + at * parents_t, at >= 0, other=-1)
        steps += STEPS
    tl.store(bits + place * words + word, mask, valid)
    other = tl.arange(0, WORD_BITS)
    column = word * WORD_BITS + other
    tl.store(
        ancestors + place[:, None] * nodes + column[None, :],
        ((mask[:, None] >> other[None, :]) & 1).to(tl.uint8),
        valid[:, None] & (column < nodes)[None, :],
    )
    if word == 0:
        tl.store(depths + place, depth, valid)
        at = tl.where(valid, node, -1).to(tl.int64)
        for age in tl.static_range(WIDTH):
            tap = tl.where(depth >= age, WIDTH + at, WIDTH - (age - depth))
            tl.store(conv_index + place * WIDTH + (WIDTH - 1 - age), tap, valid)
            at = tl.load(parents + at * parents_t, at >= 0, other=-1)
