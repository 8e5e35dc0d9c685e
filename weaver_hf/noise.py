"""Counter-based Gumbel noise: a draw depends on seed, position and token alone, never on how it was computed.

The generator is Philox-4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC'11) in plain integer
operations, so that CPU and GPU give the same bits and a step that draws can be captured. Adding Gumbel noise to
log-probabilities and taking the largest sum is a draw from them; a drafter that knows the noise can guess that draw.
"""

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from weaver_kernels.dispatch import use_triton

__all__ = ["GumbelField", "gumbel", "philox", "row_seeds"]

_ROUNDS = 10
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_LOW = 0xFFFFFFFF
_CHUNK = 1 << 20  # counters at once: eight intermediates of 8 MiB each, whatever the vocabulary
_CHUNK_CPU = 1 << 15  # these stay in a core's cache

Words = tuple[Tensor, Tensor, Tensor, Tensor]


def philox(counter: Words, key: tuple[Tensor, Tensor]) -> Words:
    """Four words of 32 random bits for each counter.

    Args:
        counter, key: int64 tensors of words below 2**32, broadcast against each other.

    Returns:
        int64, below 2**32.
    """
    (a, b, c, d), (left, right) = counter, key
    for _ in range(_ROUNDS):
        # The product of two 32-bit words fills 64 bits: it wraps into the sign, which the mask drops again.
        first, second = a * _MULTIPLIERS[0], c * _MULTIPLIERS[1]
        a, b = (second >> 32 & _LOW) ^ b ^ left, second & _LOW
        c, d = (first >> 32 & _LOW) ^ d ^ right, first & _LOW
        left, right = left + _KEY_STEPS[0] & _LOW, right + _KEY_STEPS[1] & _LOW
    return a, b, c, d


def gumbel(seeds: Tensor, positions: Tensor, vocab_size: int) -> Tensor:
    """Standard Gumbel noise of every token.

    One block of Philox serves four neighbouring tokens: key = seed, counter = (token // 4, position, 0). The uniforms
    have 32 bits and never are 0 or 1; the logarithms are taken in fp64, because fp32 ones round differently on
    different devices, and even inside and at the end of one vectorised loop.

    Args:
        seeds: int64 `[B]`, not negative.
        positions: int64 `[B, P]`, of the tokens to be drawn in the unpadded text.
        vocab_size: `V`.

    Returns:
        fp32 `[B, P, V]`.
    """
    if use_triton(positions):
        from weaver_kernels.gumbel import gumbel as kernel  # Triton is asked for where it is used

        with torch.cuda.device_of(positions):
            return kernel(seeds, positions, vocab_size)
    batch, count = positions.shape
    blocks = -(-vocab_size // 4)
    out = torch.empty(batch, count, 4 * blocks, device=positions.device)
    where, seed = positions[..., None], seeds[:, None, None]
    width = max(1, (_CHUNK_CPU if out.device.type == "cpu" else _CHUNK) // max(1, batch * count))
    for start in range(0, blocks, width):
        block = torch.arange(start, min(start + width, blocks), device=positions.device)
        words = philox((block, where & _LOW, where >> 32, torch.zeros_like(where)), (seed & _LOW, seed >> 32))
        uniform = (torch.stack(words, -1).flatten(-2).double() + 0.5) * 2.0**-32
        out[..., 4 * start : 4 * start + uniform.shape[-1]] = -uniform.log_().neg_().log_()
    return out[..., :vocab_size]


def row_seeds(seed: int, rows: int, device: torch.device | str | None = None) -> Tensor:
    """Seeds of the rows of one call, int64 `[rows]`: row `i` gets the same whatever the number of rows.

    The counter's last word sets these blocks apart from those of `gumbel`.
    """
    row, one = torch.arange(rows, device=device), torch.ones((), dtype=torch.long, device=device)
    low, high, _, _ = philox((row, 0 * one, 0 * one, one), (one * (seed & _LOW), one * (seed >> 32 & _LOW)))
    return (high >> 1) << 32 | low


@dataclass
class GumbelField:
    """The noise from one position of each text on, kept once computed: a step's draft and its acceptance share it.

    Attributes:
        seeds: int64 `[B]`.
        position: int64 `[B]`, index in the unpadded text of the next token, which the choice at the root decides. The
            choice at a node of depth `d` decides the token at `position + d`.
    """

    seeds: Tensor
    position: Tensor
    _rows: Tensor | None = field(default=None, repr=False)

    def rows(self, count: int, vocab_size: int) -> Tensor:
        """The noise of the next `count` positions, fp32 `[B, count, V]`; nodes of one depth share a row."""
        known = 0 if self._rows is None else self._rows.shape[1]
        if known < count:
            ahead = torch.arange(known, count, device=self.position.device)
            new = gumbel(self.seeds, self.position[:, None] + ahead, vocab_size)
            self._rows = new if self._rows is None else torch.cat([self._rows, new], 1)
        assert self._rows is not None
        return self._rows[:, :count]

    def advance(self, count: int) -> "GumbelField":
        """The field behind `count` more tokens; what is known of its noise goes on with it."""
        rows = None if self._rows is None else self._rows[:, count:]
        return replace(self, position=self.position + count, _rows=rows)
