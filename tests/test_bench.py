"""The measuring harness: loops, runs, means, and a whole small bench."""

import json

import pytest

from weaver_hf.bench import DOMAINS, load_prompts, loop_onset, run_bench, summarize
from weaver_hf.bench.harness import accepted, report, runs_before
from weaver_hf.errors import TreeConfigError

GRAM = list(range(8))


@pytest.mark.parametrize(
    ("prompt", "output", "onset"),
    [
        ([], [*GRAM, *GRAM], 8),
        ([], [*GRAM, 9, *GRAM[:7]], 16),
        (GRAM, [9, *GRAM, 10], 1),
        (GRAM[:4], [*GRAM[4:], *GRAM], 4),
        ([1, 2], [3, 4], 2),
        ([], [5] * 12, 1),
        (list(range(20)), list(range(100, 130)), 30),
    ],
    ids=[
        "repeats-itself",
        "seven-tokens-are-no-loop",
        "repeats-the-prompt",
        "across-the-border",
        "short",
        "one-token",
        "no-loop",
    ],
)
def test_a_loop_starts_at_the_first_8_gram_seen_before(prompt, output, onset):
    assert loop_onset(prompt, output) == onset


def test_loop_free_runs_end_before_the_onset():
    # Token 0 is the prefill's; the runs then cover tokens 1-3, 4, 5-6.
    assert runs_before([3, 1, 2], 7) == [3, 1, 2]
    assert runs_before([3, 1, 2], 6) == [3, 1]
    assert runs_before([3, 1, 2], 3) == []


def test_means_over_steps_and_over_prompts():
    result = accepted([[3, 1], [1], []], seed=0)
    assert result["mean"] == pytest.approx(2 / 3)
    assert result["per_prompt_mean"] == pytest.approx(0.5)
    assert result["low"] <= result["mean"] <= result["high"]
    assert accepted([[]], seed=0)["mean"] is None


def test_every_bench_prompt_has_source_and_licence():
    prompts = load_prompts()
    assert [sum(p.domain == d for p in prompts) for d in DOMAINS] == [30] * 7
    assert all(p.source and p.license and p.prompt for p in prompts)
    with pytest.raises(ValueError, match="poetry"):
        load_prompts(["poetry"])


def test_a_small_bench_from_prompts_to_json(trio):
    model, tokenizer, weaver = trio
    before = weaver.tree_config
    prompts = load_prompts(["math", "chat"], 1)
    results = run_bench(model, tokenizer, weaver, prompts, builders=["suffix"], budgets=[3, 7], max_new_tokens=12)
    assert len(results) == 4
    assert all(r.identical for r in results)
    assert all(sum(r.runs) <= r.new_tokens - 1 for r in results)
    assert all(len(r.expected) == len(r.runs) for r in results)
    rows = summarize(results)
    assert [(row["budget"], row["domain"]) for row in rows] == [(b, d) for b in (3, 7) for d in ("math", "chat", "all")]
    data = json.loads(json.dumps(report(results, model, {"max_new_tokens": 12}, seed=0)))
    assert data["environment"]["dtype"] == "float32"
    assert weaver.tree_config is before
    assert (before.builder, before.budget) == ("weaver", None), "as shipped"


def test_a_failing_bench_puts_the_tree_settings_back(trio):
    model, tokenizer, weaver = trio
    with pytest.raises(TreeConfigError):
        run_bench(
            model, tokenizer, weaver, load_prompts(["math"], 1),
            builders=["sufix"], budgets=[3], max_new_tokens=2,
        )  # fmt: skip
    assert weaver.tree_config.budget is None


def test_sampled_text_is_compared_with_plain_decoding_under_the_same_noise(trio):
    model, tokenizer, weaver = trio
    assert weaver.tree_config.builder == "weaver", "plain decoding asks it for trees of no node"
    results = run_bench(
        model, tokenizer, weaver, load_prompts(["math"], 1),
        builders=["suffix", "chain"], budgets=[7], temperatures=[0.0, 1.0], max_new_tokens=10,
    )  # fmt: skip
    ways = [(r.temperature, r.builder, r.acceptance) for r in results]
    assert ways == [(0.0, "suffix", "greedy"), (0.0, "chain", "greedy"),
                    (1.0, "suffix", "sample"), (1.0, "chain", "sample"), (1.0, "chain", "coupled")]  # fmt: skip
    assert all(r.identical for r in results)
    rows = [row for row in summarize(results) if row["domain"] == "all"]
    assert sorted((row["temperature"], row["builder"], row["acceptance"]) for row in rows) == sorted(ways)
    assert weaver.tree_config.acceptance is None
