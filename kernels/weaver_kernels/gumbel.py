# mypy: allow-untyped-defs
"""Counter-based Gumbel noise in one launch: the draw of a token depends on seed, position and token alone.

One block of Philox-4x32-10 (Salmon et al., SC'11) serves four neighbouring tokens: key = seed, counter = (token // 4,
position, 0). The uniforms have 32 bits and never are 0 or 1. They are integers until they are exact in fp64, so they
are the same bits on every device; the logarithms are taken in fp64 too, because fp32 ones round differently on
different devices.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = ["gumbel"]

BLOCKS = 256  # of four tokens, a program


@triton.jit
def _gumbel_kernel(
    seeds, positions, out, count, vocab_size, seed_stride, row_stride, position_stride, BLOCKS: tl.constexpr
):
    line = tl.program_id(1)  # of B * P
    row = line // count
    seed = tl.load(seeds + row * seed_stride).to(tl.int64)
    position = tl.load(positions + row * row_stride + (line % count) * position_stride).to(tl.int64)
    block = tl.program_id(0) * BLOCKS + tl.arange(0, BLOCKS)
    zero = tl.zeros([BLOCKS], tl.uint32)
    low, high = (position & 0xFFFFFFFF).to(tl.uint32), (position >> 32).to(tl.uint32)
    a, b, c, d = tl.philox(seed, block.to(tl.uint32), zero + low, zero + high, zero)
    words = tl.interleave(tl.interleave(a, c), tl.interleave(b, d))  # a, b, c, d of a block side by side
    uniform = (words.to(tl.float64) + 0.5) * 2.3283064365386963e-10  # 2 ** -32
    noise = -tl.log(-tl.log(uniform))
    token = tl.program_id(0) * (4 * BLOCKS) + tl.arange(0, 4 * BLOCKS)
    at = line.to(tl.int64) * vocab_size + token
    tl.store(out + at, noise.to(tl.float32), mask=token < vocab_size)


def gumbel(seeds: Tensor, positions: Tensor, vocab_size: int, *, config: dict[str, int] | None = None) -> Tensor:
    """Standard Gumbel noise of every token.

    Args:
        seeds: int64 `[B]`, not negative.
        positions: int64 `[B, P]`, of the tokens to be drawn in the unpadded text.
        vocab_size: `V`.
        config: `BLOCKS` (of four tokens, a program) and `num_warps`.

    Returns:
        fp32 `[B, P, V]`.
    """
    batch, count = positions.shape
    out = torch.empty(batch, count, vocab_size, dtype=torch.float32, device=positions.device)
    if out.numel():
        config = {"BLOCKS": BLOCKS, "num_warps": 4, **(config or {})}
        grid = (triton.cdiv(vocab_size, 4 * config["BLOCKS"]), batch * count)
        strides = seeds.stride(0), positions.stride(0), positions.stride(1)
        _gumbel_kernel[grid](seeds, positions, out, count, vocab_size, *strides, **config)
    return out
