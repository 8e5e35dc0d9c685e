"""Whole growths with kernels against the adapter's scorer and the plain search."""

import pytest
import torch
from support import VOCAB, tiny_random_model
from test_adapter import DEPTHS, Doubled, random_adapter, scoring
from test_kernel_growth import assert_same
from transformers import MinPLogitsWarper, TopKLogitsWarper, TopPLogitsWarper
from transformers.generation import TypicalLogitsWarper

from weaver_hf.adapter import AdapterScorer, FoldedTables, TopKAdapter
from weaver_hf.configuration_weaver import AdapterConfig
from weaver_hf.drafter import DraftBlock
from weaver_hf.noise import GumbelField
from weaver_hf.proposal.conditional import grow
from weaver_hf.proposal.conditional_kernels import grow_adapter
from weaver_hf.scoring import DraftRule
from weaver_kernels import growth

FILTERS = [TopKLogitsWarper(7), TopPLogitsWarper(0.9), MinPLogitsWarper(0.05)]


@pytest.fixture(autouse=True)
def _few_programs(request, monkeypatch):
    """The interpreter takes its time for each; on a GPU only the tests at the real size run."""
    if "gpu" not in request.keywords:
        if torch.cuda.is_available():
            pytest.skip("in the interpreter, on a machine without a GPU")
        monkeypatch.setitem(growth.SCORE, "BLOCK_C", 16)


def compare(generation, layers, fold, *, batch=1, coupled=False, filters=(), head=None, widths=(1, 3, 2)):
    adapter, model = random_adapter(generation, layers), tiny_random_model()
    scorer, block, target_hidden = scoring(adapter, model, batch, fold, head=head and head(model))
    rule = DraftRule(torch.linspace(0.7, 1.4, DEPTHS).tolist(), torch.linspace(0.5, 2.0, DEPTHS).tolist(), filters)
    if coupled:
        noise = GumbelField(torch.arange(batch) + 11, torch.arange(batch) + 23)
        block = block._replace(gumbels=noise.rows(DEPTHS, VOCAB).gather(-1, block.token_ids))
    args = (adapter, scorer._embedding, scorer._head, block, target_hidden, rule)
    anchors = torch.arange(batch)[:, None] + 3
    expected = grow(block.token_ids, anchors, AdapterScorer(*args, scorer._tables), 10, widths, 5, prune=True)
    tree = grow_adapter(*args, anchors, 10, widths, 5, scorer._tables).validate()
    assert_same(tree, expected, exact=False)
    assert int(tree.sizes[0]) == 11 or filters, "filters can leave less than the budget"
    assert int(tree.depths.max()) > 1


@pytest.mark.parametrize(
    ("generation", "layers", "fold", "coupled"),
    [("learned", 1, True, False), ("learned", 2, False, True), ("rope", 1, False, False), ("rope", 2, True, True)],
)
def test_trees_are_those_of_the_adapters_scorer(generation, layers, fold, coupled):
    compare(generation, layers, fold, coupled=coupled)


def test_rows_of_a_batch_are_grown_apart():
    compare("learned", 1, True, batch=3, coupled=True, widths=(1, 2))


def test_the_targets_filters_count_in_coupled_drafts():
    compare("learned", 1, True, coupled=True, filters=FILTERS, widths=(1, 2))


@pytest.mark.parametrize(
    "filters", [[TypicalLogitsWarper(0.9)], FILTERS[::-1], [TopPLogitsWarper(0.9, min_tokens_to_keep=3)]]
)
def test_filters_that_the_kernel_does_not_know_are_left_to_the_scorer(filters):
    compare("learned", 1, False, coupled=True, filters=filters, widths=(1, 2))


def test_a_head_that_is_no_plain_matrix_is_called():
    compare("learned", 1, False, head=lambda model: Doubled(model.get_output_embeddings()), widths=(1, 2))


def test_half_precision_grows_a_valid_tree_of_nearly_the_same_scores():
    adapter, model = random_adapter(), tiny_random_model()
    _, block, target_hidden = scoring(adapter, model)
    adapter, model = adapter.bfloat16(), model.bfloat16()
    block, target_hidden = block._replace(hidden=block.hidden.bfloat16()), target_hidden.bfloat16()
    args = (adapter, model.get_input_embeddings(), model.get_output_embeddings(), block, target_hidden)
    rule, anchors = DraftRule([1.0] * DEPTHS), torch.tensor([[3]])
    expected = grow(block.token_ids, anchors, AdapterScorer(*args, rule), 6, [1], 6, prune=True)
    tree = grow_adapter(*args, rule, anchors, 6, [1], 6).validate()
    common = set(tree.token_ids[0].tolist()) & set(expected.token_ids[0].tolist())
    assert len(common) >= 6
    torch.testing.assert_close(tree.log_probs.sort().values, expected.log_probs.sort().values, atol=0.05, rtol=0.02)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU on this machine")
@pytest.mark.parametrize("fold", [True, False])
@pytest.mark.parametrize("generation", ["learned", "rope"])
@torch.no_grad()
def test_at_the_released_geometry_trees_equal_the_plain_ones_every_time_and_when_captured(generation, fold):
    torch.manual_seed(0)
    with torch.device("cuda"):
        adapter = TopKAdapter(5120, AdapterConfig(generation))
        embedding, head = torch.nn.Embedding(20_000, 5120), torch.nn.Linear(5120, 20_000, bias=False)
        ids = torch.stack([torch.randperm(20_000)[:256] for _ in range(15)])[None]
        block = DraftBlock(torch.randn(1, 15, 5120), ids, torch.randn(1, 15, 256) * 3, torch.zeros(1, 15, 256))
        target_hidden, anchors = torch.randn(1, 5120), torch.tensor([[5]])
    tables = FoldedTables.build(adapter, embedding, head) if fold else None
    args, widths = (adapter, embedding, head, block, target_hidden, DraftRule([1.0] * 15)), [1] + [4] * 15
    expected = grow(ids, anchors, AdapterScorer(*args, tables), 63, widths, 16, prune=True)
    tree = grow_adapter(*args, anchors, 63, widths, 16, tables).validate()
    assert_same(tree, expected, exact=False)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = grow_adapter(*args, anchors, 63, widths, 16, tables)
    for _ in range(100):
        graph.replay()
        assert_same(captured, tree)
