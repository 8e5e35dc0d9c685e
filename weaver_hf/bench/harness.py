"""Runs prompts with and without a Weaver and counts acceptance the way the whole project does.

Sampled text is drawn from the target's whole law (no top-k) and compared with plain decoding through the same noise
(budget 0), because stock decoding draws from another stream.

Accepted drafted tokens a step: the bonus token is not counted, a step cut by a length limit is left out, and at
temperature 0 there is a second column that ends at the onset of a loop, because a model that repeats itself is easy to
draft for. Means are weighted by tokens (all steps alike) or by prompt; intervals are bootstrapped over prompts.
"""

import itertools
import json
import platform
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
import transformers

from .._version import __version__
from ..modeling_weaver import WeaverModel
from ..proposal import BUILDERS

__all__ = ["DOMAINS", "Prompt", "PromptResult", "load_prompts", "loop_onset", "run_bench", "summarize"]

PROMPTS = Path(__file__).parent / "prompts.jsonl"
DOMAINS = ("math", "gsm8k", "code", "humaneval", "mtbench", "prose", "chat")
LOOP_NGRAM = 8
BOOTSTRAP_SAMPLES = 2000


@dataclass(frozen=True)
class Prompt:
    """One prompt with the source and licence of its text."""

    domain: str
    prompt: str
    source: str
    license: str


@dataclass
class PromptResult:
    """One prompt with one builder, budget and temperature.

    Attributes:
        runs: tokens emitted by each whole step.
        loop_free_runs: those of the steps that end before the text starts to loop.
        expected: drafted tokens that the tree of each whole step expected to be accepted.
        acceptance: the rule: `"greedy"` at temperature 0, otherwise one of `acceptance.RULES`.
        identical: the tokens equal those of plain decoding: of `generate` without the Weaver at temperature 0, of a
            budget of 0 above.
        seconds, plain_seconds: of the whole call, with and without the Weaver (sampled texts differ in length there, so
            its time a token is taken).
    """

    domain: str
    index: int
    builder: str
    budget: int
    temperature: float
    acceptance: str
    runs: list[int]
    loop_free_runs: list[int]
    expected: list[float]
    new_tokens: int
    target_passes: int
    drafted_nodes: int
    identical: bool
    seconds: float
    plain_seconds: float


def load_prompts(domains: Sequence[str] = DOMAINS, per_domain: int | None = None) -> list[Prompt]:
    """The embedded bench prompts of these domains, the first `per_domain` of each (all by default).

    Raises:
        ValueError: an unknown domain.
    """
    unknown = sorted(set(domains) - set(DOMAINS))
    if unknown:
        raise ValueError(f"Found domains {unknown}; expected some of {list(DOMAINS)}.")
    with PROMPTS.open(encoding="utf-8") as lines:
        rows = [Prompt(**json.loads(line)) for line in lines]
    return [row for domain in domains for row in [r for r in rows if r.domain == domain][:per_domain]]


def loop_onset(prompt: Sequence[int], output: Sequence[int]) -> int:
    """Index into `output` at which the first 8-gram starts that prompt or output held before; `len(output)` if none."""
    text = [*prompt, *output]
    seen = {tuple(text[i : i + LOOP_NGRAM]) for i in range(max(len(prompt) - LOOP_NGRAM + 1, 0))}
    for start in range(max(len(prompt) - LOOP_NGRAM + 1, 0), len(text) - LOOP_NGRAM + 1):
        gram = tuple(text[start : start + LOOP_NGRAM])
        if gram in seen and start >= len(prompt):
            return start - len(prompt)
        seen.add(gram)
    return len(output)


def runs_before(runs: Sequence[int], end: int) -> list[int]:
    """The runs that end at or before token `end` of the output; the first output token belongs to the prefill."""
    kept, position = [], 1
    for run in runs:
        position += run
        if position > end:
            break
        kept.append(run)
    return kept


