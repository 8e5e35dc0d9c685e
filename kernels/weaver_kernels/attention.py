"""Attention of tree nodes over a long committed prefix: split over the prefix, merged by log-sum-exp.

All query heads of one key/value head are packed beside the nodes (row `node * G + head`), so that a tile of K and V is
read once for all of them. One program reads one range of slots for one tile of packed rows; a second launch merges the
ranges. Committed slots need no mask; the last tiles, with what is left of the prefix and the tree's own slots, test
ancestor bits. The grid depends on shapes alone and each program finds its range from `lens` on the device, so one
captured graph serves every context length.

Tree attention over a shared prefix is described in DeFT (arXiv 2404.00242), split-KV decoding in Flash-Decoding.
"""

# mypy: allow-untyped-defs
# (triton types the parameters of kernels at the launch)
import functools
import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .reference import TreeTopology

__all__ = ["AttentionConfig", "attention_config", "split_count", "tree_attention"]

LOG2E = math.log2(math.e)
MERGED = 16  # splits that the merge reads at once


class AttentionConfig(NamedTuple):
    """What may be tuned. `attention_config` chooses it from shapes.

    Attributes:
        rows: packed rows of a tile, a power of two from 16; 64 a warp group for Hopper's tensor cores.
        slots: slots of a tile, 16, 32 or 64 (the ancestor bits of a tile must fit one 64-bit word).
        warps, stages: of the first launch.
        splits: ranges that the slots are divided into.
    """

    rows: int
    slots: int
    warps: int
    stages: int
    splits: int


# (largest head dimension, largest number of packed rows) -> rows, slots, warps, stages, programs a multiprocessor.
# Shared memory: 2 * dim * (rows + 2 * slots * stages) bytes of 227 KB (with mma.sync, below 64 rows, a stage fewer and
# no query). Two stages of tiles barely overlap loads and Hopper's asynchronous products, so D = 256 takes three of 32
# slots before two of 64; a 128 x 256 accumulator is half of all registers, so there one program fills a multiprocessor.
_TABLE = {
    (64, 16): (16, 64, 4, 4, 2),
    (64, 64): (64, 64, 4, 3, 2),
    (64, None): (128, 64, 4, 3, 2),
    (128, 16): (16, 64, 4, 3, 2),
    (128, 32): (32, 64, 4, 3, 2),
    (128, 64): (64, 64, 4, 3, 2),
    (128, None): (128, 64, 8, 3, 1),
    (256, 16): (16, 32, 4, 3, 2),
    (256, 32): (32, 32, 4, 3, 2),
    (256, 64): (64, 32, 4, 2, 2),
    (256, None): (128, 32, 8, 3, 1),
}
# fp32 has no exact tensor core product: small tiles in fused multiply-adds, which spill at 4 warps.
_FULL_PRECISION = (16, 32, 8, 1, 1)


