# mypy: disallow-untyped-defs=False
"""Triton kernel of the commit: all layers' states, convolution windows and KV rows along the accepted path, one launch.

Equals `reference.commit`, in place. A program owns what it reads and writes of the committed buffers, so programs need
no order. Bound by memory: the recurrent states are read and written once (288 MiB for 48 layers of 48 heads).
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .reference import TreeBuffers

__all__ = ["CommitConfig", "commit"]


class CommitConfig(NamedTuple):
    """How the work is cut into programs, powers of two.

    Attributes:
        keys, values: rows and columns of a state's tile.
        channels: of a window's block.
        unroll: path nodes whose keys and updates are loaded together.
        warps: of every program. With one, a row of 128 updates lies in the threads as the tile wants it; with more,
            every node of the path costs a trip through shared memory and two barriers, which end the overlap of loads.
    """

    keys: int = 16
    values: int = 128
    channels: int = 256
    unroll: int = 4
    warps: int = 1


def commit(
    buffers: TreeBuffers, path: Tensor, lengths: Tensor, lens: Tensor, config: CommitConfig | None = None
) -> None:
    """Move everything committed along the accepted path, in place, all layers at once.

    Args:
        buffers: fp32 states and stash; strides are free but for contiguous last dimensions (not the window's).
        path: int64 `[B, P]`, nodes from the root down, so `path[p] >= p`; entries from `lengths` on are not read.
        lengths: int64 `[B]`, accepted entries; 0 leaves a row as it is.
        lens: int64 `[B]`, slots committed before; the caller adds `lengths` to it.
        config: None: the default.
    """
    state, window, rows, keys, updates, decay, kv = buffers
    _check(buffers, path)
    config = config or CommitConfig()
    layers, batch = len(state), len(path)
    # A part that a model lacks has no layers, and so no programs; its other sizes may be 0 as well.
    heads, dk, dv = (max(size, 1) for size in state.shape[2:])
    channels, width = (max(size, 1) for size in window.shape[2:])
    kv_heads, dim = max(kv.shape[3], 1), max(kv.shape[5], 1)
    block_k, block_v, block_c = (
        min(limit, triton.next_power_of_2(size))
        for limit, size in ((config.keys, dk), (config.values, dv), (config.channels, channels))
    )
    # KV rows first: few programs, each a chain of dependent copies that the states' stream then hides.
    kv_programs = len(kv) * 2 * kv_heads
    window_programs = layers * triton.cdiv(channels, block_c)
    state_programs = layers * heads * triton.cdiv(dk, block_k) * triton.cdiv(dv, block_v)
    programs = kv_programs + window_programs + state_programs
    if programs * batch == 0:
        return
    with torch.cuda.device_of(path):
        _commit_kernel[(programs, batch)](
            *buffers,
            path,
            lengths,
            lens,
            *state.stride()[:4],
            *window.stride(),
            *rows.stride()[:3],
            *keys.stride()[:4],
            *updates.stride()[:4],
            *decay.stride()[:3],
            *kv.stride()[:5],
            path.stride(0),
            kv_programs,
            window_programs,
            HEADS=heads,
            GROUPS=max(heads // max(keys.shape[2], 1), 1),
            KEY_DIM=dk,
            VALUE_DIM=dv,
            WIDTH=width,
            WINDOW_CHANNELS=channels,
            KV_HEADS=kv_heads,
            HEAD_DIM=dim,
            KEYS=block_k,
            VALUES=block_v,
            CHANNELS=block_c,
            HEAD_BLOCK=triton.next_power_of_2(dim),
            UNROLL=config.unroll,
            num_warps=config.warps,
        )


def _check(buffers: TreeBuffers, path: Tensor) -> None:
    """What the kernel takes for granted of memory; shapes are the contract's."""
    for name, x in buffers._asdict().items():
        if name in ("state", "keys", "updates", "decay") and x.dtype != torch.float32:
            raise TypeError(f"{name} is {x.dtype}; the kernel folds torch.float32, use the reference for others")
        if name != "window" and x.stride(-1) != 1:
            raise ValueError(f"the last dimension of {name} has stride {x.stride(-1)}; it must be contiguous")
    if path.shape[1] > 1 and path.stride(1) != 1:
        raise ValueError(f"the rows of path have stride {path.stride(1)}; they must be contiguous")


@triton.jit
def _commit_kernel(
    state,
    window,
    rows,
    keys,
    updates,
    decay,
    kv,
    path,
    lengths,
    lens,
    state_l,
    state_b,
    state_h,
    state_k,
    window_l,
    window_b,
    window_c,
    window_w,
    rows_l,
    rows_b,
    rows_t,
    keys_l,
    keys_b,
    keys_h,
    keys_t,
    updates_l,
    updates_b,
    updates_h,
    updates_t,
    decay_l,
    decay_b,
    decay_h,
    kv_a,
    kv_side,
    kv_b,
    kv_h,
    kv_s,
    path_b,
    kv_programs,
    window_programs,
    HEADS: tl.constexpr,
    GROUPS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    WINDOW_CHANNELS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    KEYS: tl.constexpr,
    VALUES: tl.constexpr,
    CHANNELS: tl.constexpr,
    HEAD_BLOCK: tl.constexpr,
    UNROLL: tl.constexpr,
):
    """Three ranges of programs: KV rows, windows, states. Offsets of layers and rows are 64-bit: buffers are large."""
    program = tl.program_id(0)
    batch = tl.program_id(1).to(tl.int64)
    length = tl.load(lengths + batch).to(tl.int32)
    path += batch * path_b
    if length > 0:
        if program < kv_programs:
            side = (program // KV_HEADS).to(tl.int64)
            head = (program % KV_HEADS).to(tl.int64)
            kv += side // 2 * kv_a + side % 2 * kv_side + batch * kv_b + head * kv_h
            _move_rows(kv, path, length, tl.load(lens + batch), kv_s, HEAD_DIM, HEAD_BLOCK)
        elif program < kv_programs + window_programs:
            blocks: tl.constexpr = (WINDOW_CHANNELS + CHANNELS - 1) // CHANNELS
            rest = program - kv_programs
            layer = (rest // blocks).to(tl.int64)
            channel = rest % blocks * CHANNELS + tl.arange(0, CHANNELS)
            _shift_window(
                window + layer * window_l + batch * window_b + channel * window_c,
                rows + layer * rows_l + batch * rows_b + channel,
                path,
                length,
                window_w,
                rows_t,
                channel < WINDOW_CHANNELS,
                WIDTH,
            )
        else:
            across: tl.constexpr = (VALUE_DIM + VALUES - 1) // VALUES
            tiles: tl.constexpr = across * ((KEY_DIM + KEYS - 1) // KEYS)
            rest = program - kv_programs - window_programs
            tile = rest % tiles
            head = (rest // tiles % HEADS).to(tl.int64)
            layer = (rest // tiles // HEADS).to(tl.int64)
            row = tile // across * KEYS + tl.arange(0, KEYS)
            column = tile % across * VALUES + tl.arange(0, VALUES)
            _fold_state(
                state + layer * state_l + batch * state_b + head * state_h + row[:, None] * state_k + column[None, :],
                keys + layer * keys_l + batch * keys_b + head // GROUPS * keys_h + row,
                updates + layer * updates_l + batch * updates_b + head * updates_h + column,
                decay + layer * decay_l + batch * decay_b + head * decay_h,
                path,
                length,
                keys_t,
                updates_t,
                row < KEY_DIM,
                column < VALUE_DIM,
                UNROLL,
            )


@triton.jit
def _move_rows(kv, path, length, start, kv_s, HEAD_DIM: tl.constexpr, HEAD_BLOCK: tl.constexpr):
    """Slots `start + path[p]` to `start + p` of one head of one layer's keys or values.

    In place, in order of p, in one program. That is safe because `path` rises strictly from `path[0] >= 0`, so
    `path[q] >= q`: what an earlier step p < q has written (slot p) is never read by a later one, which reads slot
    `path[q] >= q > p`; and a slot that a later step overwrites was read before, in program order. Within a program an
    element of a row is moved by the thread that read it, or passes a barrier when Triton changes the layout between
    the load and the store; both keep that order. No other program touches these slots of this head.
    """
    element = tl.arange(0, HEAD_BLOCK)
    valid = element < HEAD_DIM
    for p in range(0, length):
        node = tl.load(path + p)
        moved = valid & (node != p)  # the front of a path often lies in place
        value = tl.load(kv + (start + node) * kv_s + element, moved)
        tl.store(kv + (start + p) * kv_s + element, value, moved)


@triton.jit
def _shift_window(window, rows, path, length, window_w, rows_t, valid, WIDTH: tl.constexpr):
    """The last `WIDTH` of `concat(window, accepted rows)`, one column after the other.

    In place: column `w` becomes entry `length + w`, which lies behind all columns written so far (`length > 0`), and
    a channel stays with its thread (or passes a barrier), so no column is overwritten before it has been read.
    """
    for w in tl.static_range(WIDTH):
        entry = length + w
        new = entry >= WIDTH
        node = tl.load(path + entry - WIDTH, new, other=0)
        old_value = tl.load(window + entry * window_w, valid & (not new), other=0.0)
        row_value = tl.load(rows + node * rows_t, valid & new, other=0.0).to(window.dtype.element_ty)
        tl.store(window + w * window_w, tl.where(new, row_value, old_value), valid)


@triton.jit
def _fold_state(
    state, keys, updates, decay, path, length, keys_t, updates_t, row_valid, column_valid, UNROLL: tl.constexpr
):
    """`S = e^{G_l} S0 + sum_j e^{G_l - G_j} k_j u_j^T` on one tile, by plain fp32 multiply-adds: `length` is small."""
    valid = row_valid[:, None] & column_valid[None, :]
    tile = tl.load(state, valid, other=0.0)
    total = tl.load(decay + tl.load(path + length - 1))
    tile *= _exp(total)
    for start in range(0, length, UNROLL):
        # Unrolled without a store between, so that the loads of several nodes are under way at once.
        for step in tl.static_range(UNROLL):
            used = start + step < length
            node = tl.load(path + start + step, used, other=0)
            # Masked before exp: the difference is never positive on the path.
            weight = _exp(tl.where(used, total - tl.load(decay + node, used, other=0.0), 0.0))
            key = tl.load(keys + node * keys_t, row_valid & used, other=0.0)
            update = tl.load(updates + node * updates_t, column_valid & used, other=0.0)
            tile += key[:, None] * (weight * update)[None, :]
    tl.store(state, tile, valid)


@triton.jit
def _exp(x):
    """`e^x` of fp32 `x <= 0` to a rounding (Cephes), 0 below -87.

    `tl.exp` is the device's approximation, wrong by up to two units in one direction: a slowly decaying state is
    multiplied by one of these in every round, and the bias would show after some hundred.
    """
    x = tl.maximum(x, -100.0)
    n = tl.floor(x * 1.44269504088896341 + 0.5)
    r = (x - n * 0.693359375) + n * 2.12194440e-4  # ln 2 in two parts, the first exact in products
    p = 1.9875691500e-4
    p = p * r + 1.3981999507e-3
    p = p * r + 8.3334519073e-3
    p = p * r + 4.1665795894e-2
    p = p * r + 1.6666665459e-1
    p = p * r + 5.0000001201e-1
    power = (tl.maximum(n, -127.0).to(tl.int32) + 127) << 23  # 2^n by its bits; 0 where it would be subnormal
    return (p * r * r + r + 1.0) * power.to(tl.float32, bitcast=True)
