"""The captured step. Without a GPU its parts run as they are, in the buffers and in the order of the replays."""

import copy

import pytest
import torch
from support import bench_prompts
from transformers import LogitsProcessor, LogitsProcessorList, StoppingCriteria, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer

from weaver_hf import graph, load_tiny
from weaver_hf.target.attach import attachment_of
from weaver_hf.target.compat import CACHE_KEY
from weaver_hf.target.static_cache import cannot_stack


@pytest.fixture(scope="module")
def trio():
    return load_tiny()


@pytest.fixture
def captured(trio, monkeypatch):
    """The embedded trio, its steps captured; `calls` counts the calls that were."""
    model, _, weaver = trio
    attachment_of(model).steps.clear()
    monkeypatch.setattr(graph, "why_eager", lambda model, prompt: cannot_stack(prompt.cache))
    monkeypatch.setattr(graph, "CAPTURE_FROM", 1)
    before = copy.deepcopy(weaver.tree_config)
    yield model, weaver
    weaver.tree_config = before


def decode(model, ids, seed=0, **options):
    torch.manual_seed(seed)
    return model.generate(ids, **{"max_new_tokens": 24, "do_sample": False, **options})


def ids_of(index: int) -> torch.Tensor:
    return bench_prompts()[index][1]


@pytest.mark.parametrize("builder", ["suffix", "chain", "marginal", "weaver", "weaver-paper"])
def test_captured_text_equals_stocks(captured, monkeypatch, builder):
    model, weaver = captured
    weaver.tree_config.builder, weaver.tree_config.budget = builder, 11
    runs = []
    for index in (3, 95):
        stock = decode(model, ids_of(index))
        assert torch.equal(decode(model, ids_of(index), assistant_model=weaver), stock)
        runs.append(weaver.stats.runs)
    assert len(attachment_of(model).steps) == 1, "it was captured, and once"
    monkeypatch.setattr(graph, "why_eager", lambda model, prompt: "a test")
    for index, run in zip((3, 95), runs, strict=True):
        decode(model, ids_of(index), assistant_model=weaver)
        assert weaver.stats.runs == run, "the same trees are accepted"


def test_captured_plain_decoding_equals_stocks(captured):
    model, weaver = captured
    weaver.tree_config.budget = 0
    assert torch.equal(decode(model, ids_of(40), assistant_model=weaver), decode(model, ids_of(40)))
    assert weaver.stats.tokens_per_step == 1


@pytest.mark.parametrize(
    "options", [{"temperature": 0.8}, {"temperature": 1.1, "top_k": 12}, {"top_p": 0.8, "top_k": 0}]
)
@pytest.mark.parametrize("acceptance", ["sample", "coupled"])
def test_captured_sampling_draws_what_eager_sampling_draws(captured, monkeypatch, options, acceptance):
    model, weaver = captured
    weaver.tree_config.acceptance = acceptance
    captured_text = decode(model, ids_of(3), assistant_model=weaver, **{**options, "do_sample": True})
    runs = weaver.stats.runs
    monkeypatch.setattr(graph, "why_eager", lambda model, prompt: "a test")
    assert torch.equal(
        decode(model, ids_of(3), assistant_model=weaver, **{**options, "do_sample": True}), captured_text
    )
    assert weaver.stats.runs == runs, "and accepts the same trees"


class Reversed(LogitsProcessor):
    """Reads the history: never accepted on the device."""

    def __call__(self, input_ids, scores):
        return scores.index_fill(-1, input_ids[0, -1:], -1e9)


def test_processors_in_python_run_between_verification_and_acceptance(captured):
    model, weaver = captured
    options = {"logits_processor": LogitsProcessorList([Reversed()])}
    assert torch.equal(decode(model, ids_of(3), assistant_model=weaver, **options), decode(model, ids_of(3), **options))


class After(StoppingCriteria):
    def __init__(self, length):
        self.length = length

    def __call__(self, input_ids, scores, **kwargs):
        return torch.tensor([input_ids.shape[1] >= self.length])


@pytest.mark.parametrize("new_tokens", [1, 2, 13, 24])
def test_the_returned_cache_and_context_go_on_where_eager_ones_would(captured, monkeypatch, new_tokens):
    model, weaver = captured
    ids = ids_of(3)
    results = []
    for eager in (False, True):
        if eager:
            monkeypatch.setattr(graph, "why_eager", lambda model, prompt: "a test")
        rule = {"stopping_criteria": StoppingCriteriaList([After(ids.shape[1] + new_tokens)])}
        output = decode(model, ids, assistant_model=weaver, return_dict_in_generate=True, **rule)
        cache = output[CACHE_KEY]
        assert cache.get_seq_length() == output.sequences.shape[1] - 1
        more = decode(model, output.sequences, assistant_model=weaver, max_new_tokens=12, **{CACHE_KEY: cache})
        results.append((output.sequences, more, weaver.stats.runs))
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])
    assert results[0][2] == results[1][2], "the drafter knows the same"
    assert torch.equal(results[0][1], decode(model, results[0][0], max_new_tokens=12))