@functools.lru_cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def split_count(programs: int, wanted: int, most: int) -> int:
    """Splits with which `programs` programs a split fill a device that runs `wanted` at once, at most `most`.

    The fewest whole waves that leave less than a twentieth of the device idle, else the fullest of four.
    """
    best, best_fill = 1, 0.0
    for wave in range(1, 5):
        splits = min(max(wave * wanted // programs, 1), max(most, 1))
        waves = -(-splits * programs // wanted)
        fill = splits * programs / (waves * wanted)
        if fill > best_fill + 1e-9:
            best, best_fill = splits, fill
        if fill > 0.95:
            break
    return best


def attention_config(query: Tensor, key: Tensor) -> AttentionConfig:
    """The configuration for these shapes; of the tensors only shapes, dtype and device are read."""
    batch, heads, nodes, dim = query.shape
    kv_heads, capacity = key.shape[1:3]
    packed = nodes * heads // kv_heads
    chosen = _FULL_PRECISION
    if query.dtype != torch.float32:
        chosen = next(c for (d, r), c in _TABLE.items() if dim <= d and (r is None or packed <= r))
    rows, slots, warps, stages, programs = chosen
    if torch.version.hip:  # 64 KB of shared memory a multiprocessor
        rows, slots, warps, stages = min(rows, 64), min(slots, 32), 4, 1
    wanted = programs * _multiprocessors(query.device)
    splits = split_count(-(-packed // rows) * batch * kv_heads, wanted, -(-capacity // slots))
    return AttentionConfig(rows, slots, warps, stages, splits)


@triton.jit
def _span(lens, starts, batch, nodes, window, splits, stride_lens, stride_starts, SLOTS: tl.constexpr):
    """The slots of one batch row: the first one read, the committed length, all tiles, tiles of one split."""
    length = tl.load(lens + batch * stride_lens).to(tl.int32)
    first = length * 0
    if starts is not None:
        first = tl.minimum(tl.load(starts + batch * stride_starts).to(tl.int32), length)
    if window is not None:
        first = tl.maximum(first, length - window + 1)  # the root sees furthest back
    tiles = tl.cdiv(length - first + nodes, SLOTS)
    return first, length, tiles, tl.cdiv(tiles, splits)


@triton.jit
def _attend(q, k, v, seen, top, total, acc, scale, softcap, PRECISION: tl.constexpr):
    """One step of the online softmax in base 2; `seen` None: every slot is."""
    scores = tl.dot(q, tl.trans(k), input_precision=PRECISION)
    if softcap is not None:
        # tanh by the exponential: saturates at both ends without a branch. `scale` is that of the capped scores.
        scores = 1.0 - 2.0 / (tl.exp2(scores * softcap) + 1.0)
    if seen is not None:
        scores = tl.where(seen, scores, float("-inf"))
    new = tl.maximum(top, tl.max(scores, 1) * scale)
    shift = new
    if seen is not None:
        shift = tl.where(new == float("-inf"), 0.0, new)  # a row may see nothing here: -inf - -inf would be NaN
    weights = tl.exp2(scores * scale - shift[:, None])
    fade = tl.exp2(top - shift)
    total = total * fade + tl.sum(weights, 1)
    acc = tl.dot(weights.to(v.dtype), v, acc * fade[:, None], input_precision=PRECISION)
    return new, total, acc


@triton.jit
def _ancestor_word(bits, node, valid, first, words, stride_bits, stride_words):
    """For each row's node the 64 ancestor bits from node `first` (which may be negative) on."""
    word = first >> 6  # rounds down, also below 0
    shift = (first & 63).to(tl.uint64)
    row = bits + node * stride_bits
    low = tl.load(row + word * stride_words, mask=valid & (word >= 0) & (word < words), other=0)
    high = tl.load(row + (word + 1) * stride_words, mask=valid & (word >= -1) & (word + 1 < words), other=0)
    low = low.to(tl.uint64, bitcast=True)
    high = high.to(tl.uint64, bitcast=True)
    return (low >> shift) | ((high << 1) << (63 - (first & 63)).to(tl.uint64))  # a shift by 64 is undefined


# Not specialised: one binary serves any number of nodes, splits and words of bits.
@triton.jit(do_not_specialize=["window", "nodes", "words", "splits"])
def _split_kernel(
    query,
    key,
    value,
    lens,
    starts,
    bits,
    depths,
    partial,
    stats,
    scale,
    softcap,
    window,
    nodes,
    words,
    kv_heads,
    splits,
    stride_qb,
    stride_qh,
    stride_qt,
    stride_kb,
    stride_kh,
    stride_vb,
    stride_vh,
    stride_lens,
    stride_starts,
    stride_bb,
    stride_bt,
    stride_bw,
    stride_db,
    stride_dt,
    STRIDE_KS: tl.constexpr,
    STRIDE_VS: tl.constexpr,
    G: tl.constexpr,
    DIM: tl.constexpr,
    DIM2: tl.constexpr,
    ROWS: tl.constexpr,
    SLOTS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    # Row tiles run adjacent: the first reads its slots from memory, the others from the cache.
    row_tile = tl.program_id(0)
    split = tl.program_id(1)
    batch = tl.program_id(2) // kv_heads
    head = tl.program_id(2) % kv_heads

    first, length, tiles, chunk = _span(lens, starts, batch, nodes, window, splits, stride_lens, stride_starts, SLOTS)
    begin = split * chunk
    if begin >= tiles:
        return  # the merge reads no more splits than there are
    end = tl.minimum(begin + chunk, tiles)
    # Tiles of committed slots alone. Under a window each node's boundary lies elsewhere, and no tile is left unmasked.
    plain = (length - first) // SLOTS
    if window is not None:
        plain = plain * 0
    plain_end = tl.minimum(end, plain)

    row = row_tile * ROWS + tl.arange(0, ROWS)
    dim = tl.arange(0, DIM2)
    column = tl.arange(0, SLOTS)
    node = row // G
    valid = row < nodes * G
    inside = valid[:, None]
    if DIM2 != DIM:
        inside = inside & (dim < DIM)[None, :]
    batch64 = batch.to(tl.int64)
    head64 = head.to(tl.int64)
    q_row = query + batch64 * stride_qb + (head * G + row % G) * stride_qh + node * stride_qt
    q = tl.load(q_row[:, None] + dim[None, :], mask=inside, other=0.0)

    k_base = key + batch64 * stride_kb + head64 * stride_kh + first.to(tl.int64) * STRIDE_KS
    v_base = value + batch64 * stride_vb + head64 * stride_vh + first.to(tl.int64) * STRIDE_VS
    k_tile = column[:, None] * STRIDE_KS + dim[None, :]
    v_tile = column[:, None] * STRIDE_VS + dim[None, :]

    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, DIM2], tl.float32)

    for tile in range(begin, plain_end):
        offset = tl.cast(tile, tl.int64) * SLOTS
        if DIM2 != DIM:
            k = tl.load(k_base + offset * STRIDE_KS + k_tile, mask=(dim < DIM)[None, :], other=0.0)
            v = tl.load(v_base + offset * STRIDE_VS + v_tile, mask=(dim < DIM)[None, :], other=0.0)
        else:
            k = tl.load(k_base + offset * STRIDE_KS + k_tile)
            v = tl.load(v_base + offset * STRIDE_VS + v_tile)
        top, total, acc = _attend(q, k, v, None, top, total, acc, scale, softcap, PRECISION)

    bits_base = bits + batch64 * stride_bb
    for tile in range(tl.maximum(begin, plain), end):
        offset = tl.cast(tile, tl.int64) * SLOTS
        start = first + tile * SLOTS - length  # relative to the root's slot
        place = start + column
        # What lies behind the tree may be uninitialised, and 0 * NaN is NaN: it is not read.
        present = (place < nodes)[:, None]
        if DIM2 != DIM:
            present = present & (dim < DIM)[None, :]
        k = tl.load(k_base + offset * STRIDE_KS + k_tile, mask=present, other=0.0)
        v = tl.load(v_base + offset * STRIDE_VS + v_tile, mask=present, other=0.0)
        word = _ancestor_word(bits_base, node, valid, start, words, stride_bt, stride_bw)
        own = (word[:, None] >> column.to(tl.uint64)[None, :]) & 1
        seen = (place < 0)[None, :] | (own != 0)
        if window is not None:
            depth = tl.load(depths + batch64 * stride_db + node * stride_dt, mask=valid, other=0).to(tl.int32)
            within = (place >= 0) & (place < nodes)
            at = tl.load(depths + batch64 * stride_db + place * stride_dt, mask=within, other=0).to(tl.int32)
            at = tl.where(within, at, place)
            seen = seen & (depth[:, None] - at[None, :] < window)
        top, total, acc = _attend(q, k, v, seen, top, total, acc, scale, softcap, PRECISION)

    packed = nodes * G
    at_split = (tl.program_id(2).to(tl.int64) * splits + split) * packed
    tl.store(partial + at_split * DIM + row[:, None] * DIM + dim[None, :], acc, mask=inside)
    tl.store(stats + at_split * 2 + row * 2, top, mask=valid)
    tl.store(stats + at_split * 2 + row * 2 + 1, total, mask=valid)


@triton.jit(do_not_specialize=["window", "nodes", "splits"])
def _merge_kernel(
    partial,
    stats,
    lens,
    starts,
    sinks,
    gate,
    output,
    window,
    nodes,
    kv_heads,
    splits,
    stride_lens,
    stride_starts,
    stride_gb,
    stride_gt,
    stride_gh,
    stride_sinks,
    G: tl.constexpr,
    DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    SLOTS: tl.constexpr,
    SPLITS2: tl.constexpr,
    MERGED: tl.constexpr,
    LOG2E: tl.constexpr,
):
    row = tl.program_id(0)
    batch = tl.program_id(1) // kv_heads
    node = row // G
    head = tl.program_id(1) % kv_heads * G + row % G
    dim = tl.program_id(2) * WIDTH + tl.arange(0, WIDTH)
    inside = dim < DIM

    _, _, tiles, chunk = _span(lens, starts, batch, nodes, window, splits, stride_lens, stride_starts, SLOTS)
    used = tl.cdiv(tiles, chunk)
    packed = nodes * G
    base = tl.program_id(1).to(tl.int64) * splits * packed + row

    every = tl.arange(0, SPLITS2)
    at = stats + (base + every * packed) * 2
    tops = tl.load(at, mask=every < used, other=float("-inf"))
    top = tl.max(tops, 0)  # finite: every node sees itself
    if sinks is not None:
        sink = tl.load(sinks + head * stride_sinks).to(tl.float32) * LOG2E
        top = tl.maximum(top, sink)
    total = tl.sum(tl.exp2(tops - top) * tl.load(at + 1, mask=every < used, other=0.0), 0)
    if sinks is not None:
        total += tl.exp2(sink - top)

    acc = tl.zeros([WIDTH], tl.float32)
    for start in range(0, used, MERGED):
        some = start + tl.arange(0, MERGED)
        weight = tl.exp2(tl.load(stats + (base + some * packed) * 2, mask=some < used, other=float("-inf")) - top)
        part = tl.load(
            partial + (base + some * packed)[:, None] * DIM + dim[None, :],
            mask=(some < used)[:, None] & inside[None, :],
            other=0.0,
        )
        acc += tl.sum(part * weight[:, None], 0)
    acc = acc / total

    batch64 = batch.to(tl.int64)
    if gate is not None:
        raw = tl.load(gate + batch64 * stride_gb + node * stride_gt + head * stride_gh + dim, mask=inside, other=0.0)
        acc = acc / (1.0 + tl.exp2(-LOG2E * raw.to(tl.float32)))
    out_row = (batch64 * nodes + node) * kv_heads * G + head
    tl.store(output + out_row * DIM + dim, acc.to(output.dtype.element_ty), mask=inside)


def tree_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    lens: Tensor,
    topology: TreeTopology,
    scaling: float,
    starts: Tensor | None = None,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    gate: Tensor | None = None,
    config: AttentionConfig | None = None,
) -> Tensor:
    """Attention of tree nodes over committed slots and their own ancestors; equals `reference.tree_attention`.

    Args:
        query: `[B, Hq, T, D]`, bf16, fp16 or fp32, D at most 256; any strides, the last dimension contiguous.
        key, value: `[B, Hkv, S, D]` in the dtype of `query`, buffers of S slots with the nodes' own rows already at
            slots `lens[b] + node`. What lies behind them is never read.
        lens: int64 `[B]`, committed slots, read on the device; `lens + T` must not exceed S.
        topology: of the trees; `bits` is read, and `depths` under a window.
        scaling: factor on the scores, above 0.
        starts: int64 `[B]`, the first slot that is no padding, None: 0.
        window: of sliding attention: what lies `window` positions or more behind is not seen.
        softcap: scores become `softcap * tanh(scores / softcap)`.
        sinks: `[Hq]`, one more logit of each head, in the denominator alone.
        gate: `[B, T, Hq * D]` or `[B, T, Hq, D]` (then of any strides but the last); the output is multiplied by its
            sigmoid.
        config: None: `attention_config`.

    Returns:
        `[B, T, Hq, D]`, contiguous, in the dtype of `query`. Products of fp32 inputs are exact fp32 (`ieee`).
    """
    batch, heads, nodes, dim = query.shape
    kv_heads = key.shape[1]
    if gate is not None:
        gate = gate.view(batch, nodes, heads, dim) if gate.dim() == 3 else gate
    _check(query, key, value, topology, scaling, window, softcap, gate)
    config = attention_config(query, key) if config is None else config
    if config.slots > 64:
        raise ValueError(f"Found tiles of {config.slots} slots; expected at most 64. Choose a smaller `config.slots`.")
    rows, slots, warps, stages, splits = config
    groups = heads // kv_heads
    packed = nodes * groups
    partial = torch.empty(batch * kv_heads, splits, packed, dim, dtype=torch.float32, device=query.device)
    stats = torch.empty(batch * kv_heads, splits, packed, 2, dtype=torch.float32, device=query.device)
    output = torch.empty(batch, nodes, heads, dim, dtype=query.dtype, device=query.device)
    start_stride = 0 if starts is None else starts.stride(0)
    # exp(x) is 2^(x log2 e). Capped: tanh(y) = 1 - 2 / (2^(2 y log2 e) + 1) of y = scores * scaling / softcap.
    scale = scaling * LOG2E if softcap is None else softcap * LOG2E
    inner = None if softcap is None else 2 * LOG2E * scaling / softcap
    _split_kernel[(triton.cdiv(packed, rows), splits, batch * kv_heads)](
        query,
        key,
        value,
        lens,
        starts,
        topology.bits,
        topology.depths,
        partial,
        stats,
        scale,
        inner,
        window,
        nodes,
        topology.bits.shape[-1],
        kv_heads,
        splits,
        *query.stride()[:3],
        *key.stride()[:2],
        *value.stride()[:2],
        lens.stride(0),
        start_stride,
        *topology.bits.stride(),
        *topology.depths.stride(),
        STRIDE_KS=key.stride(2),
        STRIDE_VS=value.stride(2),
        G=groups,
        DIM=dim,
        DIM2=max(triton.next_power_of_2(dim), 16),
        ROWS=rows,
        SLOTS=slots,
        PRECISION="ieee" if query.dtype == torch.float32 else "tf32",
        num_warps=warps,
        num_stages=stages,
    )
    # Few rows: narrow programs, so that there are enough of them.
    width = min(triton.next_power_of_2(dim), 256 if packed * kv_heads * batch >= 1024 else 64)
    _merge_kernel[(packed, batch * kv_heads, triton.cdiv(dim, width))](
        partial,
        stats,
        lens,
        starts,
        sinks,
        gate,
        output,
        window,
        nodes,
        kv_heads,
        splits,
        lens.stride(0),
        start_stride,
        *((0, 0, 0) if gate is None else gate.stride()[:3]),
        0 if sinks is None else sinks.stride(0),
        G=groups,
        DIM=dim,
        WIDTH=width,
        SLOTS=slots,
        SPLITS2=triton.next_power_of_2(splits),
        MERGED=MERGED,
        LOG2E=LOG2E,
        num_warps=4 if width > 64 else 2,
    )
    return output


def _check(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    topology: TreeTopology,
    scaling: float,
    window: int | None,
    softcap: float | None,
    gate: Tensor | None,
) -> None:
    """What cannot be computed is refused before anything is launched."""
    batch, heads, nodes, dim = query.shape
    if key.shape != value.shape or (key.shape[0], key.shape[3]) != (batch, dim) or heads % key.shape[1]:
        raise ValueError(
            f"Found query {tuple(query.shape)}, key {tuple(key.shape)}, value {tuple(value.shape)}; expected [B, Hq, "
            "T, D] and twice [B, Hkv, S, D] with Hq a multiple of Hkv. Pass the buffers without repeating heads."
        )
    if topology.depths.shape != (batch, nodes):
        raise ValueError(
            f"Found a topology of {tuple(topology.depths.shape)} nodes; expected [B, T] = {(batch, nodes)}. Make it of "
            "the parents of this step's trees."
        )
    if dim > 256:
        raise ValueError(f"Found a head dimension of {dim}; expected at most 256. Use the reference for this model.")
    if query.dtype not in (torch.float32, torch.bfloat16, torch.float16) or {key.dtype, value.dtype} != {query.dtype}:
        raise TypeError(
            f"Found {query.dtype}, {key.dtype}, {value.dtype}; expected one of float32, bfloat16 and float16 for "
            "query, key and value. Convert them, or use the reference."
        )
    for name, x in (("query", query), ("key", key), ("value", value), ("gate", gate)):
        if x is not None and x.stride(-1) != 1:
            raise ValueError(f"Found a {name} of strides {x.stride()}; expected the last to be 1. Call .contiguous().")
    if scaling <= 0 or (softcap is not None and softcap <= 0):
        raise ValueError(
            f"Found scaling {scaling}, softcap {softcap}; expected them above 0. Negate the query instead."
        )
    if window is not None and window < 1:
        raise ValueError(f"Found a window of {window}; expected at least 1. Pass None for full attention.")
