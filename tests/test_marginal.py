"""Chain and marginal trees from a block."""

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from weaver_hf import TreeConfig
from weaver_hf.drafter import DraftBlock
from weaver_hf.errors import TreeConfigError
from weaver_hf.proposal import ChainBuilder, DraftContext, MarginalBuilder


def block_of(log_probs):
    """A block whose candidate `k` of depth `d` is token `100 * d + k`."""
    batch, depths, pool = log_probs.shape
    tokens = (100 * torch.arange(depths)[:, None] + torch.arange(pool)).expand(batch, -1, -1)
    return DraftBlock(torch.zeros(batch, depths, 1), tokens, log_probs, log_probs)


def random_block(batch=1, depths=4, pool=5, seed=0, ties=False):
    logits = torch.randn(batch, depths, pool, generator=torch.Generator().manual_seed(seed)) * 2
    logits = logits.round() if ties else logits
    return block_of(logits.log_softmax(-1).sort(-1, descending=True).values)


def grow(builder, block):
    return builder(DraftContext([[7]] * len(block.token_ids), None, torch.device("cpu"), block))


def best_paths(block, budget, row=0):
    """All paths by probability, the slow and obvious way: (score, tokens) of the best `budget`."""
    _, depths, pool = block.token_ids.shape
    paths = []
    for depth in range(1, depths + 1):
        for ranks in itertools.product(range(pool), repeat=depth):
            score = sum(float(block.log_probs[row, d, k]) for d, k in enumerate(ranks))
            paths.append((-score, depth, ranks))
    return sorted(paths)[:budget]


@given(st.integers(0, 10_000), st.integers(1, 40), st.integers(1, 4), st.integers(1, 5))
def test_marginal_holds_exactly_the_most_probable_paths(seed, budget, depths, pool):
    block = random_block(depths=depths, pool=pool, seed=seed)
    tree = grow(MarginalBuilder(budget), block).validate()
    expected = best_paths(block, budget)
    size = int(tree.sizes[0])
    assert size == 1 + min(budget, len(expected))
    mine = {tuple(tree.token_ids[0, tree.path(node)[1:]].tolist()) for node in range(1, size)}
    assert mine == {tuple(100 * d + k for d, k in enumerate(ranks)) for _, _, ranks in expected}
    torch.testing.assert_close(
        tree.log_probs[0, 1:size], torch.tensor([-s for s, _, _ in expected]), atol=1e-5, rtol=1e-5
    )


@given(st.integers(0, 10_000), st.integers(1, 40))
def test_with_ties_the_tree_is_valid_and_as_good_as_the_best(seed, budget):
    block = random_block(depths=3, pool=4, seed=seed, ties=True)
    tree = grow(MarginalBuilder(budget), block).validate()
    total = sum(math.exp(-score) for score, _, _ in best_paths(block, budget))
    assert float(tree.log_probs[0, 1 : int(tree.sizes[0])].exp().sum()) == pytest.approx(total, rel=1e-4)


def test_rows_of_a_batch_are_grown_apart():
    block = random_block(batch=3, seed=4)
    together = grow(MarginalBuilder(17), block)
    for row in range(3):
        alone = grow(MarginalBuilder(17), DraftBlock(*(x[row : row + 1] for x in block if x is not None)))
        assert torch.equal(together.token_ids[row], alone.token_ids[0])
        assert torch.equal(together.parents[row], alone.parents[0])


def test_the_width_is_static_whatever_the_pool():
    assert grow(MarginalBuilder(31), random_block(depths=2, pool=2)).num_nodes == 32


@pytest.mark.parametrize(("budget", "nodes"), [(2, 3), (4, 5), (60, 5)])
def test_a_chain_takes_the_best_candidate_of_each_depth(budget, nodes):
    block = random_block()
    tree = grow(ChainBuilder(budget), block).validate()
    assert tree.num_nodes == nodes
    assert tree.token_ids[0].tolist() == [7, 0, 100, 200, 300][:nodes]
    torch.testing.assert_close(tree.log_probs[0, -1], block.log_probs[0, : nodes - 1, 0].sum())


def test_draft_temperatures_are_those_of_the_nearest_target_temperature():
    config = TreeConfig(draft_temperature={"0.0": [2.0, 3.0], "1.0": [0.5] * 4})
    assert config.temperatures_at(0.2, 4) == [2.0, 3.0, 1.0, 1.0]
    assert config.temperatures_at(0.7, 3) == [0.5] * 3
    assert TreeConfig().temperatures_at(0.0, 2) == [1.0, 1.0]


@pytest.mark.parametrize("value", [{"x": [1.0]}, {"0": [0.0]}, [1.0], {"0": 3}, None])
def test_wrong_draft_temperatures_are_refused_on_assignment(value):
    with pytest.raises(TreeConfigError, match="positive numbers"):
        TreeConfig().draft_temperature = value