def run_bench(
    model: Any,
    tokenizer: Any,
    weaver: WeaverModel,
    prompts: Sequence[Prompt],
    *,
    builders: Sequence[str],
    budgets: Sequence[int],
    temperatures: Sequence[float] = (0.0,),
    acceptances: Sequence[str] = ("sample", "coupled"),
    max_new_tokens: int = 64,
    seed: int = 0,
    progress: Callable[[Iterable[Any], int], Iterable[Any]] = lambda items, total: items,
) -> list[PromptResult]:
    """Run every prompt once without and once with the Weaver for each builder, budget, temperature and rule.

    The rules are those of sampling; `coupled` is left out for builders that cannot be coupled. The Weaver's own
    `tree_config` is put back afterwards. `progress` wraps the iterator over the runs.
    """
    before, weaver.tree_config = weaver.tree_config, replace(weaver.tree_config)
    results: list[PromptResult] = []
    total = len(prompts) * len(temperatures)
    try:
        for index, prompt, temperature in progress(
            ((i, p, t) for t in temperatures for i, p in enumerate(prompts)), total
        ):
            inputs = tokenizer(prompt.prompt, return_tensors="pt").to(model.device)
            options = {"max_new_tokens": max_new_tokens, "do_sample": temperature > 0}
            if temperature > 0:
                options |= {"temperature": temperature, "top_k": 0, "top_p": 1.0}

            def timed(**kwargs: Any) -> tuple[list[int], float]:
                torch.manual_seed(seed)
                start = perf_counter()
                sequences = model.generate(**inputs, **{**options, **kwargs})  # noqa: B023 - called in this iteration
                ids = sequences[0, inputs.input_ids.shape[1] :].tolist()  # noqa: B023 - also waits for the device
                return ids, perf_counter() - start

            if not results:  # the first calls of a process pay for lazy loading: neither kind is timed then
                timed(max_new_tokens=2)
                timed(max_new_tokens=2, assistant_model=weaver)
            plain, plain_seconds = timed()
            if temperature > 0:
                seconds_a_token = plain_seconds / len(plain)
                weaver.tree_config.budget, weaver.tree_config.acceptance = 0, None
                plain, _ = timed(assistant_model=weaver)
                plain_seconds = seconds_a_token * len(plain)
            onset = loop_onset(inputs.input_ids[0].tolist(), plain)
            for builder, budget, rule in itertools.product(
                builders, budgets, acceptances if temperature > 0 else ("greedy",)
            ):
                if rule == "coupled" and not getattr(BUILDERS.get(builder), "needs_block", False):
                    continue
                weaver.tree_config.builder, weaver.tree_config.budget = builder, budget
                weaver.tree_config.acceptance = None if rule == "greedy" else rule
                output, seconds = timed(assistant_model=weaver)
                stats = weaver.stats
                assert stats is not None
                results.append(
                    PromptResult(
                        domain=prompt.domain,
                        index=index,
                        builder=builder,
                        budget=budget,
                        temperature=temperature,
                        acceptance=rule,
                        runs=stats.whole_runs,
                        loop_free_runs=runs_before(stats.whole_runs, onset),
                        expected=stats.expected[: len(stats.whole_runs)],
                        new_tokens=len(output),
                        target_passes=stats.target_passes,
                        drafted_nodes=stats.drafted_nodes,
                        identical=output == plain,
                        seconds=seconds,
                        plain_seconds=plain_seconds,
                    )
                )
    finally:
        weaver.tree_config = before
    return results


def summarize(results: Sequence[PromptResult], seed: int = 0) -> list[dict[str, Any]]:
    """One row for each temperature, builder, budget, rule and domain (and "all"): acceptance, its interval, time."""
    keys = sorted({(r.temperature, r.builder, r.budget, r.acceptance) for r in results})
    rows = []
    for key in keys:
        temperature, builder, budget, acceptance = key
        chosen = [r for r in results if (r.temperature, r.builder, r.budget, r.acceptance) == key]
        for domain in [d for d in DOMAINS if any(r.domain == d for r in chosen)] + ["all"]:
            part = [r for r in chosen if domain in (r.domain, "all")]
            seconds, plain = sum(r.seconds for r in part), sum(r.plain_seconds for r in part)
            rows.append(
                {
                    "temperature": temperature,
                    "builder": builder,
                    "budget": budget,
                    "acceptance": acceptance,
                    "domain": domain,
                    "prompts": len(part),
                    "identical": sum(r.identical for r in part),
                    "accepted_per_step": accepted([r.runs for r in part], seed),
                    "accepted_per_step_loop_free": accepted([r.loop_free_runs for r in part], seed),
                    "expected_per_step": mean_of(x for r in part for x in r.expected),
                    "expected_per_step_loop_free": mean_of(
                        x for r in part for x in r.expected[: len(r.loop_free_runs)]
                    ),
                    "tokens_per_pass": sum(r.new_tokens for r in part) / sum(r.target_passes for r in part),
                    "seconds": seconds,
                    "plain_seconds": plain,
                    "speedup": plain / seconds,
                }
            )
    return rows


def mean_of(values: Iterable[float]) -> float | None:
    """The mean, None of nothing."""
    values = list(values)
    return sum(values) / len(values) if values else None


def accepted(runs: Sequence[Sequence[int]], seed: int) -> dict[str, Any]:
    """Mean drafted tokens accepted a step, over steps and over prompts, with a bootstrap interval of the former."""
    runs = [run for run in runs if run]
    if not runs:
        return {"mean": None, "per_prompt_mean": None, "low": None, "high": None, "steps": 0}
    tokens = torch.tensor([float(sum(run) - len(run)) for run in runs])
    steps = torch.tensor([float(len(run)) for run in runs])
    generator = torch.Generator().manual_seed(seed)
    draws = torch.randint(len(runs), (BOOTSTRAP_SAMPLES, len(runs)), generator=generator)
    low, high = torch.quantile(tokens[draws].sum(1) / steps[draws].sum(1), torch.tensor([0.025, 0.975])).tolist()
    return {
        "mean": float(tokens.sum() / steps.sum()),
        "per_prompt_mean": float((tokens / steps).mean()),
        "low": low,
        "high": high,
        "steps": int(steps.sum()),
    }


def environment(model: Any) -> dict[str, Any]:
    """What a figure depends on: hardware, threads, versions, dtype."""
    device = model.device
    return {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or "cpu",
        "threads": torch.get_num_threads(),
        "dtype": str(model.dtype).removeprefix("torch."),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "weaver_hf": __version__,
    }


def report(results: Sequence[PromptResult], model: Any, settings: dict[str, Any], seed: int) -> dict[str, Any]:
    """Everything `weaver-hf bench --json` writes."""
    return {
        "environment": environment(model),
        "settings": settings,
        "summary": summarize(results, seed),
        "results": [asdict(result) for result in results],
    }
