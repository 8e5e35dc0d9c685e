# mypy: allow-untyped-defs
"""The target's choice at every node of a tree, without sorting the vocabulary: two launches, capturable.

The first scans all rows in chunks: the best utility (score + noise) of each chunk, and the largest logit of each group
of neighbouring tokens. Without filters that is all. The second takes a program a row and uses two facts:

- the k-th largest of the groups' maxima is at most the k-th largest logit, so that top-k looks into few groups only and
  finds its threshold there by bisection on the bits of the logits;
- all filters keep what lies above a threshold, so the best token of a superset of the kept ones either is kept, and
  then is the choice, or excludes itself and everything below it. Whether top-p keeps it is one sum over the tokens
  above it; the same pass finds the next candidate. Two passes are usual, each over the few groups that reach so high.

Kept are the tokens that transformers' warpers keep, in their order (temperature, top-k, top-p, min-p), but for:
- top-p among equal probabilities at its boundary: all of them are kept, where the stock warper keeps as many as its
  sort puts last (top-k and min-p keep all there too);
- top-p and min-p where a cumulative probability or a ratio lies within fp32 rounding of the bound: the sums run in
  another order (theirs is a sorted cumulative sum, ours a sum of what lies above).
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = ["choose_tokens"]

SCAN = {"CHUNK": 4096, "num_warps": 4}
CHOOSE = {"TILE": 32, "num_warps": 8}
GROUP = 256  # neighbouring tokens that share a maximum
TRAILING_ZEROS = {torch.bfloat16: 16, torch.float16: 13, torch.float32: 0}  # bits of the logits' fp32 images


@triton.jit
def _score(x, temperature, SCALING: tl.constexpr):
    """What TemperatureLogitsWarper makes of logits. torch multiplies by the reciprocal on CUDA, and divides on CPUs."""
    if SCALING == "divide":
        x = tl.div_rn(x, tl.zeros_like(x) + temperature)
    if SCALING == "multiply":
        x = x * tl.div_rn(1.0, temperature)
    return x


@triton.jit
def _order(x, ZEROS: tl.constexpr):
    """Integers that sort as the floats do, without the bits that are 0 in all of them."""
    bits = x.to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)) >> ZEROS


@triton.jit
def _scan_kernel(
    logits, depths, gumbels, best, token, mass, peaks, nodes, vocab_size, chunks, groups, temperature,
    logits_row, logits_node, depths_row, depths_node, gumbels_row, gumbels_depth,
    CHUNK: tl.constexpr, GROUP: tl.constexpr, SCALING: tl.constexpr, FILTERED: tl.constexpr, MASS: tl.constexpr,
):  # fmt: skip
    chunk, line = tl.program_id(0), tl.program_id(1).to(tl.int64)
    row, node = line // nodes, line % nodes
    at = chunk * CHUNK + tl.arange(0, CHUNK)
    inside = at < vocab_size
    x = tl.load(logits + row * logits_row + node * logits_node + at, mask=inside, other=float("-inf")).to(tl.float32)
    score = _score(x, temperature, SCALING)
    utility = score
    if gumbels is not None:
        depth = tl.load(depths + row * depths_row + node * depths_node)
        utility += tl.load(gumbels + row * gumbels_row + depth * gumbels_depth + at, mask=inside, other=0.0)
    value, place = tl.max(utility, 0, return_indices=True, return_indices_tie_break_left=True)
    tl.store(best + line * chunks + chunk, value)
    tl.store(token + line * chunks + chunk, chunk * CHUNK + place)
    if MASS:
        top = tl.max(score, 0)
        tl.store(mass + line * chunks + chunk, tl.sum(tl.where(inside, tl.exp(score - top), 0.0), 0))
    if FILTERED:
        group = chunk * (CHUNK // GROUP) + tl.arange(0, CHUNK // GROUP)
        highest = tl.max(tl.reshape(x, [CHUNK // GROUP, GROUP]), 1)
        tl.store(peaks + line * groups + group, highest, mask=group < groups)


@triton.jit
def _kept_groups(keep, groups_list, GROUPS: tl.constexpr):
    """Write the numbers of the groups to keep, in order; how many."""
    tl.debug_barrier()  # nobody still reads the list before
    place = tl.cumsum(keep.to(tl.int32), 0) - 1
    tl.store(groups_list + place, tl.arange(0, GROUPS), mask=keep)
    tl.debug_barrier()
    return tl.sum(keep.to(tl.int32), 0)


@triton.jit
def _tile(logits, groups_list, first, count, vocab_size, TILE: tl.constexpr, GROUP: tl.constexpr):
    """The tokens of `TILE` listed groups from the `first` on, and their logits, -inf where there is none."""
    entry = first + tl.arange(0, TILE)
    group = tl.load(groups_list + entry, mask=entry < count, other=0)
    token = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    inside = (entry < count)[:, None] & (token < vocab_size)
    return token, tl.load(logits + token, mask=inside, other=float("-inf")).to(tl.float32)


@triton.jit
def _best_of(utility, token, value, choice, TILE: tl.constexpr):
    """The better of a choice and the best of a tile; the earlier of equals."""
    by_group, place = tl.max(utility, 1, return_indices=True, return_indices_tie_break_left=True)
    rival, group = tl.max(by_group, 0, return_indices=True, return_indices_tie_break_left=True)
    row = tl.arange(0, TILE) == group
    first = tl.sum(tl.where(row, tl.min(token, 1) + place, 0), 0)  # tokens of a group lie side by side
    return tl.maximum(value, rival), tl.where(rival > value, first, choice)


@triton.jit
def _choose_kernel(
    logits, depths, gumbels, best, tokens, mass, peaks, groups_list, out, nodes, vocab_size, chunks, groups,
    temperature, top_k, top_p, min_p,
    logits_row, logits_node, depths_row, depths_node, gumbels_row, gumbels_depth,
    CHUNKS: tl.constexpr, GROUPS: tl.constexpr, GROUP: tl.constexpr, TILE: tl.constexpr, ZEROS: tl.constexpr,
    SCALING: tl.constexpr, TOP_K: tl.constexpr, TOP_P: tl.constexpr, MIN_P: tl.constexpr,
):  # fmt: skip
    line = tl.program_id(0).to(tl.int64)
    row, node = line // nodes, line % nodes
    chunk = tl.arange(0, CHUNKS)
    utility = tl.load(best + line * chunks + chunk, mask=chunk < chunks, other=float("-inf"))
    value, place = tl.max(utility, 0, return_indices=True, return_indices_tie_break_left=True)
    choice = tl.load(tokens + line * chunks + place)
    if TOP_K or TOP_P or MIN_P:
        logits += row * logits_row + node * logits_node
        depth = tl.load(depths + row * depths_row + node * depths_node)
        gumbels += row * gumbels_row + depth * gumbels_depth
        groups_list += line * groups
        group = tl.arange(0, GROUPS)
        peak = tl.load(peaks + line * groups + group, mask=group < groups, other=float("-inf"))
        top = _score(tl.max(peak, 0), temperature, SCALING)
        total = 0.0
        threshold = float("-inf")  # of the scores that top-k keeps
        if TOP_K:
            # The k-th largest logit lies between the k-th largest peak (if there are as many) and the largest.
            order = _order(peak, ZEROS)
            low = tl.min(order, 0).to(tl.int64) * 0 - (1 << (31 - ZEROS))  # below everything
            high = tl.max(order, 0).to(tl.int64) + 1
            while high - low > 1:
                middle = low + (high - low) // 2
                enough = tl.sum((order >= middle).to(tl.int32), 0) >= top_k
                low, high = tl.where(enough, middle, low), tl.where(enough, high, middle)
            count = _kept_groups((group < groups) & (order >= low), groups_list, GROUPS)
            high = tl.max(order, 0).to(tl.int64) + 1
            while high - low > 1:
                middle = low + (high - low) // 2
                reached = 0
                for first in range(0, count, TILE):
                    _, x = _tile(logits, groups_list, first, count, vocab_size, TILE, GROUP)
                    reached += tl.sum(tl.sum((_order(x, ZEROS) >= middle).to(tl.int32), 1), 0)
                low, high = tl.where(reached >= top_k, middle, low), tl.where(reached >= top_k, high, middle)
            bits = ((low << ZEROS) | tl.where(low < 0, (1 << ZEROS) - 1, 0)).to(tl.int32)  # back from `_order`
            bits ^= (bits >> 31) & 0x7FFFFFFF
            threshold = _score(bits.to(tl.float32, bitcast=True), temperature, SCALING)
        elif TOP_P:
            part = tl.load(mass + line * chunks + chunk, mask=chunk < chunks, other=0.0)
            per_chunk: tl.constexpr = GROUPS // CHUNKS
            crest = _score(tl.max(tl.reshape(peak, [CHUNKS, per_chunk]), 1), temperature, SCALING)
            total = tl.sum(tl.where(crest > float("-inf"), part * tl.exp(crest - top), 0.0), 0)
        if TOP_K or MIN_P:
            scores = _score(peak, temperature, SCALING)
            high_enough = (group < groups) & (scores >= threshold)
            if MIN_P and not TOP_K:  # what min-p drops counts for top-p
                high_enough = high_enough & ((tl.exp(scores - top) >= min_p) | (scores == top))
            count = _kept_groups(high_enough, groups_list, GROUPS)
            value, choice = float("-inf"), tl.min(tl.where(scores == top, group, GROUPS), 0) * GROUP
            for first in range(0, count, TILE):
                token, x = _tile(logits, groups_list, first, count, vocab_size, TILE, GROUP)
                score = _score(x, temperature, SCALING)
                weight = tl.exp(score - top)
                kept = (score >= threshold) & (x > float("-inf"))
                if TOP_K:
                    total += tl.sum(tl.sum(tl.where(kept, weight, 0.0), 1), 0)
                if MIN_P:
                    kept = kept & ((weight >= min_p) | (score == top))
                noise = tl.load(gumbels + token, mask=kept, other=0.0)
                value, choice = _best_of(tl.where(kept, score + noise, float("-inf")), token, value, choice, TILE)
        if TOP_P:
            # The choice so far is the best of a superset of what is kept.
            searching = line >= 0
            while searching:
                pivot = _score(tl.load(logits + choice).to(tl.float32), temperature, SCALING)
                above = _score(peak, temperature, SCALING) > pivot
                count = _kept_groups((group < groups) & above, groups_list, GROUPS)
                heavier = 0.0
                value, rival = float("-inf"), choice
                for first in range(0, count, TILE):
                    token, x = _tile(logits, groups_list, first, count, vocab_size, TILE, GROUP)
                    score = _score(x, temperature, SCALING)
                    heavier += tl.sum(tl.sum(tl.where(score > pivot, tl.exp(score - top), 0.0), 1), 0)
                    noise = tl.load(gumbels + token, mask=score > pivot, other=0.0)
                    utility2 = tl.where(score > pivot, score + noise, float("-inf"))
                    value, rival = _best_of(utility2, token, value, rival, TILE)
                searching = (heavier >= top_p * total) & (count > 0)
                choice = tl.where(searching, rival, choice)
    tl.store(out + line, choice.to(tl.int64))


def choose_tokens(
    logits: Tensor,
    depths: Tensor,
    gumbels: Tensor | None = None,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    *,
    config: dict[str, dict[str, int]] | None = None,
) -> Tensor:
    """The token with the largest sum of filtered score and noise at every node; the lowest of equal ones.

    Args:
        logits: `[B, N, V]`, bf16, fp16 or fp32, the last dimension contiguous.
        depths: int64 `[B, N]`, the row of the noise that decides at each node.
        gumbels: fp32 `[B, P, V]`; None for greedy decoding, to which no filter makes a difference: the best token is
            always kept.
        temperature, top_k, top_p, min_p: of transformers' warpers; None leaves a filter out.
        config: `{"scan": ..., "choose": ...}`, overrides of `SCAN` and `CHOOSE`.

    Returns:
        int64 `[B, N]`.
    """
    batch, nodes, vocab_size = logits.shape
    device = logits.device
    scan, choose = ({**base, **(config or {}).get(name, {})} for name, base in (("scan", SCAN), ("choose", CHOOSE)))
    top_k = None if gumbels is None or top_k is None or top_k >= vocab_size else top_k
    top_p = None if gumbels is None or top_p is None or top_p >= 1 else top_p
    min_p = None if gumbels is None else min_p or None
    filtered = not (top_k is None and top_p is None and min_p is None)
    lines, chunks, groups = batch * nodes, triton.cdiv(vocab_size, scan["CHUNK"]), triton.cdiv(vocab_size, GROUP)
    out = torch.empty(batch, nodes, dtype=torch.long, device=device)
    best, mass = torch.empty(2, lines, chunks, device=device)
    token = torch.empty(lines, chunks, dtype=torch.int32, device=device)
    peaks = torch.empty(lines if filtered else 0, groups, device=device)
    groups_list = torch.empty_like(peaks, dtype=torch.int32)
    noise_strides = (0, 0) if gumbels is None else (gumbels.stride(0), gumbels.stride(1))
    strides = (logits.stride(0), logits.stride(1), depths.stride(0), depths.stride(1), *noise_strides)
    padded = triton.next_power_of_2(chunks)
    scaling = "none" if temperature == 1 else "multiply" if logits.is_cuda else "divide"
    shared: dict[str, Any] = {"GROUP": GROUP, "SCALING": scaling}
    with_mass = top_p is not None and top_k is None
    _scan_kernel[(chunks, lines)](
        logits, depths, gumbels, best, token, mass, peaks, nodes, vocab_size, chunks, groups, temperature, *strides,
        FILTERED=filtered, MASS=with_mass, **shared, **scan,
    )  # fmt: skip
    _choose_kernel[(lines,)](
        logits, depths, gumbels, best, token, mass, peaks, groups_list, out, nodes, vocab_size, chunks, groups,
        temperature, top_k or 0, 0.0 if top_p is None else top_p, min_p or 0.0, *strides,
        CHUNKS=padded, GROUPS=padded * (scan["CHUNK"] // GROUP), ZEROS=TRAILING_ZEROS[logits.dtype],
        TOP_K=top_k is not None, TOP_P=top_p is not None, MIN_P=min_p is not None, **shared, **choose,
    )  # fmt: skip
    return out
