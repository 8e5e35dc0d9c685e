"""The choice at every node against transformers' own warpers, sorted in full."""

import pytest
import torch
from transformers import MinPLogitsWarper, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from weaver_hf.noise import gumbel
from weaver_hf.scoring import process_nodes
from weaver_kernels.sampling import choose_tokens

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SMALL = {"scan": {"CHUNK": 512}, "choose": {"TILE": 2}}  # several chunks and tiles in a small vocabulary
FILTERS = [
    {},
    {"temperature": 0.7},
    {"top_k": 1},
    {"top_k": 3, "temperature": 1.7},
    {"top_k": 9, "temperature": 2.0},
    {"top_p": 0.0},
    {"top_p": 0.4, "temperature": 1.5},
    {"top_p": 0.95},
    {"min_p": 0.1},
    {"top_k": 7, "top_p": 0.8, "temperature": 0.6},
    {"top_p": 0.99, "min_p": 0.02},
    {"top_k": 50, "top_p": 0.9, "min_p": 0.05, "temperature": 1.2},
]


def stock_choice(logits, depths, gumbels, temperature=1.0, top_k=None, top_p=None, min_p=None):
    """Transformers' processors in their order, then the best sum; of equals on a boundary all are kept."""
    processors = [] if temperature == 1 else [TemperatureLogitsWarper(temperature)]
    plain = process_nodes(processors, torch.empty(0), logits)
    processors += [TopKLogitsWarper(top_k)] if top_k else []
    processors += [TopPLogitsWarper(top_p)] if top_p is not None else []
    processors += [MinPLogitsWarper(min_p)] if min_p else []
    scores = process_nodes(processors, torch.empty(0), logits)
    if top_p is not None:
        lowest = scores.masked_fill(scores == float("-inf"), float("inf")).amin(-1, keepdim=True)
        scores = plain.masked_fill(plain < lowest, float("-inf"))
    row = torch.arange(len(gumbels), device=gumbels.device)[:, None]
    return (scores + gumbels[row, depths]).argmax(-1)


def case(vocab, dtype, nodes=2, seed=0):
    """Logits, depths, and noise that is so strong that the best token is often one that the filters drop."""
    torch.manual_seed(seed)
    logits = (torch.randn(2, nodes, vocab) * 2).to(dtype).to(DEVICE)
    depths = torch.randint(0, 3, (2, nodes), device=DEVICE)
    seeds, positions = torch.tensor([3, 4 + seed], device=DEVICE), torch.arange(6, device=DEVICE).view(2, 3)
    return logits, depths, 3 * gumbel(seeds, positions, vocab)


@pytest.mark.parametrize("filters", FILTERS, ids=lambda f: "-".join(f"{k}{v}" for k, v in f.items()) or "none")
def test_choices_are_those_of_the_stock_warpers(filters):
    args = case(1101, torch.bfloat16, nodes=1)
    assert torch.equal(choose_tokens(*args, **filters, config=SMALL), stock_choice(*args, **filters))


@pytest.mark.parametrize("vocab", [1, 5, 300])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_any_vocabulary_and_dtype(vocab, dtype):
    args, filters = case(vocab, dtype, seed=1), {"top_k": 4, "top_p": 0.7, "temperature": 0.9}
    assert torch.equal(choose_tokens(*args, **filters, config=SMALL), stock_choice(*args, **filters))


def test_tokens_of_equal_probability_are_kept_together():
    """Fifteen levels of 1000 logits: every boundary lies inside a level."""
    logits, depths, gumbels = case(1000, torch.bfloat16)
    logits = logits.mul(1.5).round()
    for filters in ({"top_k": 9}, {"top_p": 0.6}, {"top_k": 30, "top_p": 0.5}):
        expected = stock_choice(logits, depths, gumbels, **filters)
        assert torch.equal(choose_tokens(logits, depths, gumbels, **filters, config=SMALL), expected)


def test_greedy_choices_are_the_lowest_of_the_best():
    logits, depths, _ = case(1101, torch.bfloat16, nodes=3)
    logits = logits.round()
    assert torch.equal(choose_tokens(logits, depths, config=SMALL), logits.argmax(-1))
    assert torch.equal(choose_tokens(logits, depths, top_k=3, top_p=0.5, config=SMALL), logits.argmax(-1))


def test_suppressed_tokens_are_never_chosen():
    logits, depths, gumbels = case(700, torch.float32, nodes=1)
    logits[..., 3:] = float("-inf")
    for filters in ({}, {"top_k": 8}, {"top_p": 0.9}):
        expected = stock_choice(logits, depths, gumbels, **filters)
        assert torch.equal(choose_tokens(logits, depths, gumbels, **filters, config=SMALL), expected)
    logits[:] = float("-inf")
    assert choose_tokens(logits, depths, gumbels, top_k=8, top_p=0.9, config=SMALL).tolist() == [[0], [0]]


def test_strided_rows_are_read_where_they_lie():
    logits, depths, gumbels = case(512, torch.bfloat16, nodes=4)
    wide = torch.cat([logits, logits + 1], -1)[:, ::2, :512]
    noise = torch.cat([gumbels, gumbels], -1)[..., :512]
    got = choose_tokens(wide, depths[:, ::2], noise, top_k=5, config=SMALL)
    assert torch.equal(got, stock_choice(logits[:, ::2], depths[:, ::2], gumbels, top_k=5))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU on this machine")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("filters", FILTERS, ids=lambda f: "-".join(f"{k}{v}" for k, v in f.items()) or "none")
def test_at_the_real_size_the_choices_are_stocks_every_time(filters, dtype):
    logits, depths, gumbels = case(248_320, dtype, nodes=64)
    gumbels = gumbels / 3
    got = choose_tokens(logits, depths, gumbels, **filters)
    # A cumulative probability can lie within rounding of the bound; everything else is exact.
    assert (got != stock_choice(logits, depths, gumbels, **filters)).sum() <= (1 if "top_p" in filters else 0)
    for _ in range(100):
        assert torch.equal(choose_tokens(logits, depths, gumbels, **filters), got)
