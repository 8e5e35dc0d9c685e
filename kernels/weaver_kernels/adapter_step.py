# mypy: allow-untyped-defs
"""The adapter's layers on the few nodes of a round: matrices with what surrounds them, and attention along paths.

A round of growth runs the adapter on 1 to 8 nodes. Its matrices are then a read of their weights, and the norms,
biases, activations and residuals between them would cost more launches than the matrices themselves. So
`adapter_linear` takes the norm before and all that follows into one launch, and `adapter_attention`, beside it the only
launch of a block, writes the nodes' keys and values and attends over the prefix, their ancestors and themselves.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = ["adapter_attention", "adapter_linear"]

# Triton's interpreter multiplies bf16 as if it were integers: there the operands are widened first.
_INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
EPS = 1e-6  # of the adapter's norms
LINEAR = {"BLOCK_N": 16, "BLOCK_K": 256, "num_warps": 4, "num_stages": 3}


@triton.jit
def _dot(a, b, total):
    if _INTERPRETED:
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, total, input_precision="ieee")


@triton.jit
def _linear_kernel(
    x, x_index, weight, bias, norm_weight, norm_bias, residual, residual_index, out,
    rows, per_row, features, width, x_row, x_node, x_index_row, x_index_node,
    weight_row, residual_row, residual_node, residual_index_row, residual_index_node,
    EPS: tl.constexpr, ACTIVATION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    m = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    k = tl.arange(0, BLOCK_K)
    real, used = m < rows, n < features
    row, node = m // per_row, m % per_row
    if x_index is not None:
        index = tl.load(x_index + row * x_index_row + node * x_index_node, mask=real, other=0).to(tl.int64)
        lines = x + index * x_node
    else:
        lines = x + row.to(tl.int64) * x_row + node * x_node
    if norm_weight is not None:
        squares = tl.zeros([BLOCK_M], tl.float32)
        for start in range(0, width, BLOCK_K):
            inside = real[:, None] & (start + k < width)[None, :]
            part = tl.load(lines[:, None] + start + k[None, :], mask=inside, other=0.0).to(tl.float32)
            squares += tl.sum(part * part, 1)
        scale = tl.rsqrt(squares / width + EPS)
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    second = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    matrix = weight + n.to(tl.int64)[None, :] * weight_row
    for start in range(0, width, BLOCK_K):
        column = start + k
        inside = column < width
        part = tl.load(lines[:, None] + column[None, :], mask=real[:, None] & inside[None, :], other=0.0)
        if norm_weight is not None:
            factor = tl.load(norm_weight + column, mask=inside, other=0.0).to(tl.float32)
            shift = tl.load(norm_bias + column, mask=inside, other=0.0).to(tl.float32)
            normed = factor[None, :] * (part.to(tl.float32) * scale[:, None]) + shift[None, :]
            part = normed.to(part.dtype)  # as the norm itself returns it
        block = inside[:, None] & used[None, :]
        values = tl.load(matrix + column[:, None], mask=block, other=0.0)
        total = _dot(part, values, total)
        if ACTIVATION == "swiglu":  # the gate's rows come first, the values' behind them
            values = tl.load(matrix + features * weight_row + column[:, None], mask=block, other=0.0)
            second = _dot(part, values, second)
    if bias is not None:
        total += tl.load(bias + n, mask=used, other=0.0).to(tl.float32)[None, :]
        if ACTIVATION == "swiglu":
            second += tl.load(bias + features + n, mask=used, other=0.0).to(tl.float32)[None, :]
    if ACTIVATION == "gelu":
        total = total * 0.5 * (1 + tl.erf(total * 0.7071067811865476))
    if ACTIVATION == "swiglu":
        total = total * tl.sigmoid(total) * second
    inside = real[:, None] & used[None, :]
    if residual is not None:
        if residual_index is not None:
            line = tl.load(residual_index + row * residual_index_row + node * residual_index_node, mask=real, other=0)
            base = residual + line.to(tl.int64) * residual_node
        else:
            base = residual + row.to(tl.int64) * residual_row + node * residual_node
        total += tl.load(base[:, None] + n[None, :], mask=inside, other=0.0).to(tl.float32)
    tl.store(out + m.to(tl.int64)[:, None] * features + n[None, :], total.to(out.dtype.element_ty), mask=inside)


def adapter_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    norm: tuple[Tensor, Tensor] | None = None,
    activation: str = "none",
    residual: Tensor | None = None,
    x_index: Tensor | None = None,
    residual_index: Tensor | None = None,
    config: dict[str, int] | None = None,
) -> Tensor:
    """`residual + activation(norm(x) @ weight.T + bias)` for few rows, in one launch.

    Args:
        x: `[B, W, K]`, or a table `[V, K]` of which `x_index` takes rows.
        weight: `[N, K]`, or `[2 * N, K]` for "swiglu"; bias: as many.
        norm: weight and bias `[K]` of a root-mean-square norm of `x`, computed in fp32 and rounded to the dtype of `x`.
        activation: "none", "gelu" (exact) or "swiglu" (the first half gates the second).
        residual: `[B, W, N]`, or a table `[R, N]` of which `residual_index` takes rows.
        x_index, residual_index: int64 `[B, W]`.
        config: overrides of `LINEAR`.

    Returns:
        `[B, W, N]` in the dtype of `weight`; sums run in fp32 and are rounded once.
    """
    index = x_index if x_index is not None else x[..., 0]
    batch, nodes = index.shape
    features, width = weight.shape[0] // (2 if activation == "swiglu" else 1), weight.shape[1]
    out = torch.empty(batch, nodes, features, dtype=weight.dtype, device=x.device)
    config = {**LINEAR, **(config or {})}
    config["BLOCK_K"] = min(config["BLOCK_K"], max(16, triton.next_power_of_2(width)))
    grid = (triton.cdiv(features, config["BLOCK_N"]), triton.cdiv(batch * nodes, 16))
    norm_weight, norm_bias = norm or (None, None)
    _linear_kernel[grid](
        x, x_index, weight, bias, norm_weight, norm_bias, residual, residual_index, out,
        batch * nodes, nodes, features, width, *_two_strides(x, x_index), *_index_strides(x_index),
        weight.stride(0), *_two_strides(residual, residual_index), *_index_strides(residual_index),
        EPS=EPS, ACTIVATION=activation, BLOCK_M=16, **config,
    )  # fmt: skip
    return out


def _two_strides(x: Tensor | None, index: Tensor | None) -> tuple[int, int]:
    """Of rows and nodes; of a table that is indexed, of its rows."""
    if x is None:
        return 0, 0
    return (0, x.stride(0)) if index is not None else (x.stride(0), x.stride(1))


def _index_strides(index: Tensor | None) -> tuple[int, int]:
    return (0, 0) if index is None else (index.stride(0), index.stride(1))


# ---- attention -------------------------------------------------------------------------------------------------------


@triton.jit
def _turned(row, feature, width, cos, sin):
    """One row after its rotary embedding by halves, rounded as it is stored."""
    half = width // 2
    inside = feature < width
    x = tl.load(row + feature, mask=inside, other=0.0)
    partner = tl.load(row + tl.where(feature < half, feature + half, feature - half), mask=inside, other=0.0)
    sign = tl.where(feature < half, -1.0, 1.0)
    return (x.to(tl.float32) * cos + sign * (partner.to(tl.float32) * sin)).to(x.dtype)


@triton.jit(do_not_specialize=["first"])  # it differs from round to round
def _attention_kernel(
    q, k, v, keys, values, nodes, paths, cos, sin, out, slots, depths, first, prefix, width, scaling,
    qkv_row, qkv_node, table_row, table_head, table_slot, out_row, out_node,
    ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    node, head, row = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    slot = first + node
    feature, entry = tl.arange(0, WIDTH), tl.arange(0, ROWS)
    inside = feature < width
    depth = tl.load(nodes + (2 * tl.num_programs(2) + row) * slots + slot).to(tl.int32)
    line = row * qkv_row + node * qkv_node + head * width
    if cos is not None:
        turn = (tl.minimum(depth, depths - 1) + 1) * (width // 2) + feature % (width // 2)
        c, s = tl.load(cos + turn, mask=inside, other=0.0), tl.load(sin + turn, mask=inside, other=0.0)
        query, key = _turned(q + line, feature, width, c, s), _turned(k + line, feature, width, c, s)
    else:
        query = tl.load(q + line + feature, mask=inside, other=0.0)
        key = tl.load(k + line + feature, mask=inside, other=0.0)
    value = tl.load(v + line + feature, mask=inside, other=0.0)
    own = row * table_row + head * table_head + (prefix + slot) * table_slot + feature
    tl.store(keys + own, key.to(keys.dtype.element_ty), mask=inside)
    tl.store(values + own, value.to(values.dtype.element_ty), mask=inside)

    # The prefix, then the ancestors from the anchor down; the node itself is at hand.
    above = entry - prefix
    seen = above < depth
    ancestor = tl.load(paths + (row * slots + slot) * depths + above, mask=(above >= 0) & seen, other=0)
    place = tl.where(above < 0, entry, prefix + ancestor)
    at = row * table_row + head * table_head + place[:, None] * table_slot + feature[None, :]
    mask = seen[:, None] & inside[None, :]
    query = query.to(tl.float32) * scaling
    scores = tl.sum(query[None, :] * tl.load(keys + at, mask=mask, other=0.0).to(tl.float32), 1)
    scores = tl.where(seen, scores, float("-inf"))
    self_score = tl.sum(query * key.to(tl.float32), 0)
    top = tl.maximum(tl.max(scores, 0), self_score)
    weights, self_weight = tl.exp(scores - top), tl.exp(self_score - top)
    mixed = tl.sum(weights[:, None] * tl.load(values + at, mask=mask, other=0.0).to(tl.float32), 0)
    mixed = (mixed + self_weight * value.to(tl.float32)) / (tl.sum(weights, 0) + self_weight)
    line = out + row * out_row + node * out_node + head * width
    tl.store(line + feature, mixed.to(out.dtype.element_ty), mask=inside)


def adapter_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    keys: Tensor,
    values: Tensor,
    nodes: Tensor,
    paths: Tensor,
    first: int,
    rope: tuple[Tensor, Tensor] | None = None,
    *,
    config: dict[str, int] | None = None,
) -> Tensor:
    """Attention of a round's nodes over the prefix, their ancestors and themselves; their rows go into the table.

    Args:
        q, k, v: `[B, W, heads * hd]` each, of nodes `first..first + W - 1`, of one strided layout (views of a fused
            projection); not rotated yet.
        keys, values: `[B, heads, prefix + M, hd]`, one layout; rows of nodes before `first` are filled.
        nodes, paths: int64 `[3, B, M]` and int32 `[B, M, D]` of a `Growth`.
        rope: cosine and sine `[positions, hd / 2]`, fp32; a node of depth `d` is at position `d + 1`. None: none.
        config: `num_warps`.

    Returns:
        `[B, W, heads * hd]` in the dtype of `q`.
    """
    batch, count, _ = q.shape
    _, heads, rows, width = keys.shape
    slots, depths = paths.shape[1:]
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    cos, sin = rope or (None, None)
    _attention_kernel[(count, heads, batch)](
        q, k, v, keys, values, nodes, paths, cos, sin, out,
        slots, depths, first, rows - slots, width, width**-0.5, q.stride(0), q.stride(1), *keys.stride()[:3],
        out.stride(0), out.stride(1),
        ROWS=triton.next_power_of_2(rows - slots + depths), WIDTH=triton.next_power_of_2(width),
        **{"num_warps": 4, **(config or {})},
    )  # fmt: skip
    return out
