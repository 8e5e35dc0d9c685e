"""What stands around the matrices of a decoder layer, in plain torch: the contract of `fused`, operation by operation.

The roundings are those of transformers' Qwen3.5 modules, so in bf16 only the order of sums may differ.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["gated_rms_norm", "qk_norm_rope", "rms_norm", "silu_mul"]


def rms_norm(
    x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None, plus_one: bool = True
) -> tuple[Tensor, Tensor]:
    """RMS norm over the last axis of `x`, or of `x + residual`, computed in fp32.

    Args:
        x: `[..., H]`; residual: the same shape and dtype, or None.
        weight: `[H]`, the factor minus one (Qwen3.5, Gemma), or the factor itself (Llama) with `plus_one=False`.

    Returns:
        The normed rows, and `x + residual` (`x` itself without a residual).
    """
    total = x if residual is None else x + residual
    work = total.float()
    work = work * torch.rsqrt(work.pow(2).mean(-1, keepdim=True) + eps)
    if plus_one:
        return (work * (1.0 + weight.float())).to(x.dtype), total
    return weight * work.to(x.dtype), total


def gated_rms_norm(x: Tensor, z: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`weight * norm(x) * silu(z)` over the last axis, the norm before the gate, as Qwen3.5's Gated DeltaNet ends.

    Args:
        x, z: `[B, T, H, D]`; weight: `[D]`.

    Returns:
        `[B, T, H, D]` in the dtype of `x`.
    """
    work = x.float()
    work = work * torch.rsqrt(work.pow(2).mean(-1, keepdim=True) + eps)
    return (weight * work.to(x.dtype) * F.silu(z.float())).to(x.dtype)


def silu_mul(gate_up: Tensor) -> Tensor:
    """`silu(gate) * up` of `[..., 2 * I]`, the gate first: `[..., I]`."""
    gate, up = gate_up.chunk(2, -1)
    return F.silu(gate) * up


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
) -> Tensor:
    """RMS norm of every head of q and k (weights minus one), rotary positions, and the nodes' rows into the KV buffers.

    Args:
        q: `[B, T, Hq, D]`; k, v: `[B, T, Hkv, D]`.
        q_weight, k_weight: `[D]`.
        cos, sin: `[B, T, R]` in the dtype of q; the first `R <= D` entries of a head are rotated, half against half.
        key_cache, value_cache: `[B, Hkv, S, D]`; k and v of the nodes are written at slots `lens[b] + node`.
        lens: int64 `[B]`; `lens + T` must not exceed S.

    Returns:
        The rotated queries `[B, Hq, T, D]`.
    """
    slots = lens[:, None] + torch.arange(q.shape[1], device=lens.device)
    place = slots[:, None, :, None].expand(-1, k.shape[2], -1, k.shape[3])  # [B, Hkv, T, D]
    key_cache.scatter_(2, place, _rotated(rms_norm(k, k_weight, eps)[0].transpose(1, 2), cos, sin))
    value_cache.scatter_(2, place, v.transpose(1, 2))
    return _rotated(rms_norm(q, q_weight, eps)[0].transpose(1, 2), cos, sin)


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """`x [B, H, T, D]`, its first entries turned by the angles of `cos` and `sin`."""
    turned, rest = x[..., : cos.shape[-1]], x[..., cos.shape[-1] :]
    first, second = turned.chunk(2, -1)
    turned = turned * cos[:, None] + torch.cat([-second, first], -1) * sin[:, None]
    return torch.cat([turned, rest], -1)
