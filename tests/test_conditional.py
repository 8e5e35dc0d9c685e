"""Best-first growth against a slow search with a heap, on arbitrary conditional scores."""

import heapq
import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from weaver_hf.drafter import DraftBlock
from weaver_hf.proposal import DraftContext, MarginalBuilder, PaperBuilder, WeaverBuilder
from weaver_hf.proposal.conditional import grow, keep_best

ANCHOR = 999


class RandomScores:
    """Log-probabilities that depend on a node's whole path, the same for the same path however it is asked for."""

    def __init__(self, pool, seed, ties=False):
        self.pool, self.seed, self.ties = pool, seed, ties
        self.paths: list[dict[int, tuple[int, ...]]] = []
        self.asked: list[int] = []

    def of(self, row, path):
        generator = torch.Generator().manual_seed(hash((self.seed, row, path)) % 2**31)
        scores = torch.randn(self.pool, generator=generator) * 2
        if self.ties:  # powers of two: sums of logarithms stay equal or apart
            return -torch.randint(0, 3, (self.pool,), generator=generator).float()
        return scores.log_softmax(-1)

    def __call__(self, token_ids, depths, ancestors, first):
        """The builder's protocol; the path of a node is read off the ancestors' slots."""
        batch, width = token_ids.shape
        if not self.paths:
            self.paths = [{} for _ in range(batch)]
        self.asked.append(width)
        out = torch.zeros(batch, width, self.pool)
        for row in range(batch):
            for i in range(width):
                slots = [s for s in ancestors[row, i].nonzero()[:, 0].tolist() if s != first + i]
                above = self.paths[row][slots[-1]] if slots else ()
                path = (*above, int(token_ids[row, i]))
                assert len(path) - 1 == int(depths[row, i])
                self.paths[row][first + i] = path
                out[row, i] = self.of(row, path)
        return out


def candidates(batch, depths, pool):
    return (100 * torch.arange(depths)[:, None] + torch.arange(pool)).expand(batch, -1, -1)


def heap_tree(scores, row, depths, pool, budget, widths, children, prune):
    """The search, slow and obvious: (path below the anchor, score) of every kept node.

    One heap of open candidates by (score, owner's number, rank); a round pops, then scores what it popped.
    """
    heap, nodes, number = [], [], 0  # nodes: (path, score, number)

    def publish(path, score, number):
        log_q = scores.of(row, (ANCHOR, *path)).tolist()
        ranked = sorted(range(pool), key=lambda k: (-log_q[k], k))[:children]
        for rank, k in enumerate(ranked):
            total = float(min(torch.tensor(score) + torch.tensor(log_q[k]), torch.tensor(score)))
            heapq.heappush(heap, (-total, number, rank, (*path, 100 * len(path) + k)))

    publish((), 0.0, 0)
    set_aside = []
    for turn, width in enumerate(widths[1:], 1):
        batch, skipped = [], []
        while heap and len(batch) < width:
            entry = heapq.heappop(heap)
            (skipped if prune and len(entry[3]) == depths else batch).append(entry)
        set_aside += skipped
        for place, (negative, _, _, path) in enumerate(batch):
            nodes.append((path, -negative, number + 1 + place))
        if turn + 1 < len(widths) or prune:
            for place, (negative, _, _, path) in enumerate(batch):
                if len(path) < depths:
                    publish(path, -negative, number + 1 + place)
        number += width
    if not prune:
        return [(path, score) for path, score, _ in nodes]
    rest = sorted((owner, rank, path, -negative) for negative, owner, rank, path in heap + set_aside)
    listed = [(path, score) for path, score, _ in nodes] + [(path, score) for _, _, path, score in rest]
    order = sorted(range(len(listed)), key=lambda i: (-listed[i][1], i))[:budget]
    return [listed[i] for i in sorted(order)]


def nodes_of(tree, row):
    return [
        (tuple(tree.token_ids[row, tree.path(n, row)[1:]].tolist()), float(tree.log_probs[row, n]))
        for n in range(1, int(tree.sizes[row]))
    ]


shapes = st.tuples(st.integers(1, 4), st.integers(1, 6))  # depths, pool


