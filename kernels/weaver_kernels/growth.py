# mypy: allow-untyped-defs
"""Best-first growth of trees by an adapter's scores: one launch a round beside the adapter's own (`adapter_step`).

`expand` scores the candidates of each node's next depth, keeps the best as cells of the frontier, and
makes nodes of the round's best cells: the programs of one row count themselves in, and the last one, which sees the
scores of all, does what needs them together. `keep_best` prunes nodes and cells to a budget.

The rules are those of `weaver_hf.proposal.conditional.grow` with `prune=True`: of equal scores the lower index comes
first, a child never scores above its parent, a leaf at the last depth need not be a node to be kept. A candidate whose
score is no number is as if it were not there.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .adapter_step import EPS

__all__ = ["Growth", "Pool", "expand", "expand_scored", "keep_best", "start"]

SCORE = {"BLOCK_N": 512, "num_warps": 4}


class Growth(NamedTuple):
    """Trees that grow: `M` nodes, of which rounds fill one slice after another, and `C` cells of each.

    Attributes:
        nodes: int64 `[3, B, M]`: token, parent and depth. Node 0 is the anchor.
        node_scores: fp32 `[B, M]`, -inf where a round found no cell to make a node of.
        paths: int32 `[B, M, D]`, the slot of a node's proper ancestor at each depth above its own.
        cell_scores: fp32 `[B, M * C]`, -inf where taken or where there is no candidate.
        cell_ranks: int32 `[B, M * C]`, places in the pool of the depth behind the node's.
        arrived: int32 `[B]`, programs that have scored in this round.
    """

    nodes: Tensor
    node_scores: Tensor
    paths: Tensor
    cell_scores: Tensor
    cell_ranks: Tensor
    arrived: Tensor

    @property
    def children(self) -> int:
        return self.cell_scores.shape[1] // self.node_scores.shape[1]


class Pool(NamedTuple):
    """The candidates of a block, and how their scores become log-probabilities.

    Attributes:
        token_ids: int64 `[B, D, K]`; logits: fp32 `[B, D, K]`, the drafter's own.
        gumbels: fp32 `[B, D, K]`, the noise of the candidates; None where the draft is not coupled.
        scales: fp32 `[2, D]`, temperatures and taus.
        top_k, top_p, min_p: filters of the pool before the noise is added; None leaves one out.
    """

    token_ids: Tensor
    logits: Tensor
    scales: Tensor
    gumbels: Tensor | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None


def start(anchors: Tensor, slots: int, depths: int, children: int) -> Growth:
    """Trees of the anchors alone, int64 `[B, 1]`, with room for `slots` nodes of `children` cells each."""
    batch, device = len(anchors), anchors.device
    nodes = torch.zeros(3, batch, slots, dtype=torch.long, device=device)
    nodes[0, :, :1] = anchors
    cells = batch, slots * children
    return Growth(
        nodes,
        torch.zeros(batch, slots, device=device),
        torch.empty(batch, slots, depths, dtype=torch.int32, device=device),
        torch.empty(cells, device=device),  # a round writes its nodes' cells before anybody reads them
        torch.empty(cells, dtype=torch.int32, device=device),
        torch.zeros(batch, dtype=torch.int32, device=device),
    )


# ---- scores, cells and the next nodes --------------------------------------------------------------------------------


@triton.jit
def _log_softmax(x):
    shifted = x - tl.max(x, 1)[:, None]
    return shifted - tl.log(tl.sum(tl.exp(shifted), 1))[:, None]


@triton.jit
def _filtered(x, top_k, top_p, min_p, K: tl.constexpr, TOP_K: tl.constexpr, TOP_P: tl.constexpr, MIN_P: tl.constexpr):
    """Transformers' warpers on rows of a pool, in their order; of equal scores at a boundary all are kept."""
    top = tl.max(x, 1)[:, None]
    if TOP_K or TOP_P:
        place = tl.arange(0, K)[None, :]
        line = tl.sort(x, 1, descending=True)
        if TOP_K:
            threshold = tl.sum(tl.where(place == top_k - 1, line, 0.0), 1)[:, None]
            x = tl.where(x >= threshold, x, float("-inf"))
            line = tl.where(line >= threshold, line, float("-inf"))
        if TOP_P:
            weight = tl.exp(line - top)
            heavier = tl.cumsum(weight, 1) - weight  # than this one
            kept = (place == 0) | (heavier < top_p * tl.sum(weight, 1)[:, None])
            x = tl.where(x >= tl.min(tl.where(kept, line, float("inf")), 1)[:, None], x, float("-inf"))
    if MIN_P:
        x = tl.where((tl.exp(x - top) >= min_p) | (x == top), x, float("-inf"))
    return x


