# mypy: allow-untyped-defs
"""Tree verification of the gated delta rule as one Triton launch: gating, L2 norm, solve, read-out and stash.

A program owns one row of the batch, one value head and `block_values` of its columns, and walks the nodes in blocks of
`block_nodes`: up to that many nodes nothing but inputs and results touches memory, beyond it the updates `u` of earlier
blocks are read back from the stash. The system (I + A) u = r is solved by substitution over 16-row blocks whose
diagonal blocks are inverted in fp32; powers of A, which explode when keys repeat, are never formed.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .reference import GatedDeltaStash, TreeTopology

__all__ = ["GatedDeltaConfig", "default_config", "gated_delta_tree", "unsupported"]

_DIMS = (16, 32, 64, 128)
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)

# Triton's interpreter multiplies bf16 as if it were uint16 and truncates to it: there both are done in fp32.
_INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


class GatedDeltaConfig(NamedTuple):
    """How the kernel runs; results differ by rounding alone.

    Attributes:
        block_nodes: 16, 32 or 64 nodes solved together; block_values: columns of a head in one program.
        block_keys: key columns in one dot: all of `dk` but for fp32, whose dots live in registers.
        warps: of one program.
        solve: precision of the dots that feed `u`: "tf32x3" or "ieee".
        invert: precision of the dots in the 16x16 inverses, likewise.
        read: precision of the read-out `C u`: "bf16" (operands rounded to it), "tf32", "tf32x3" or "ieee".

    fp32 inputs are "ieee" everywhere, whatever is said here.
    """

    block_nodes: int
    block_values: int
    block_keys: int
    warps: int
    solve: str = "tf32x3"
    invert: str = "ieee"
    read: str = "tf32"


@triton.jit
def _round(x, DTYPE: tl.constexpr):
    if _INTERPRETED and tl.bfloat16 == DTYPE:
        bits = x.to(tl.int32, bitcast=True)
        x = ((bits + 0x7FFF + ((bits >> 16) & 1)) & -0x10000).to(tl.float32, bitcast=True)
    return x.to(DTYPE)


@triton.jit
def _dot(x, y, PRECISION: tl.constexpr):
    if _INTERPRETED:
        return tl.dot(x.to(tl.float32), y.to(tl.float32))
    elif PRECISION == "tf32x3" and x.dtype == tl.float32:
        # As Triton's own, without its patching of infinities: the low parts are what tf32 drops.
        x_high = (x.to(tl.int32, bitcast=True) & -0x2000).to(tl.float32, bitcast=True)
        y_high = (y.to(tl.int32, bitcast=True) & -0x2000).to(tl.float32, bitcast=True)
        out = tl.dot(x - x_high, y_high, input_precision="tf32")
        out = tl.dot(x_high, y - y_high, acc=out, input_precision="tf32")
        return tl.dot(x_high, y_high, acc=out, input_precision="tf32")
    else:
        return tl.dot(x, y, input_precision=PRECISION)


@triton.jit
def _softplus(x):
    # log1p by Kahan's quotient: 1 + e alone would lose the small decays. Above 20 it is x, as in torch.
    e = tl.exp(tl.minimum(x, 20.0))
    y = 1.0 + e
    log1p = tl.where(y == 1.0, e, tl.log(y) * (e / tl.where(y == 1.0, 1.0, y - 1.0)))
    return tl.where(x > 20.0, x, log1p)


@triton.jit
def _times_state(x, state, PRECISION: tl.constexpr, READ: tl.constexpr):
    """`x @ state` for raw `x`, the state in fp32. `READ`: it feeds the output alone."""
    if x.dtype == tl.bfloat16:
        # x is exact in bf16, so three bf16 terms of the state (8 + 8 + 8 bits) make an fp32 product of three dots.
        high = _round(state, tl.bfloat16)
        rest = state - high.to(tl.float32)
        middle = _round(rest, tl.bfloat16)
        out = _dot(x, middle, "ieee")
        if not READ:
            out += _dot(x, _round(rest - middle.to(tl.float32), tl.bfloat16), "ieee")
        return out + _dot(x, high, "ieee")
    else:
        return _dot(x.to(tl.float32), state, PRECISION)


@triton.jit
def _inverse(a, PRECISION: tl.constexpr):
    """`(I + a)^-1` of `[N, 16, 16]` strictly lower blocks, by doubling: [[P, 0], [-R C P, R]] from P and R.

    Every intermediate is an entry of a true inverse, as in substitution, in 6 dots instead of 15 dependent steps.
    """
    i = tl.arange(0, 16)[None, :, None]
    j = tl.arange(0, 16)[None, None, :]
    x = tl.where(i == j, 1.0, 0.0) - tl.where(i // 2 == j // 2, a, 0.0)
    for log in tl.static_range(1, 4):
        corner = tl.where((i >> log != j >> log) & (i >> (log + 1) == j >> (log + 1)), a, 0.0)
        x -= _dot(_dot(x, corner, PRECISION), x, PRECISION)
    return x


@triton.jit
def _solve(a, r, N: tl.constexpr, PRECISION: tl.constexpr, INVERT: tl.constexpr):
    """`u` with `(I + a) u = r`: `a [16 N, 16 N]` strictly lower, `r [16 N, BV]`.

    With X the inverse of the diagonal blocks and L what lies below them, u = X r - X L u. Each pass settles one more
    block of rows from settled ones, so N - 1 passes are block substitution, in dots large enough for tensor cores.
    """
    block = tl.arange(0, N)
    same = block[:, None, None, None] == block[None, None, :, None]
    diagonal = tl.sum(tl.where(same, tl.reshape(a, (N, 16, N, 16)), 0.0), 2)
    x = _inverse(diagonal, INVERT)
    if N == 1:
        return _dot(tl.reshape(x, (16, 16)), r, PRECISION)
    wide = tl.reshape(tl.where(same, tl.expand_dims(x, 2), 0.0), (16 * N, 16 * N))
    node = tl.arange(0, 16 * N) // 16
    lower = _dot(wide, tl.where(node[:, None] == node[None, :], 0.0, a), PRECISION)
    first = _dot(wide, r, PRECISION)
    u = first
    for _ in tl.static_range(N - 1):
        u = first - _dot(lower, u, PRECISION)
    return u


@triton.jit
def _read(scores, u, PRECISION: tl.constexpr):
    if PRECISION == "bf16":
        return _dot(_round(scores, tl.bfloat16), _round(u, tl.bfloat16), "ieee")
    else:
        return _dot(scores, u, PRECISION)


@triton.jit
def _square(x):
    return tl.sum(x.to(tl.float32) * x.to(tl.float32), 1)


@triton.jit
def _rows_times_rows(x_rows, x_valid, y_rows, y_valid, DK: tl.constexpr, BK: tl.constexpr):
    """`x @ y^T` and the squared norms of `y`, of rows in memory, `BK` columns at a time."""
    out = tl.zeros((x_rows.shape[0], y_rows.shape[0]), tl.float32)
    square = tl.zeros((y_rows.shape[0],), tl.float32)
    for start in range(0, DK, BK):
        column = start + tl.arange(0, BK)[None, :]
        x = tl.load(x_rows + column, mask=x_valid, other=0.0)
        y = tl.load(y_rows + column, mask=y_valid, other=0.0)
        out += _dot(x, tl.trans(y), "ieee")
        square += _square(y)
    return out, square


@triton.jit
def _rows_times_state(rows, valid, state_ptr, state_k, BV: tl.constexpr, DK: tl.constexpr, BK: tl.constexpr,
                      PRECISION: tl.constexpr, READ: tl.constexpr):  # fmt: skip
    out = tl.zeros((rows.shape[0], BV), tl.float32)
    for start in range(0, DK, BK):
        part = start + tl.arange(0, BK)
        x = tl.load(rows + part[None, :], mask=valid, other=0.0)
        state = tl.load(state_ptr + part[:, None] * state_k + tl.arange(0, BV)[None, :])
        out += _times_state(x, state, PRECISION, READ)
    return out


@triton.jit
def _seen(bits, row, valid, words, column, local):
    """Which of the nodes `column + local` are ancestors of `row` or itself. A block never straddles two words."""
    word = tl.load(bits + row * words + column // 64, mask=valid, other=0) >> (column % 64)
    return ((word[:, None] >> local[None, :]) & 1) != 0


@triton.jit(do_not_specialize=["nodes", "decay_b", "decay_h"])
def _gated_delta_tree(
    q_ptr, k_ptr, v_ptr, a_ptr, b_ptr, a_log_ptr, bias_ptr, state_ptr, bits_ptr, z_ptr, weight_ptr,
    out_ptr, keys_ptr, updates_ptr, decay_ptr,
    nodes, words, scale, eps,
    q_b, q_t, q_h, k_b, k_t, k_h, v_b, v_t, v_h, a_b, a_t, a_h, b_b, b_t, b_h, state_b, state_h, state_k,
    z_b, z_t, z_h, keys_b, keys_h, keys_t, updates_b, updates_h, updates_t, decay_b, decay_h,
    HEADS: tl.constexpr, GROUPS: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr,
    BT: tl.constexpr, BV: tl.constexpr, BK: tl.constexpr, BLOCKS: tl.constexpr,
    SOLVE: tl.constexpr, INVERT: tl.constexpr, READ: tl.constexpr, STATE_READ: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0) % (DV // BV)
    head = tl.program_id(0) // (DV // BV)
    key_head = head // GROUPS
    batch = tl.program_id(1).to(tl.int64)
    q_ptr += batch * q_b + key_head * q_h
    k_ptr += batch * k_b + key_head * k_h
    v_ptr += batch * v_b + head * v_h + tile * BV
    a_ptr += batch * a_b + head * a_h
    b_ptr += batch * b_b + head * b_h
    state_ptr += batch * state_b + head * state_h + tile * BV
    bits_ptr += batch * nodes * words
    out_ptr += (batch * nodes * HEADS + head) * DV + tile * BV
    keys_ptr += batch * keys_b + key_head * keys_h
    updates_ptr += batch * updates_b + head * updates_h + tile * BV
    decay_ptr += batch * decay_b + head * decay_h

    local = tl.arange(0, BT)
    value = tl.arange(0, BV)[None, :]
    part = tl.arange(0, BK)
    WHOLE: tl.constexpr = BK == DK
    if WHOLE:  # read once, before anything waits
        state = tl.load(state_ptr + part[:, None] * state_k + value)
    rate = -tl.exp(tl.load(a_log_ptr + head).to(tl.float32))
    bias = tl.load(bias_ptr + head).to(tl.float32)

    for this in range(BLOCKS):
        row = this * BT + local
        valid = row < nodes
        some = valid[:, None]
        k_rows = k_ptr + row[:, None] * k_t
        q_rows = q_ptr + row[:, None] * q_t

        # Products of raw rows are exact for 16-bit inputs; the norms scale the results.
        if WHOLE:
            k = tl.load(k_rows + part[None, :], mask=some, other=0.0)
        v = tl.load(v_ptr + row[:, None] * v_t + value, mask=some, other=0.0)
        b = tl.load(b_ptr + row * b_t, mask=valid, other=0.0)
        if WHOLE:
            k_state = _times_state(k, state, SOLVE, False)
            gram = _dot(k, tl.trans(k), "ieee")
            square = _square(k)
        else:
            k_state = _rows_times_state(k_rows, some, state_ptr, state_k, BV, DK, BK, SOLVE, False)
            gram, square = _rows_times_rows(k_rows, some, k_rows, some, DK, BK)
        k_norm = tl.rsqrt(square + 1e-6)

        path = tl.zeros((BT,), tl.float32)  # G, the path sums
        for other in range(this + 1):
            a = tl.load(a_ptr + (other * BT + local) * a_t, mask=other * BT + local < nodes, other=0.0)
            g = rate * _softplus(a.to(tl.float32) + bias)
            path += tl.sum(tl.where(_seen(bits_ptr, row, valid, words, other * BT, local), g[None, :], 0.0), 1)
        tl.store(decay_ptr + row, path, mask=valid)  # the same from all column tiles: each reads back its own

        beta = _round(tl.sigmoid(b.to(tl.float32)), b.dtype).to(tl.float32)
        from_state = tl.exp(path)
        r = beta[:, None] * (v.to(tl.float32) - (from_state * k_norm)[:, None] * k_state)
        for other in range(this):
            seen = _seen(bits_ptr, row, valid, words, other * BT, local)
            if tl.max(tl.max(seen.to(tl.int32), 1), 0) > 0:
                column = other * BT + local
                far_rows = k_ptr + column[:, None] * k_t
                far, square = _rows_times_rows(k_rows, some, far_rows, column[:, None] < nodes, DK, BK)
                difference = path[:, None] - tl.load(decay_ptr + column)[None, :]
                far *= tl.exp(tl.where(seen, difference, float("-inf"))) * tl.rsqrt(square + 1e-6)[None, :]
                u = tl.load(updates_ptr + column[:, None] * updates_t + value)
                r -= _dot(far * (beta * k_norm)[:, None], u, SOLVE)

        # Mask before exp: off the tree the difference may be positive and inf * 0 would be NaN.
        seen = _seen(bits_ptr, row, valid, words, this * BT, local)
        difference = path[:, None] - path[None, :]
        above = seen & (local[:, None] != local[None, :])
        ratio = tl.exp(tl.where(above, difference, float("-inf")))
        system = gram * ratio * (beta * k_norm)[:, None] * k_norm[None, :]
        if WHOLE:  # in flight during the solve
            q = tl.load(q_rows + part[None, :], mask=some, other=0.0)
        u = _solve(system, r, BT // 16, SOLVE, INVERT)
        tl.store(updates_ptr + row[:, None] * updates_t + value, u, mask=some)

        if WHOLE:
            scores = _dot(q, tl.trans(k), "ieee")
            square = _square(q)
            q_state = _times_state(q, state, STATE_READ, True)
        else:
            scores, square = _rows_times_rows(k_rows, some, q_rows, some, DK, BK)
            scores = tl.trans(scores)
            q_state = _rows_times_state(q_rows, some, state_ptr, state_k, BV, DK, BK, STATE_READ, True)
        q_norm = tl.rsqrt(square + 1e-6) * scale
        ratio = tl.exp(tl.where(seen, difference, float("-inf")))
        out = from_state[:, None] * q_state + _read(scores * ratio * k_norm[None, :], u, READ)
        for other in range(this):
            seen = _seen(bits_ptr, row, valid, words, other * BT, local)
            if tl.max(tl.max(seen.to(tl.int32), 1), 0) > 0:
                column = other * BT + local
                far_rows = k_ptr + column[:, None] * k_t
                far, square = _rows_times_rows(q_rows, some, far_rows, column[:, None] < nodes, DK, BK)
                difference = path[:, None] - tl.load(decay_ptr + column)[None, :]
                far *= tl.exp(tl.where(seen, difference, float("-inf"))) * tl.rsqrt(square + 1e-6)[None, :]
                out += _read(far, tl.load(updates_ptr + column[:, None] * updates_t + value), READ)
        out *= q_norm[:, None]

        if (tile == 0) & (head % GROUPS == 0):
            for start in range(0, DK, BK):
                raw = tl.load(k_rows + start + part[None, :], mask=some, other=0.0).to(tl.float32)
                tl.store(keys_ptr + row[:, None] * keys_t + start + part[None, :], raw * k_norm[:, None], mask=some)
        dtype = out_ptr.dtype.element_ty
        if z_ptr is not None:  # the gated RMS norm, rounded where transformers rounds
            out = _round(out, dtype).to(tl.float32)
            out *= tl.rsqrt(tl.sum(out * out, 1) / DV + eps)[:, None]
            gate_ptr = z_ptr + batch * z_b + head * z_h + row[:, None] * z_t + value
            gate = tl.load(gate_ptr, mask=some, other=0.0).to(tl.float32)
            weight = tl.load(weight_ptr + value)
            scaled = weight.to(tl.float32) * _round(out, dtype).to(tl.float32)
            if weight.dtype == dtype:
                scaled = _round(scaled, dtype).to(tl.float32)
            out = scaled * gate * tl.sigmoid(gate)
        tl.store(out_ptr + row[:, None] * (HEADS * DV) + value, _round(out, dtype), mask=some)
        if BLOCKS > 1:
            tl.debug_barrier()  # the next block reads these updates and sums back


def unsupported(query: Tensor, value: Tensor) -> str | None:
    """Why the kernel cannot take these inputs, or None."""
    if query.dtype not in _DTYPES:
        return f"dtype {query.dtype}, expected one of {_DTYPES}"
    if query.shape[-1] not in _DIMS or value.shape[-1] not in _DIMS:
        return f"head dimensions {query.shape[-1]} and {value.shape[-1]}, expected each in {_DIMS}"
    if value.shape[2] % query.shape[2]:
        return f"{value.shape[2]} value heads over {query.shape[2]} key heads, expected a multiple"
    return None


def default_config(nodes: int, dk: int, dv: int, dtype: torch.dtype, whole: bool = False) -> GatedDeltaConfig:
    """The configuration for trees of `nodes`; `whole`: one program owns a head, as the fused norm needs."""
    if dtype == torch.float32:
        return GatedDeltaConfig(16, dv if whole else min(dv, 32), 16, 4, "ieee", "ieee", "ieee")
    # By the sweep of bench_gated_delta.py on an H200: 64 nodes are solved as one block, more of them as blocks of 32.
    block = 16 if nodes <= 16 else 64 if 32 < nodes <= 64 else 32
    columns = dv if whole else min(dv, 32 if block == 16 else 64)
    return GatedDeltaConfig(block, columns, dk, 4, invert="tf32x3" if block == 64 else "ieee")


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
    config: GatedDeltaConfig | None = None,
    *,
    z: Tensor | None = None,
    norm_weight: Tensor | None = None,
    eps: float = 1e-6,
) -> tuple[Tensor, GatedDeltaStash]:
    """`reference.gated_delta_tree` on `reference.gating(a, b, A_log, dt_bias)`, in one launch for any number of nodes.

    Args:
        query, key: `[B, T, Hk, dk]`, before the L2 norm; value: `[B, T, Hv, dv]`; a, b: `[B, T, Hv]`. Views with any
            strides whose head vectors are contiguous; one dtype for query, key and value: bf16, fp16 or fp32.
        A_log, dt_bias: `[Hv]`; state: fp32 `[B, Hv, dk, dv]`, only read.
        topology: of the trees, `bits` is read.
        stash: written in place when given.
        config: None: `default_config`.
        z: `[B, T, Hv, dv]`, the gate of the RMS norm that follows in Qwen3.5; with `norm_weight [dv]` the output is
            `norm(output) * norm_weight * silu(z)`. Then `config.block_values` must be `dv`.

    Returns:
        The outputs `[B, T, Hv, dv]` in the dtype of `value`, and the stash.

    Raises:
        NotImplementedError: a shape or dtype that `unsupported` names.
        ValueError: strides, dtypes or a configuration that do not fit together.
    """
    reason = unsupported(query, value)
    if reason is not None:
        raise NotImplementedError(f"The gated delta tree kernel found {reason}; use reference.gated_delta_tree.")
    batch, nodes, key_heads, dk = query.shape
    heads, dv = value.shape[2:]
    if config is None:
        config = default_config(nodes, dk, dv, query.dtype, whole=z is not None)
    if query.dtype == torch.float32:
        config = config._replace(solve="ieee", invert="ieee", read="ieee")
    _check(query, key, value, state, config, z, norm_weight)
    if stash is None:
        shapes = (batch, key_heads, nodes, dk), (batch, heads, nodes, dv), (batch, heads, nodes)
        stash = GatedDeltaStash(*(torch.empty(s, dtype=torch.float32, device=query.device) for s in shapes))
    output = torch.empty(batch, nodes, heads, dv, dtype=value.dtype, device=query.device)
    bits = topology.bits.contiguous()
    gate_strides = (0, 0, 0) if z is None else z.stride()[:3]
    with torch.cuda.device_of(query):
        _gated_delta_tree[(heads * (dv // config.block_values), batch)](
            query, key, value, a, b, A_log, dt_bias, state, bits, z, norm_weight, output, *stash,
            nodes, bits.shape[-1], dk**-0.5, eps,
            *query.stride()[:3], *key.stride()[:3], *value.stride()[:3], *a.stride(), *b.stride(), *state.stride()[:3],
            *gate_strides, *stash.keys.stride()[:3], *stash.updates.stride()[:3], *stash.decay.stride()[:2],
            HEADS=heads, GROUPS=heads // key_heads, DK=dk, DV=dv,
            BT=config.block_nodes, BV=config.block_values, BK=config.block_keys,
            BLOCKS=triton.cdiv(nodes, config.block_nodes), SOLVE=config.solve, INVERT=config.invert, READ=config.read,
            STATE_READ="ieee" if query.dtype == torch.float32 else "tf32", num_warps=config.warps,
        )  # fmt: skip
    return output, stash


def _check(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    state: Tensor,
    config: GatedDeltaConfig,
    z: Tensor | None,
    norm_weight: Tensor | None,
) -> None:
    """Raise ValueError on what the kernel would read wrongly."""
    dk, dv = query.shape[-1], value.shape[-1]
    rows = {"query": query, "key": key, "value": value, "state": state} | ({} if z is None else {"z": z})
    for name, x in rows.items():
        if x.stride(-1) != 1:
            raise ValueError(f"Found {name} with stride {x.stride(-1)} in its last axis; expected contiguous vectors.")
    if not query.dtype == key.dtype == value.dtype:
        raise ValueError(f"Found query, key, value in {query.dtype}, {key.dtype}, {value.dtype}; expected one dtype.")
    if state.dtype != torch.float32:
        raise ValueError(f"Found a state in {state.dtype}; expected float32: rounding it makes committed states drift.")
    if config.block_nodes not in (16, 32, 64) or dk % config.block_keys or dv % config.block_values:
        raise ValueError(f"Found {config} for dk={dk}, dv={dv}; expected 16, 32 or 64 nodes and columns dividing them.")
    if (z is None) != (norm_weight is None) or (z is not None and config.block_values != dv):
        raise ValueError(
            f"Found z={z is not None}, norm_weight={norm_weight is not None}, block_values={config.block_values}; "
            f"expected both or neither, and with them block_values={dv}."
        )