@given(
    st.integers(0, 10_000),
    shapes,
    st.integers(1, 30),
    st.integers(1, 6),
    st.integers(1, 5),
    st.integers(1, 7),
    st.booleans(),
)
def test_grown_and_pruned_trees_equal_the_heaps(seed, shape, budget, rounds, parents, children, ties):
    depths, pool = shape
    anchors = torch.full((2, 1), ANCHOR)
    widths = [1] + [parents] * (rounds - 1)
    scores = RandomScores(pool, seed, ties)
    tree = grow(candidates(2, depths, pool), anchors, scores, budget, widths, children, prune=True).validate()
    assert scores.asked == widths
    assert tree.depth_limit <= depths, "acceptance makes noise for no more depths than there are"
    for row in range(2):
        expected = heap_tree(scores, row, depths, pool, budget, widths, min(children, pool), prune=True)
        assert nodes_of(tree, row) == expected


@given(st.integers(0, 10_000), shapes, st.integers(1, 40), st.booleans())
def test_the_papers_trees_equal_the_heaps(seed, shape, budget, ties):
    depths, pool = shape
    scores = RandomScores(pool, seed, ties)
    builder = PaperBuilder(budget)
    tree = run(builder, scores, depths, pool, batch=2).validate()
    assert sum(builder.widths) == budget + 1
    assert len(scores.asked) == len(builder.widths) - 1 <= max(16, budget), "the last batch is not scored"
    for row in range(2):
        expected = heap_tree(scores, row, depths, pool, budget, builder.widths, min(8, pool), prune=False)
        assert nodes_of(tree, row) == expected


@pytest.mark.parametrize("kind", [WeaverBuilder, PaperBuilder])
def test_a_budget_of_0_is_the_root_alone(kind):
    tree = run(kind(0), RandomScores(5, 0), depths=3, pool=5, batch=2).validate()
    assert tree.token_ids.tolist() == [[ANCHOR], [ANCHOR]]


def run(builder, scores, depths, pool, batch=1):
    ids = candidates(batch, depths, pool)
    block = DraftBlock(torch.zeros(batch, depths, 1), ids, torch.zeros(ids.shape), torch.zeros(ids.shape))
    return builder(DraftContext([[ANCHOR]] * batch, None, torch.device("cpu"), block, scores))


@given(st.integers(0, 10_000), st.integers(1, 25), st.integers(1, 3), st.integers(1, 4))
def test_with_a_pass_for_every_node_the_tree_is_the_best_there_is(seed, budget, depths, pool):
    """One node a round, all children open: no other tree of that size has a larger sum of path probabilities."""
    scores = RandomScores(pool, seed)
    tree = run(WeaverBuilder(budget, rounds=budget, parents=1, children=pool), scores, depths, pool).validate()
    paths = {}
    for depth in range(1, depths + 1):
        for ranks in itertools.product(range(pool), repeat=depth):
            path = tuple(100 * d + k for d, k in enumerate(ranks))
            paths[path] = sum(float(scores.of(0, (ANCHOR, *path[:d]))[ranks[d]]) for d in range(depth))
    best = sorted(paths.items(), key=lambda item: -item[1])[:budget]
    assert {path for path, _ in nodes_of(tree, 0)} == {path for path, _ in best}


@given(st.integers(0, 10_000), st.integers(1, 30))
def test_with_scores_that_ignore_the_path_it_is_the_tree_of_the_marginals(seed, budget):
    log_probs = torch.randn(1, 4, 5, generator=torch.Generator().manual_seed(seed)).log_softmax(-1)
    log_probs, order = log_probs.sort(-1, descending=True)
    block = DraftBlock(torch.zeros(1, 4, 1), candidates(1, 4, 5).gather(2, order), log_probs, log_probs)

    def score(token_ids, depths, ancestors, first):
        return log_probs[:, depths[0].clamp(max=3)]

    context = DraftContext([[ANCHOR]], None, torch.device("cpu"), block, score)
    grown = WeaverBuilder(budget, rounds=budget, parents=1, children=5)(context)
    assert dict(nodes_of(grown, 0)).keys() == dict(nodes_of(MarginalBuilder(budget)(context), 0)).keys()