@triton.jit
def _advance(
    row, scores, pool_ids, gumbels, scales, nodes, node_scores, paths, cell_scores, cell_ranks, inputs, positions,
    next_inputs, slots, depths, pool, first, rank, top_k, top_p, min_p,
    W: tl.constexpr, NEXT: tl.constexpr, CHILDREN: tl.constexpr, SCORED: tl.constexpr, TOP_K: tl.constexpr,
    TOP_P: tl.constexpr, MIN_P: tl.constexpr, W_PAD: tl.constexpr, K_PAD: tl.constexpr, C_PAD: tl.constexpr,
    CELLS: tl.constexpr, NEXT_PAD: tl.constexpr, D_PAD: tl.constexpr,
):  # fmt: skip
    """Cells of a round's nodes, and the next round's nodes, of one row."""
    batch = tl.num_programs(2)
    tokens = nodes + row * slots
    parents, node_depths = tokens + batch * slots, tokens + 2 * batch * slots
    node_scores += row * slots
    cell_scores += row * slots * CHILDREN
    cell_ranks += row * slots * CHILDREN
    paths += row * slots * depths

    # Log-probabilities over the pool.
    w, k = tl.arange(0, W_PAD), tl.arange(0, K_PAD)
    depth = tl.load(node_depths + first + w, mask=w < W, other=0)
    path = tl.load(node_scores + first + w, mask=w < W, other=float("-inf"))
    at_depth = tl.minimum(depth, depths - 1)
    real = (w < W)[:, None] & (k < pool)[None, :]
    x = tl.load(scores + (row * W + w[:, None]) * pool + k[None, :], mask=real, other=float("-inf"))
    x = tl.where((w < W)[:, None], x, 0.0)  # rows of padding stay numbers
    if not SCORED:
        warmth = tl.load(scales + at_depth)[:, None]
        x = tl.div_rn(x, warmth + tl.zeros_like(x))
        x = _log_softmax(_filtered(x, top_k, top_p, min_p, K_PAD, TOP_K, TOP_P, MIN_P))
        if gumbels is not None:
            noise = gumbels + (row * depths + at_depth[:, None]) * pool + k[None, :]
            tau = tl.load(scales + depths + at_depth)[:, None]
            x = tl.div_rn(x + tl.load(noise, mask=real, other=0.0), tau + tl.zeros_like(x))
            x = _log_softmax(x)
        x = tl.minimum(x, 0.0)
    x = tl.where(x == x, x, float("-inf"))

    # The best children of each.
    c = tl.arange(0, C_PAD)
    edge = tl.full([W_PAD, C_PAD], float("-inf"), tl.float32)
    ranks = tl.zeros([W_PAD, C_PAD], tl.int32)
    for child in range(CHILDREN):
        value, candidate = tl.max(x, 1, return_indices=True, return_indices_tie_break_left=True)
        edge = tl.where((c == child)[None, :], value[:, None], edge)
        ranks = tl.where((c == child)[None, :], candidate[:, None], ranks)
        x = tl.where(k[None, :] == candidate[:, None], float("-inf"), x)
    reached = tl.minimum(path[:, None] + edge, path[:, None])
    alive = (depth < depths) & (path > float("-inf"))
    cell = (first + w[:, None]) * CHILDREN + c[None, :]
    mask = (w < W)[:, None] & (c < CHILDREN)[None, :]
    tl.store(cell_scores + cell, tl.where(alive[:, None], reached, float("-inf")), mask=mask)
    tl.store(cell_ranks + cell, ranks, mask=mask)

    if NEXT > 0:
        # The best open cells become nodes; one at the last depth need not be a node to be kept.
        tl.debug_barrier()
        cell = tl.arange(0, CELLS)
        filled = cell < (first + W) * CHILDREN
        open_scores = tl.load(cell_scores + cell, mask=filled, other=float("-inf"))
        leaf = tl.load(node_depths + cell // CHILDREN, mask=filled, other=0) + 1 >= depths
        open_scores = tl.where(leaf, float("-inf"), open_scores)
        n = tl.arange(0, NEXT_PAD)
        taken = tl.full([NEXT_PAD], float("-inf"), tl.float32)
        chosen = tl.zeros([NEXT_PAD], tl.int32)
        for turn in range(NEXT):
            value, best = tl.max(open_scores, 0, return_indices=True, return_indices_tie_break_left=True)
            taken, chosen = tl.where(n == turn, value, taken), tl.where(n == turn, best, chosen)
            open_scores = tl.where(cell == best, float("-inf"), open_scores)
        found = taken > float("-inf")
        parent = chosen // CHILDREN
        above = tl.load(node_depths + parent, mask=found, other=0)
        candidate = tl.load(cell_ranks + chosen, mask=found, other=0)
        anchor = tl.load(tokens)
        token = tl.load(pool_ids + (row * depths + above) * pool + candidate, mask=found, other=0)
        token, new_depth = tl.where(found, token, anchor), tl.where(found, above + 1, 0)
        slot, made = first + W + n, n < NEXT
        tl.store(cell_scores + chosen, float("-inf"), mask=found)
        tl.store(tokens + slot, token, mask=made)
        tl.store(parents + slot, tl.where(found, parent, 0).to(tl.int64), mask=made)
        tl.store(node_depths + slot, new_depth, mask=made)
        tl.store(node_scores + slot, taken, mask=made)
        d = tl.arange(0, D_PAD)
        higher = found[:, None] & (d[None, :] < above[:, None])
        lineage = tl.load(paths + parent[:, None] * depths + d[None, :], mask=higher, other=0)
        lineage = tl.where(d[None, :] == above[:, None], parent[:, None], lineage)
        tl.store(paths + slot[:, None] * depths + d[None, :], lineage, mask=made[:, None] & (d < depths)[None, :])
        if inputs is not None:
            new_depth = tl.minimum(new_depth, depths - 1)
            for start in range(0, rank, 256):
                column = start + tl.arange(0, 256)
                inside = made[:, None] & (column < rank)[None, :]
                entering = tl.load(inputs + token[:, None] * rank + column[None, :], mask=inside, other=0.0)
                if positions is not None:
                    shift = tl.load(positions + new_depth[:, None] * rank + column[None, :], mask=inside, other=0.0)
                    entering = entering.to(tl.float32) + shift.to(tl.float32)
                line = next_inputs + (row * NEXT + n[:, None]) * rank + column[None, :]
                tl.store(line, entering.to(next_inputs.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["first"])  # it differs from round to round
def _expand_kernel(
    states, norm_weight, norm_bias, rows, pool_ids, logits, gumbels, scales, scores, arrived, nodes, node_scores, paths,
    cell_scores, cell_ranks, inputs, positions, next_inputs, slots, depths, pool, first, rank, width,
    states_row, states_node, rows_row, top_k, top_p, min_p,
    W: tl.constexpr, NEXT: tl.constexpr, CHILDREN: tl.constexpr, SCORED: tl.constexpr, TOP_K: tl.constexpr,
    TOP_P: tl.constexpr, MIN_P: tl.constexpr, W_PAD: tl.constexpr, K_PAD: tl.constexpr, C_PAD: tl.constexpr,
    CELLS: tl.constexpr, NEXT_PAD: tl.constexpr, D_PAD: tl.constexpr,
    EPS: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(2).to(tl.int64)
    last = True
    if not SCORED:
        node, candidate = tl.program_id(1), tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
        depth = tl.load(nodes + (2 * tl.num_programs(2) + row) * slots + first + node)
        at = (row * depths + tl.minimum(depth, depths - 1)) * pool + candidate
        real = candidate < pool
        line = rows + tl.load(pool_ids + at, mask=real, other=0) * rows_row
        state = states + row * states_row + node * states_node
        column = tl.arange(0, BLOCK_N)
        if norm_weight is not None:
            squares = tl.zeros([BLOCK_N], tl.float32)
            for start in range(0, width, BLOCK_N):
                part = tl.load(state + start + column, mask=start + column < width, other=0.0).to(tl.float32)
                squares += part * part
            scale = tl.rsqrt(tl.sum(squares, 0) / width + EPS)
        score = tl.zeros([BLOCK_C], tl.float32)
        for start in range(0, width, BLOCK_N):
            inside = start + column < width
            part = tl.load(state + start + column, mask=inside, other=0.0)
            wide = part.to(tl.float32)
            if norm_weight is not None:
                factor = tl.load(norm_weight + start + column, mask=inside, other=0.0).to(tl.float32)
                shift = tl.load(norm_bias + start + column, mask=inside, other=0.0).to(tl.float32)
                wide = (factor * (wide * scale) + shift).to(part.dtype).to(tl.float32)
            mask = real[:, None] & inside[None, :]
            block = tl.load(line[:, None] + start + column[None, :], mask=mask, other=0.0).to(tl.float32)
            score += tl.sum(block * wide[None, :], 1)
        score += tl.load(logits + at, mask=real, other=0.0)
        tl.store(scores + (row * W + node) * pool + candidate, score, mask=real)
        # Whoever comes last sees what all others of this row have written: each one's stores lie before its arrival.
        tl.debug_barrier()
        before = tl.atomic_add(arrived + row, 1, sem="acq_rel", scope="gpu")
        last = before == tl.num_programs(0) * W - 1
    if last:
        if not SCORED:
            tl.store(arrived + row, 0)
            tl.debug_barrier()
        _advance(
            row, scores, pool_ids, gumbels, scales, nodes, node_scores, paths, cell_scores, cell_ranks, inputs,
            positions, next_inputs, slots, depths, pool, first, rank, top_k, top_p, min_p,
            W, NEXT, CHILDREN, SCORED, TOP_K, TOP_P, MIN_P, W_PAD, K_PAD, C_PAD, CELLS, NEXT_PAD, D_PAD,
        )  # fmt: skip


def expand(
    growth: Growth,
    pool: Pool,
    states: Tensor,
    rows: Tensor,
    first: int,
    next_width: int,
    *,
    norm: tuple[Tensor, Tensor] | None = None,
    inputs: Tensor | None = None,
    positions: Tensor | None = None,
    config: dict[str, int] | None = None,
) -> Tensor | None:
    """Score the candidates behind a round's nodes, keep the best as cells, and make the next round's nodes.

    Args:
        states: `[B, W, n]`, of nodes `first..first + W - 1`; the head's queries, or states that `norm` makes ready for
            folded rows.
        rows: `[V, n]`; a candidate's score is the drafter's logit + its row · the state, summed in fp32.
        next_width: nodes to make; 0 in the last round.
        norm: weight and bias `[n]` of a root-mean-square norm of the states, rounded to their dtype.
        inputs: `[V, r]`, what tokens enter the adapter as; positions: `[D, r]`, added to it by depth, or None.
        config: `BLOCK_C` (candidates a program), `BLOCK_N` and `num_warps`.

    Returns:
        The next nodes' inputs `[B, next_width, r]` where `inputs` are given, otherwise None.
    """
    batch, count, width = states.shape
    scores = torch.empty(batch, count, pool.token_ids.shape[2], device=states.device)
    following = None
    if inputs is not None and next_width:
        following = torch.empty(batch, next_width, inputs.shape[1], dtype=inputs.dtype, device=states.device)
    # Enough programs to fill the card, few enough that a program's rows hide its start.
    block = max(1, min(8, triton.next_power_of_2(count * scores.shape[2]) // 128))
    config = {"BLOCK_C": block, **SCORE, **(config or {})}
    grid = (triton.cdiv(scores.shape[2], config["BLOCK_C"]), count, batch)
    norm_weight, norm_bias = norm or (None, None)
    arguments = [states, norm_weight, norm_bias, rows, pool.token_ids, pool.logits, pool.gumbels, pool.scales]
    strides = states.stride(0), states.stride(1), rows.stride(0)
    _launch(
        grid, growth, pool, arguments, scores, inputs if next_width else None, positions, following, first, width,
        strides, next_width, False, config,
    )  # fmt: skip
    return following


def expand_scored(growth: Growth, token_ids: Tensor, log_probs: Tensor, first: int, next_width: int) -> None:
    """`expand` where somebody else has made the log-probabilities, fp32 `[B, W, K]`, contiguous."""
    pool = Pool(token_ids, log_probs, log_probs)
    arguments = [None, None, None, None, token_ids, None, None, None]
    config = {"BLOCK_C": 1, "BLOCK_N": 1, "num_warps": SCORE["num_warps"]}
    grid = (1, 1, len(token_ids))
    _launch(grid, growth, pool, arguments, log_probs, None, None, None, first, 0, (0, 0, 0), next_width, True, config)


def _launch(
    grid: tuple[int, ...],
    growth: Growth,
    pool: Pool,
    arguments: list[Tensor | None],
    scores: Tensor,
    inputs: Tensor | None,
    positions: Tensor | None,
    following: Tensor | None,
    first: int,
    width: int,
    strides: tuple[int, ...],
    next_width: int,
    scored: bool,
    config: dict[str, int],
) -> None:
    _, slots, depths = growth.paths.shape
    _, count, candidates = scores.shape
    children = growth.children
    top_k = None if pool.top_k is None or pool.top_k >= candidates else pool.top_k
    up: Any = triton.next_power_of_2
    _expand_kernel[grid](
        *arguments, scores, growth.arrived, growth.nodes, growth.node_scores, growth.paths, growth.cell_scores,
        growth.cell_ranks, inputs, positions, following, slots, depths, candidates, first,
        0 if inputs is None else inputs.shape[1], width, *strides, top_k or 0, pool.top_p or 0.0, pool.min_p or 0.0,
        W=count, NEXT=next_width, CHILDREN=children, SCORED=scored,
        TOP_K=top_k is not None, TOP_P=pool.top_p is not None, MIN_P=pool.min_p is not None,
        W_PAD=up(count), K_PAD=up(candidates), C_PAD=up(children), CELLS=up(slots * children),
        NEXT_PAD=up(max(next_width, 1)), D_PAD=up(depths), EPS=EPS, **config,
    )  # fmt: skip


# ---- pruning ---------------------------------------------------------------------------------------------------------


@triton.jit
def _keep_kernel(
    nodes, node_scores, cell_scores, cell_ranks, pool_ids, place, out_tokens, out_parents, out_scores, sizes,
    slots, depths, pool, budget, kept_width,
    CHILDREN: tl.constexpr, ENTRIES: tl.constexpr, OUT: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    batch = tl.num_programs(0)
    tokens = nodes + row * slots
    place += row * slots
    # The list: nodes but the anchor, then all cells.
    entry = tl.arange(0, ENTRIES)
    is_node, cell = entry < slots - 1, entry - (slots - 1)
    is_cell = (cell >= 0) & (cell < slots * CHILDREN)
    score = tl.load(node_scores + row * slots + 1 + entry, mask=is_node, other=float("-inf"))
    open_score = tl.load(cell_scores + row * slots * CHILDREN + cell, mask=is_cell, other=float("-inf"))
    score = tl.where(is_cell, open_score, score)
    score = tl.where(score == 0, 0.0, score)  # -0 sorts as 0
    real = score > float("-inf")
    wanted = tl.minimum(budget, tl.sum(real.to(tl.int32), 0))

    # The score of the last one that is kept, by bisection on the bits; of its equals the first ones are kept.
    bits = score.to(tl.int32, bitcast=True)
    order = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    low = tl.min(order, 0).to(tl.int64)
    high = tl.max(order, 0).to(tl.int64) + 1
    while high - low > 1:
        middle = low + (high - low) // 2
        enough = tl.sum((order >= middle).to(tl.int32), 0) >= wanted
        low, high = tl.where(enough, middle, low), tl.where(enough, high, middle)
    better, equal = order > low, order == low
    missing = wanted - tl.sum(better.to(tl.int32), 0)
    kept = real & (better | (equal & (tl.cumsum(equal.to(tl.int32), 0) <= missing)))

    new = tl.cumsum(kept.to(tl.int32), 0)  # the anchor is 0
    tl.store(place + entry + 1, new, mask=is_node)
    tl.store(place, 0)
    tl.debug_barrier()
    node_parent = tl.load(nodes + (batch + row) * slots + 1 + entry, mask=kept & is_node, other=0).to(tl.int32)
    parent = tl.where(is_node, node_parent, cell // CHILDREN)
    rank = tl.load(cell_ranks + row * slots * CHILDREN + cell, mask=kept & is_cell, other=0)
    depth = tl.load(nodes + (2 * batch + row) * slots + parent, mask=kept, other=0)
    drafted = tl.load(pool_ids + (row * depths + depth) * pool + rank, mask=kept & is_cell, other=0)
    token = tl.where(is_node, tl.load(tokens + 1 + entry, mask=kept & is_node, other=0), drafted)
    above = tl.load(place + parent, mask=kept, other=0)
    tl.store(out_tokens + row * kept_width + new, token, mask=kept)
    tl.store(out_parents + row * kept_width + new, above.to(tl.int64), mask=kept)
    tl.store(out_scores + row * kept_width + new, score, mask=kept)
    n = tl.arange(0, OUT)
    rest = ((n == 0) | (n > wanted)) & (n < kept_width)
    anchor = tl.load(tokens)
    tl.store(out_tokens + row * kept_width + n, anchor + tl.zeros([OUT], tl.int64), mask=rest)
    tl.store(out_parents + row * kept_width + n, tl.where(n == 0, -1, 0).to(tl.int64), mask=rest)
    tl.store(out_scores + row * kept_width + n, tl.where(n == 0, 0.0, float("-inf")), mask=rest)
    tl.store(sizes + row, (wanted + 1).to(tl.int64))


def keep_best(growth: Growth, token_ids: Tensor, budget: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The best `budget` nodes and cells as trees, in one launch.

    Args:
        token_ids: int64 `[B, D, K]`, contiguous.

    Returns:
        `token_ids`, `parents`, `log_probs` `[B, N]` and `sizes [B]` of a token tree, `N` at most `1 + budget`.
    """
    batch, slots, depths = growth.paths.shape
    device, entries = token_ids.device, slots - 1 + growth.cell_scores.shape[1]
    width = 1 + min(budget, entries)
    tokens, parents = torch.empty(2, batch, width, dtype=torch.long, device=device)
    scores, sizes = torch.empty(batch, width, device=device), torch.empty(batch, dtype=torch.long, device=device)
    place = torch.empty(batch, slots, dtype=torch.int32, device=device)
    up: Any = triton.next_power_of_2
    _keep_kernel[(batch,)](
        growth.nodes, growth.node_scores, growth.cell_scores, growth.cell_ranks, token_ids, place, tokens, parents,
        scores, sizes, slots, depths, token_ids.shape[2], budget, width,
        CHILDREN=growth.children, ENTRIES=up(entries), OUT=up(width), num_warps=8,
    )  # fmt: skip
    return tokens, parents, scores, sizes