def test_scores_and_logits_are_returned_as_eagerly(captured, monkeypatch):
    model, weaver = captured
    options = {"output_scores": True, "output_logits": True, "return_dict_in_generate": True, "assistant_model": weaver}
    mine = decode(model, ids_of(3), **options)
    monkeypatch.setattr(graph, "why_eager", lambda model, prompt: "a test")
    theirs = decode(model, ids_of(3), **options)
    assert torch.equal(mine.sequences, theirs.sequences)
    torch.testing.assert_close(torch.stack(mine.scores), torch.stack(theirs.scores))
    torch.testing.assert_close(torch.stack(mine.logits), torch.stack(theirs.logits))


def test_a_text_that_outgrows_its_buffers_moves_to_larger_ones(captured, monkeypatch):
    model, weaver = captured
    monkeypatch.setattr(graph, "MIN_CAPACITY", 1)
    monkeypatch.setattr(graph, "MAX_RESERVED", 8)
    options = {"max_new_tokens": 90, "eos_token_id": 8191}  # a token that it never writes
    ids = ids_of(3)[:, :20]
    stock = decode(model, ids, **options)
    assert stock.shape[1] == 110
    assert torch.equal(decode(model, ids, assistant_model=weaver, **options), stock)
    assert len(attachment_of(model).steps) > 1


class Raises(BaseStreamer):
    def __init__(self, after):
        self.after = after

    def put(self, value):
        self.after -= 1
        if self.after < 0:
            raise KeyboardInterrupt

    def end(self):
        pass


def test_an_exception_in_the_middle_leaves_model_and_cache_usable(captured):
    model, weaver = captured
    stock = decode(model, ids_of(3))
    with pytest.raises(KeyboardInterrupt):
        decode(model, ids_of(3), assistant_model=weaver, streamer=Raises(4))
    assert torch.equal(decode(model, ids_of(3), assistant_model=weaver), stock)
    assert torch.equal(decode(model, ids_of(3)), stock)


def test_builders_with_trees_of_other_depths_do_not_share_buffers(captured):
    """A chain of a whole suffix match is as deep as the budget; a block's trees are not."""
    model, weaver = captured
    weaver.tree_config.budget = 31
    options = {"max_new_tokens": 90, "eos_token_id": 8191}
    ids = ids_of(120)  # its answer repeats itself
    stock = decode(model, ids, **options)
    for builder in ("marginal", "suffix"):
        weaver.tree_config.builder = builder
        assert torch.equal(decode(model, ids, assistant_model=weaver, **options), stock)
    assert max(weaver.stats.runs) > 16, "deeper than a block"


def test_steps_are_reused_bounded_and_freed(captured, monkeypatch):
    model, weaver = captured
    steps = attachment_of(model).steps
    decode(model, ids_of(3), assistant_model=weaver)
    first = dict(steps)
    decode(model, ids_of(4), assistant_model=weaver)
    assert steps == first
    monkeypatch.setattr(graph, "MAX_STEPS", 2)
    for budget in (3, 4, 5):
        weaver.tree_config.budget = budget
        decode(model, ids_of(3), assistant_model=weaver)
    assert sorted(key[2] for key in steps) == [5, 6]


def test_changed_weights_are_captured_anew(captured):
    model, weaver = captured
    steps = attachment_of(model).steps
    decode(model, ids_of(3), assistant_model=weaver)
    before = list(steps)
    with torch.no_grad():
        next(model.parameters()).mul_(1.0)
    decode(model, ids_of(3), assistant_model=weaver)
    assert len(steps) == 1
    assert list(steps) != before


def test_short_calls_capture_nothing_unless_warmed_up(captured, monkeypatch):
    model, weaver = captured
    monkeypatch.setattr(graph, "CAPTURE_FROM", 64)
    steps = attachment_of(model).steps
    decode(model, ids_of(3), assistant_model=weaver, max_new_tokens=5)
    assert not steps
    weaver.warmup(max_new_tokens=100, prompt_tokens=300)
    (key,) = steps
    assert key[5] >= 400
    decode(model, ids_of(3), assistant_model=weaver, max_new_tokens=5)
    assert list(steps) == [key]