def test_pruning_keeps_scored_leaves_that_the_papers_rule_never_takes():
    """The root's second and third child are better than anything below the first, but are never popped in time."""

    def score(token_ids, depths, ancestors, first):
        top = torch.log(torch.tensor([0.4, 0.35, 0.25]))
        return top.expand(1, token_ids.shape[1], 3)

    def paths(builder):
        return {path for path, _ in nodes_of(run(builder, score, 3, 3), 0)}

    assert paths(WeaverBuilder(3, rounds=2, parents=1)) == {(0,), (1,), (2,)}
    assert paths(WeaverBuilder(4, rounds=2, parents=1)) == {(0,), (1,), (2,), (0, 100)}


@pytest.mark.parametrize(
    ("budget", "width", "calls"),
    [(1, 1, 1), (15, 1, 15), (16, 1, 16), (17, 2, 9), (64, 4, 16), (127, 8, 16), (128, 8, 16)],
)
def test_the_papers_batches(budget, width, calls):
    scores = RandomScores(9, seed=1)
    tree = run(PaperBuilder(budget), scores, 6, 9)
    assert len(scores.asked) == calls
    assert scores.asked[1:] == [width] * (calls - 1)
    assert int(tree.sizes[0]) == budget + 1


def test_the_default_passes_score_as_many_nodes_as_are_kept():
    for budget, parents in ((16, 1), (31, 2), (63, 4), (127, 8)):
        assert WeaverBuilder(budget).widths == [1] + [parents] * 15
    for budget in (1, 7, 15):
        assert WeaverBuilder(budget).widths == [1] * budget
    assert WeaverBuilder(63, rounds=8).widths == [1] + [8] * 7


@pytest.mark.parametrize("bad", [math.nan, -math.inf, math.inf])
def test_scores_that_are_no_numbers_leave_a_valid_tree(bad):
    def score(token_ids, depths, ancestors, first):
        log_q = torch.full((1, token_ids.shape[1], 5), -1.5)
        log_q[..., 2] = bad
        return log_q

    tree = run(WeaverBuilder(9, rounds=3, parents=2), score, 3, 5).validate()
    if bad != math.inf:  # as if the candidate were not there, and taking nobody's turn
        rest = [
            nodes_of(tree, 0),
            nodes_of(run(WeaverBuilder(9, rounds=3, parents=2), lambda *a: score(*a).nan_to_num(-math.inf), 3, 5), 0),
        ]
        assert rest[0] == rest[1]
        assert len(rest[0]) == 9
    assert (2 in tree.token_ids[0, 1:].tolist()) == (bad == math.inf), "a probability above 1 counts as 1"


def test_a_row_that_runs_out_of_candidates_is_padded():
    tree = run(WeaverBuilder(40, rounds=9, parents=3), RandomScores(2, seed=0), 2, 2, batch=3).validate()
    assert tree.sizes.tolist() == [7, 7, 7]
    tree = run(PaperBuilder(40), RandomScores(2, seed=0), 2, 2, batch=3).validate()
    assert tree.sizes.tolist() == [7, 7, 7]
    assert tree.num_nodes == 41


def test_rows_of_a_batch_are_grown_apart():
    scores = RandomScores(6, seed=3)
    together = run(WeaverBuilder(20), scores, 4, 6, batch=3)
    for row in range(3):
        alone = RandomScores(6, seed=3)
        alone.of = lambda _, path, row=row: scores.of(row, path)
        assert nodes_of(run(WeaverBuilder(20), alone, 4, 6), 0) == nodes_of(together, row)


def test_growth_reads_no_value_on_the_host():
    """On the meta device there are no values: whatever asks for one fails."""
    with torch.device("meta"):
        ids, anchors = torch.zeros(2, 15, 40, dtype=torch.long), torch.zeros(2, 1, dtype=torch.long)

        def score(token_ids, depths, ancestors, first):
            return torch.zeros(*token_ids.shape, 40)

        tree = grow(ids, anchors, score, 63, [1] + [4] * 15, 16, prune=True)
    assert tree.token_ids.shape == (2, 64)


def test_a_kept_list_keeps_parents_before_children_among_equals():
    scores = torch.tensor([[-1.0, -1.0, -1.0, -1.0]])
    tokens, parents = torch.tensor([[5, 6, 7, 8]]), torch.tensor([[0, 1, 2, 0]])
    tree = keep_best(torch.tensor([[ANCHOR]]), scores, tokens, parents, slots=3, budget=3).validate()
    assert tree.token_ids.tolist() == [[ANCHOR, 5, 6, 7]]
    assert tree.parents.tolist() == [[-1, 0, 1, 2]]
