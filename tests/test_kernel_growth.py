"""The frontier's kernels against the plain search, bit for bit, on scores of any kind."""

import math

import pytest
import torch
from test_conditional import ANCHOR, RandomScores, candidates

from weaver_hf.proposal import conditional
from weaver_hf.proposal.conditional_kernels import grow_scored
from weaver_kernels import growth

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CASES = {  # depths, pool, budget, widths, children, ties
    "one-of-everything": (1, 1, 1, [1], 1, False),
    "a-round": (3, 5, 9, [1, 2, 2], 4, False),
    "ties": (4, 6, 30, [1, 5, 5, 5], 7, True),
    "ties-few-children": (7, 11, 20, [1, 4, 4, 4], 5, True),
    "uneven-rounds": (5, 9, 14, [1, 3, 1, 4], 3, False),
    "exhausted": (2, 2, 40, [1, 3, 3, 3], 2, False),
    "no-budget": (3, 5, 0, [1], 3, False),
    "budget-of-one": (3, 5, 1, [1, 2], 3, True),
}


def assert_same(tree, expected, *, exact=True):
    assert torch.equal(tree.token_ids, expected.token_ids)
    assert torch.equal(tree.parents, expected.parents)
    assert torch.equal(tree.sizes, expected.sizes)
    assert tree.max_depth == expected.max_depth
    torch.testing.assert_close(
        tree.log_probs, expected.log_probs, **(dict.fromkeys(("rtol", "atol"), 0 if exact else 1e-4))
    )


class OnDevice(RandomScores):
    """The same scores, made on the host."""

    def __call__(self, token_ids, depths, ancestors, first):
        return super().__call__(token_ids.cpu(), depths.cpu(), ancestors.cpu(), first).to(token_ids.device)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_trees_are_those_of_the_plain_search(case):
    depths, pool, budget, widths, children, ties = case
    ids, anchors = candidates(2, depths, pool).to(DEVICE), torch.tensor([[ANCHOR], [7]], device=DEVICE)
    expected = conditional.grow(ids, anchors, OnDevice(pool, 1, ties), budget, widths, children, prune=True)
    scores = OnDevice(pool, 1, ties)
    tree = grow_scored(ids, anchors, scores, budget, widths, children).validate()
    assert_same(tree, expected)
    assert scores.asked == widths


@pytest.mark.parametrize("bad", [math.nan, -math.inf, math.inf])
def test_scores_that_are_no_numbers_are_as_if_the_candidate_were_not_there(bad):
    def score(token_ids, depths, ancestors, first, bad=bad):
        log_q = torch.full((1, token_ids.shape[1], 5), -1.5, device=DEVICE)
        log_q[..., 2] = bad
        return log_q

    ids, anchors = candidates(1, 3, 5).to(DEVICE), torch.tensor([[ANCHOR]], device=DEVICE)
    tree = grow_scored(ids, anchors, score, 9, [1, 2], 5).validate()
    assert_same(tree, conditional.grow(ids, anchors, score, 9, [1, 2], 5, prune=True))
    assert (2 in tree.token_ids[0, 1:].tolist()) == (bad == math.inf)


def test_zeros_of_both_signs_are_equal():
    """A probability of 1 has the score 0 or -0, by how it was rounded."""

    def score(token_ids, depths, ancestors, first):
        return torch.tensor([-0.0, 0.0, -0.0, -1.0], device=DEVICE).expand(1, token_ids.shape[1], 4)

    ids, anchors = candidates(1, 2, 4).to(DEVICE), torch.tensor([[ANCHOR]], device=DEVICE)
    for budget in (1, 2, 4, 5):
        expected = conditional.grow(ids, anchors, score, budget, [1, 1], 3, prune=True)
        assert_same(grow_scored(ids, anchors, score, budget, [1, 1], 3), expected)


def test_small_blocks_of_candidates_give_the_same_cells():
    """The last program to arrive makes the cells, however many there are."""
    torch.manual_seed(3)
    ids = candidates(1, 2, 7).to(DEVICE)
    logits, states, rows = (torch.randn(*shape, device=DEVICE) for shape in ((1, 2, 7), (1, 1, 9), (300, 9)))
    pool = growth.Pool(ids, logits, torch.ones(2, 2, device=DEVICE))
    found = []
    for config in ({"BLOCK_C": 8, "BLOCK_N": 16}, {"BLOCK_C": 2, "BLOCK_N": 4}):
        tree = growth.start(torch.tensor([[ANCHOR]], device=DEVICE), 3, 2, 4)
        assert growth.expand(tree, pool, states, rows, 0, 2, config=config) is None
        assert tree.arrived.tolist() == [0], "ready for the next round"
        found.append(tree)
    expected = (logits[0, 0] + rows[ids[0, 0]] @ states[0, 0]).log_softmax(-1)
    best = expected.sort(descending=True).values[:4]
    for tree in found:
        torch.testing.assert_close(tree.node_scores[0, 1:], best[:2])
        torch.testing.assert_close(tree.cell_scores[0, 2:4], best[2:])
        assert tree.cell_scores[0, :2].isinf().all(), "taken"
        assert torch.equal(tree.nodes, found[0].nodes)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU on this machine")
@pytest.mark.parametrize(("widths", "batch"), [([1] + [4] * 15, 1), ([1] + [8] * 7, 3)])
def test_at_the_real_size_trees_equal_the_plain_searchs(widths, batch):
    ids, anchors = torch.arange(15 * 256, device="cuda").view(15, 256).repeat(batch, 1, 1), torch.zeros(batch, 1).long()
    table = torch.randn(batch, sum(widths), 256, device="cuda").mul(3).log_softmax(-1)

    def score(token_ids, depths, ancestors, first):
        return table[:, first : first + token_ids.shape[1]]

    expected = conditional.grow(ids, anchors.cuda(), score, 63, widths, 16, prune=True)
    assert_same(grow_scored(ids, anchors.cuda(), score, 63, widths, 16), expected)
