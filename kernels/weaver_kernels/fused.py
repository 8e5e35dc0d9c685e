# mypy: disallow-untyped-defs=False
"""What stands around the matrices of a decoder layer, each as one Triton launch: norms, gates, rotary, cache writes.

All equal their namesakes in `fused_reference`. Nothing is read back and no shape depends on data, so all can be
captured in a CUDA graph. Inputs may be columns of a wider projection: only the last axis must be contiguous.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = ["FusedConfig", "gated_rms_norm", "qk_norm_rope", "rms_norm", "silu_mul"]


class FusedConfig(NamedTuple):
    """How a kernel is cut into programs; results do not depend on `block`.

    Attributes:
        block: heads in a program (`gated_rms_norm`, `qk_norm_rope`) or columns (`silu_mul`), a power of two;
            `rms_norm` always takes a row.
        warps: of one program.
    """

    block: int
    warps: int


def rms_norm(
    x: Tensor,
    weight: Tensor,
    eps: float,
    residual: Tensor | None = None,
    plus_one: bool = True,
    config: FusedConfig | None = None,
) -> tuple[Tensor, Tensor]:
    """`fused_reference.rms_norm`: normed rows of `x + residual`, and that sum; a program a row."""
    rows = _as_rows(x)
    columns = rows.shape[1]
    _check(weight.shape == (columns,) and weight.is_contiguous(), f"a weight of shape {[columns]}", weight)
    dtype = x.dtype if plus_one else torch.promote_types(x.dtype, weight.dtype)
    normed = torch.empty(x.shape, dtype=dtype, device=x.device)
    added = total = None
    if residual is not None:
        _check(residual.shape == x.shape and residual.dtype == x.dtype, f"a residual like {list(x.shape)}", residual)
        added, total = _as_rows(residual), torch.empty(x.shape, dtype=x.dtype, device=x.device)
    block = triton.next_power_of_2(columns)
    with torch.cuda.device_of(x):
        _rms_norm_kernel[(rows.shape[0],)](
            rows,
            added,
            weight,
            normed,
            total,
            columns,
            eps,
            rows.stride(0),
            0 if added is None else added.stride(0),
            PLUS_ONE=plus_one,
            BLOCK=block,
            num_warps=config.warps if config else min(max(block // 512, 1), 16),
        )
    return normed, x if total is None else total


def gated_rms_norm(x: Tensor, z: Tensor, weight: Tensor, eps: float, config: FusedConfig | None = None) -> Tensor:
    """`fused_reference.gated_rms_norm`: `weight * norm(x) * silu(z)` of `[B, T, H, D]`, contiguous."""
    batch, nodes, heads, dim = x.shape
    _check(z.shape == x.shape, f"a gate of shape {list(x.shape)}", z)
    _check(weight.shape == (dim,) and weight.is_contiguous(), f"a weight of shape {[dim]}", weight)
    for tensor in (x, z):
        _check(tensor.stride(-1) == 1, "heads of contiguous elements", tensor)
    output = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    config = config or FusedConfig(min(triton.next_power_of_2(heads), 4 if nodes <= 16 else 16), 4)
    with torch.cuda.device_of(x):
        _gated_rms_norm_kernel[(triton.cdiv(heads, config.block), nodes, batch)](
            x,
            z,
            weight,
            output,
            heads,
            eps,
            *x.stride()[:3],
            *z.stride()[:3],
            DIM=dim,
            BLOCK=triton.next_power_of_2(dim),
            HEADS=config.block,
            num_warps=config.warps,
        )
    return output


def silu_mul(gate_up: Tensor, config: FusedConfig | None = None) -> Tensor:
    """`fused_reference.silu_mul`: `silu(gate) * up` of `[..., 2 * I]`."""
    rows = _as_rows(gate_up)
    _check(rows.shape[1] % 2 == 0, "an even number of columns, the gate and as many of up", gate_up)
    columns = rows.shape[1] // 2
    output = torch.empty((*gate_up.shape[:-1], columns), dtype=gate_up.dtype, device=gate_up.device)
    config = config or FusedConfig(min(triton.next_power_of_2(columns), 256 if rows.shape[0] <= 16 else 1024), 4)
    with torch.cuda.device_of(gate_up):
        _silu_mul_kernel[(triton.cdiv(columns, config.block), rows.shape[0])](
            rows, output, columns, rows.stride(0), BLOCK=config.block, num_warps=config.warps
        )
    return output


def qk_norm_rope(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    eps: float,
    key_cache: Tensor,
    value_cache: Tensor,
    lens: Tensor,
    config: FusedConfig | None = None,
) -> Tensor:
    """`fused_reference.qk_norm_rope`: norm and rotary of q and k, k and v into the buffers at slots `lens[b] + node`.

    The queries `[B, Hq, T, D]` are a view of `[B, T, Hq, D]`. A slot behind the buffer's end is not written: a captured
    launch cannot raise, so the caller must have reserved room.
    """
    batch, nodes, heads, dim = q.shape
    kv_heads, rotary, slots = k.shape[2], cos.shape[-1], key_cache.shape[2]
    _check(k.shape == v.shape == (batch, nodes, kv_heads, dim), f"v like k, {[batch, nodes, kv_heads, dim]}", v)
    for weight in (q_weight, k_weight):
        _check(weight.shape == (dim,) and weight.is_contiguous(), f"a weight of shape {[dim]}", weight)
    for angles in (cos, sin):
        _check(angles.dtype == q.dtype and angles.stride(-1) == 1, f"contiguous angles in {q.dtype}", angles)
    _check(rotary % 2 == 0 and rotary <= dim, f"an even number of angles up to {dim}", cos)
    for cache in (key_cache, value_cache):
        fits = cache.shape == (batch, kv_heads, slots, dim) and cache.stride(-1) == 1
        _check(fits, f"buffers of shape {[batch, kv_heads, slots, dim]}", cache)
    for tensor in (q, k, v):
        _check(tensor.stride(-1) == 1, "heads of contiguous elements", tensor)
    cos, sin = (angles.expand(batch, nodes, rotary) for angles in (cos, sin))
    output = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    config = config or FusedConfig(min(triton.next_power_of_2(kv_heads), 4), 2)
    q_blocks = triton.cdiv(heads, config.block)
    with torch.cuda.device_of(q):
        _qk_norm_rope_kernel[(q_blocks + 2 * triton.cdiv(kv_heads, config.block), nodes, batch)](
            q,
            k,
            v,
            q_weight,
            k_weight,
            cos,
            sin,
            output,
            key_cache,
            value_cache,
            lens,
            heads,
            kv_heads,
            slots,
            q_blocks,
            eps,
            *q.stride()[:3],
            *k.stride()[:3],
            *v.stride()[:3],
            *cos.stride()[:2],
            *sin.stride()[:2],
            *key_cache.stride()[:3],
            *value_cache.stride()[:3],
            lens.stride(0),
            DIM=dim,
            BLOCK=triton.next_power_of_2(dim),
            ROTARY=rotary,
            HEADS=config.block,
            num_warps=config.warps,
        )
    return output.transpose(1, 2)


def _as_rows(x: Tensor) -> Tensor:
    """`[..., H]` as `[R, H]`: a view, unless the leading axes cannot be walked with one stride."""
    _check(x.stride(-1) == 1, "rows of contiguous elements", x)
    return x.flatten(0, -2) if x.dim() > 1 else x[None]


def _check(holds: bool, expected: str, found: Tensor) -> None:
    if not holds:
        raise ValueError(
            f"Found {found.dtype} of shape {list(found.shape)} and strides {found.stride()}; expected {expected}."
        )


@triton.jit
def _rms_norm_kernel(
    x, residual, weight, normed, total, columns, eps, x_row, residual_row, PLUS_ONE: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < columns
    factor = tl.load(weight + column, inside, other=0.0).to(tl.float32)
    value = tl.load(x + row * x_row + column, inside, other=0.0)
    if residual is not None:
        # Rounded before the norm, as the sum that the next residual reads.
        added = tl.load(residual + row * residual_row + column, inside, other=0.0)
        value = (value.to(tl.float32) + added.to(tl.float32)).to(value.dtype)
        tl.store(total + row * columns + column, value, inside)
    work = value.to(tl.float32)
    work *= tl.rsqrt(tl.sum(work * work, 0) / columns + eps)
    if PLUS_ONE:
        work *= 1.0 + factor
    else:
        work = work.to(value.dtype).to(tl.float32) * factor
    tl.store(normed + row * columns + column, work.to(normed.dtype.element_ty), inside)


@triton.jit
def _gated_rms_norm_kernel(
    x,
    z,
    weight,
    output,
    heads,
    eps,
    x_b,
    x_t,
    x_h,
    z_b,
    z_t,
    z_h,
    DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    HEADS: tl.constexpr,
):
    """A block of heads of one node."""
    batch = tl.program_id(2).to(tl.int64)
    node = tl.program_id(1).to(tl.int64)
    head = tl.program_id(0) * HEADS + tl.arange(0, HEADS)
    lane = tl.arange(0, BLOCK)
    inside = (head < heads)[:, None] & (lane < DIM)[None, :]
    value = tl.load(x + batch * x_b + node * x_t + head[:, None] * x_h + lane[None, :], inside, other=0.0)
    gate = tl.load(z + batch * z_b + node * z_t + head[:, None] * z_h + lane[None, :], inside, other=0.0)
    factor = tl.load(weight + lane, lane < DIM, other=0.0)
    work = value.to(tl.float32)
    work *= tl.rsqrt(tl.sum(work * work, 1) / DIM + eps)[:, None]
    work = work.to(value.dtype).to(tl.float32) * factor.to(tl.float32)[None, :]
    if factor.dtype == value.dtype:  # a weight in fp32 lifts the product to fp32
        work = work.to(value.dtype).to(tl.float32)
    gate = gate.to(tl.float32)
    work *= gate * tl.sigmoid(gate)
    nodes = tl.num_programs(1)
    place = ((batch * nodes + node) * heads + head)[:, None] * DIM + lane[None, :]
    tl.store(output + place, work.to(value.dtype), inside)


@triton.jit
def _silu_mul_kernel(gate_up, output, columns, row_stride, BLOCK: tl.constexpr):
    row = tl.program_id(1).to(tl.int64)
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = column < columns
    gate = tl.load(gate_up + row * row_stride + column, inside, other=0.0)
    up = tl.load(gate_up + row * row_stride + columns + column, inside, other=0.0).to(tl.float32)
    work = gate.to(tl.float32)
    work = (work * tl.sigmoid(work)).to(gate.dtype).to(tl.float32) * up
    tl.store(output + row * columns + column, work.to(gate.dtype), inside)


@triton.jit
def _normed_rotated(
    x, weight, cos, sin, head, stride, inside, eps, DIM: tl.constexpr, BLOCK: tl.constexpr, ROTARY: tl.constexpr
):
    """Heads at `x`, `[HEADS, BLOCK]` in fp32, normed, rounded as they go, and rotated."""
    lane = tl.arange(0, BLOCK)
    value = tl.load(x + head[:, None] * stride + lane[None, :], inside, other=0.0)
    work = value.to(tl.float32)
    scale = tl.rsqrt(tl.sum(work * work, 1) / DIM + eps)[:, None]
    factor = 1.0 + tl.load(weight + lane, lane < DIM, other=0.0).to(tl.float32)
    work = (work * scale * factor[None, :]).to(value.dtype).to(tl.float32)
    # The other half of the rotated entries is read again (from the cache) rather than exchanged between threads.
    half = ROTARY // 2
    partner = tl.where(lane < half, lane + half, lane - half)
    turns = lane < ROTARY
    other = tl.load(x + head[:, None] * stride + partner[None, :], inside & turns[None, :], other=0.0).to(tl.float32)
    factor = 1.0 + tl.load(weight + partner, turns, other=0.0).to(tl.float32)
    other = (other * scale * factor[None, :]).to(value.dtype).to(tl.float32)
    other = tl.where((lane < half)[None, :], -other, other)
    cosine = tl.load(cos + lane, turns, other=1.0).to(tl.float32)[None, :]
    sine = tl.load(sin + lane, turns, other=0.0).to(tl.float32)[None, :]
    return (work * cosine).to(value.dtype).to(tl.float32) + (other * sine).to(value.dtype).to(tl.float32)


@triton.jit
def _qk_norm_rope_kernel(
    q,
    k,
    v,
    q_weight,
    k_weight,
    cos,
    sin,
    output,
    key_cache,
    value_cache,
    lens,
    heads,
    kv_heads,
    slots,
    q_blocks,
    eps,
    q_b,
    q_t,
    q_h,
    k_b,
    k_t,
    k_h,
    v_b,
    v_t,
    v_h,
    cos_b,
    cos_t,
    sin_b,
    sin_t,
    key_b,
    key_h,
    key_s,
    value_b,
    value_h,
    value_s,
    lens_b,
    DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    ROTARY: tl.constexpr,
    HEADS: tl.constexpr,
):
    """A block of heads of one node: of q, then of k, then of v."""
    batch = tl.program_id(2).to(tl.int64)
    node = tl.program_id(1).to(tl.int64)
    nodes = tl.num_programs(1)
    block = tl.program_id(0)
    kv_blocks = (tl.num_programs(0) - q_blocks) // 2
    lane = tl.arange(0, BLOCK)
    cos += batch * cos_b + node * cos_t
    sin += batch * sin_b + node * sin_t
    if block < q_blocks:
        head = block * HEADS + tl.arange(0, HEADS)
        inside = (head < heads)[:, None] & (lane < DIM)[None, :]
        q += batch * q_b + node * q_t
        work = _normed_rotated(q, q_weight, cos, sin, head, q_h, inside, eps, DIM, BLOCK, ROTARY)
        place = ((batch * nodes + node) * heads + head)[:, None] * DIM + lane[None, :]
        tl.store(output + place, work.to(output.dtype.element_ty), inside)
    else:
        slot = tl.load(lens + batch * lens_b) + node
        block -= q_blocks
        head = (block % kv_blocks) * HEADS + tl.arange(0, HEADS)
        inside = (head < kv_heads)[:, None] & (lane < DIM)[None, :]
        kept = inside & (slot >= 0) & (slot < slots)
        if block < kv_blocks:
            k += batch * k_b + node * k_t
            work = _normed_rotated(k, k_weight, cos, sin, head, k_h, inside, eps, DIM, BLOCK, ROTARY)
            place = batch * key_b + slot * key_s + head[:, None] * key_h + lane[None, :]
            tl.store(key_cache + place, work.to(key_cache.dtype.element_ty), kept)
        else:
            row = tl.load(v + batch * v_b + node * v_t + head[:, None] * v_h + lane[None, :], inside, other=0.0)
            place = batch * value_b + slot * value_s + head[:, None] * value_h + lane[None, :]
            tl.store(value_cache + place, row, kept)
