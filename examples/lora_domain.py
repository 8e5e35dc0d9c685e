"""Adapt the embedded drafter to one domain with LoRA, and see what is accepted before and after, in the domain and out.

    python examples/lora_domain.py --domain code

The domain's bench prompts are split in halves. From the first tokens of one half the target writes more prompts of its
own, and completes all of them: that is the training data. The other half, and prompts of the other domains, are what is
measured. A training text that shares 13 tokens in a row with a measured prompt is dropped. The result is a PEFT folder:

    WeaverModel.from_pretrained(folder).attach(model)
"""

import argparse
import json
import random
from dataclasses import asdict
from pathlib import Path
from time import perf_counter

import torch
import transformers

from weaver_hf import WeaverModel, load_tiny
from weaver_hf.bench import DOMAINS, Prompt, load_prompts, run_bench
from weaver_hf.bench.harness import accepted, environment
from weaver_hf.peft_weaver import DRAFTER_TARGETS, add_lora
from weaver_hf.tiny import WEAVER
from weaver_hf.training.blocks import LossConfig
from weaver_hf.training.data import OVERLAP, Sequences, complete, write_prompts
from weaver_hf.training.drafter import DrafterTrainConfig, train

EVEN = slice(0, None, 2)  # what is trained on
ODD = slice(1, None, 2)  # what is measured


def grams(ids: list[int]) -> set[tuple[int, ...]]:
    return {tuple(ids[i : i + OVERLAP]) for i in range(len(ids) - OVERLAP + 1)}


def make_domain_data(model, tokenizer, prompts: list[Prompt], measured: list[Prompt], args) -> tuple[Sequences, int]:
    """Completions of the prompts and of prompts that the target writes after their first tokens, and the dropped."""
    rng = random.Random(args.seed)
    given = [tokenizer(prompt.prompt).input_ids for prompt in prompts]
    shared = set().union(*map(grams, given))  # boilerplate of the domain, which its measured prompts hold too
    forbidden = set().union(*(grams(tokenizer(prompt.prompt).input_ids) for prompt in measured)) - shared
    parts, dropped = [], 0
    for index in range(-(-args.sequences // args.batch_size)):
        torch.manual_seed(args.seed + index)
        batch = [rng.choice(given) for _ in range(args.batch_size)]
        if index % 4:  # three batches of four are of the target's own prompts
            batch = write_prompts(model, batch, 96, tokenizer.pad_token_id)
        temperature = (1.0, 0.7, 0.0)[index % 3]
        shard = complete(model, batch, temperature, args.new_tokens, tokenizer.pad_token_id)
        texts = shard["tokens"].split(shard["lengths"].tolist())
        for text, prompt_length in zip(texts, shard["prompt_lengths"].tolist(), strict=True):
            if grams(text.tolist()) & forbidden:
                dropped += 1
            else:
                parts.append((text, prompt_length, temperature))
    rng.shuffle(parts)
    lengths = torch.tensor([len(text) for text, _, _ in parts])
    return Sequences(
        tokens=torch.cat([text for text, _, _ in parts]),
        offsets=lengths.cumsum(0) - lengths,
        lengths=lengths,
        prompt_lengths=torch.tensor([length for _, length, _ in parts]),
        temperatures=torch.tensor([temperature for _, _, temperature in parts]),
    ), dropped


def measure(model, tokenizer, weaver: WeaverModel, sets: dict[str, list[Prompt]], args) -> dict[str, dict]:
    """Accepted drafted tokens a step of marginal trees of 15 nodes in each set of prompts; up to a loop at T = 0."""
    table = {}
    for name, prompts in sets.items():
        results = run_bench(
            model,
            tokenizer,
            weaver,
            prompts,
            builders=["marginal"],
            budgets=[15],
            temperatures=[0.0, 1.0],
            acceptances=["sample"],
            max_new_tokens=48,
            seed=args.seed,
        )
        assert all(result.identical for result in results), "the text is the target's own, whatever drafts it"
        for temperature in (0.0, 1.0):
            chosen = [r for r in results if r.temperature == temperature]
            runs = [r.runs if temperature else r.loop_free_runs for r in chosen]
            table[f"{name}, T={temperature:g}"] = accepted(runs, args.seed)
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--domain", choices=DOMAINS, default="code")
    parser.add_argument("--out", type=Path, default=Path("lora-domain"), help="where the PEFT folder goes")
    parser.add_argument("--sequences", type=int, default=192)
    parser.add_argument("--new-tokens", type=int, default=96)
    parser.add_argument("--batch-size", type=int, default=48, help="of the target's writing")
    parser.add_argument("--anchors", type=int, default=200_000, help="blocks to train on at most")
    parser.add_argument("--max-seconds", type=float, default=300, help="of training")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--learning-rate", type=float, default=2e-3)
    parser.add_argument("--others", type=int, default=1, help="measured prompts of each other domain")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    transformers.logging.set_verbosity_error()
    torch.manual_seed(args.seed)
    model, tokenizer, weaver = load_tiny()
    own = load_prompts([args.domain])
    sets = {
        f"in {args.domain}": own[ODD],
        "out of it": [p for d in DOMAINS if d != args.domain for p in load_prompts([d])[ODD][: args.others]],
    }
    start = perf_counter()
    before = measure(model, tokenizer, weaver, sets, args)
    weaver.detach()
    print(f"measured in {perf_counter() - start:.0f} s", flush=True)

    start = perf_counter()
    data, dropped = make_domain_data(model, tokenizer, own[EVEN], [p for part in sets.values() for p in part], args)
    print(f"{len(data)} texts in {perf_counter() - start:.0f} s, {dropped} dropped for overlap", flush=True)
    start = perf_counter()
    adapted = WeaverModel.from_pretrained(WEAVER).float()
    add_lora(adapted, DRAFTER_TARGETS, args.rank, 2 * args.rank)
    config = DrafterTrainConfig(
        anchors=args.anchors,
        batch_size=8,
        anchors_per_sequence=16,
        width=224,
        held_out=32,
        max_seconds=args.max_seconds,
        optimizer="adamw",
        learning_rate=args.learning_rate,
        seed=args.seed,
        evaluate_every=600,
        loss=LossConfig(weighting="dpace"),
    )
    train(model, adapted, data, args.out, config, tokenizer.pad_token_id)
    print(f"trained in {perf_counter() - start:.0f} s", flush=True)

    adapted = WeaverModel.from_pretrained(args.out).attach(model)
    after = measure(model, tokenizer, adapted, sets, args)
    print(f"{'accepted drafted tokens a step':40}  before                after")
    for name in before:
        cells = [f"{x['mean']:.2f} [{x['low']:.2f}, {x['high']:.2f}]" for x in (before[name], after[name])]
        ratio = after[name]["mean"] / before[name]["mean"]
        print(f"{name:40}  {cells[0]:20}  {cells[1]:20}  {ratio:.2f}x")
    report = {"environment": environment(model), "training": asdict(config), "before": before, "after": after}
    report["command"] = {key: str(value) for key, value in vars(args).items()}
    (args.out / "domain.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
