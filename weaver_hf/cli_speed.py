"""The timing side of `weaver-hf bench`: whole calls and the parts of a step, on real or on random weights."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import typer
from rich.console import Console
from rich.table import Table

from .bench import load_prompts
from .bench.harness import environment
from .bench.shapes import random_pair
from .bench.speed import Method, Row, acceptance_for, bandwidth, measure, weight_bytes
from .cli_common import console_beside, load, write_json

__all__ = ["bench_speed"]

# Tokens a step of the paper's two systems on its 27B target: 8.07 for Weaver, and about 5.0 for its tuned chain, which
# follows from "+77 % accepted" (arXiv 2607.06763).
PAPER_WEAVER, PAPER_CHAIN = 8.07, 5.0
PLANTED = (4.0, 6.0, 8.0)
COMPILED = {"cache_implementation": "static"}


def methods_of(
    planted: Sequence[float] | None, depths: int, has_adapter: bool, stock: bool, levers: bool
) -> list[Method]:
    """The rows of a report.

    Args:
        planted: tokens a step to plant, None for real acceptance.
        depths: of the drafter's block.
        stock: with transformers' own decoding, eager and compiled.
        levers: with one setting of the tree changed at a time.
    """
    methods = []
    if stock:
        methods += [Method("stock eager"), Method("stock static + compile", options=COMPILED)]
    methods.append(Method("AR captured", "chain", 0))
    builders = [("chain", 7), ("chain", depths), ("marginal", 63), *([("weaver", 63)] if has_adapter else [])]
    if planted is None:
        methods += [Method(f"{builder} {budget}", builder, budget) for builder, budget in builders]
        return methods
    for builder, budget in builders:
        if builder == "marginal":
            continue
        tokens = PAPER_CHAIN if builder == "chain" else PAPER_WEAVER
        # A chain of 7 reaches what a chain of 15 would accept in its first 7 tokens.
        methods.append(Method(f"{builder} {budget}, as the paper", builder, budget, acceptance_for(tokens, depths)))
    last = "weaver" if has_adapter else "marginal"
    methods += [Method(f"{last} 63, {t:g} a step", last, 63, acceptance_for(t, depths)) for t in planted]
    if levers and has_adapter:
        changes: dict[str, dict[str, Any]] = {
            "8 rounds x 8 parents": {"rounds": 8, "parents": 8},
            "pool 128": {"pool": 128},
            "pool 256": {"pool": 256},
        }
        own = acceptance_for(PAPER_WEAVER, depths)
        methods += [Method(f"weaver 63, {name}", "weaver", 63, own, settings=c) for name, c in changes.items()]
    return methods


def bench_speed(
    *,
    target: str,
    weaver: str | None,
    shape: str | None,
    random_weights: bool,
    planted: list[float] | None,
    contexts: list[int],
    domains: list[str],
    prompts: int,
    new_tokens: int,
    stock: bool,
    levers: bool,
    fold: bool,
    seed: int,
    output: Path | None,
    figure: Path | None,
) -> None:
    """See the options of `weaver-hf bench`."""
    console = console_beside(output)
    if shape is not None:
        if not random_weights:
            raise typer.BadParameter("a shape has no weights: add --random-weights", param_hint="--shape")
        if not torch.cuda.is_available():
            raise typer.BadParameter("needs a CUDA device", param_hint="--shape")
        model, drafter = random_pair(shape, "cuda", seed=seed)
        planted = planted or list(PLANTED)
        generator = torch.Generator(device="cuda").manual_seed(seed)
        ids = torch.randint(2, model.config.vocab_size, (1, max(contexts)), device="cuda", generator=generator)
        groups = {f"{n} tokens": [ids[:, :n]] for n in contexts}
    else:
        model, tokenizer, drafter = load(target, weaver)
        texts = {domain: [p.prompt for p in load_prompts([domain], prompts)] for domain in domains}
        groups = {
            domain: [tokenizer(text, return_tensors="pt").input_ids.to(model.device) for text in group]
            for domain, group in texts.items()
        }
    drafter.attach(model, fold=fold)
    depths = drafter.config.block_size - 1
    methods = methods_of(planted, depths, drafter.has_adapter, stock, levers)
    log = Console(stderr=True, highlight=False, soft_wrap=True)
    rows = measure(model, drafter, groups, methods, new_tokens=new_tokens, fold=fold, progress=log.print)
    data: dict[str, Any] = {
        "environment": environment(model),
        "settings": {"shape": shape, "new_tokens": new_tokens, "seed": seed, "fold": fold, "target": target},
        "rows": [row.as_dict() for row in rows],
    }
    if model.device.type == "cuda":
        data["floor_ms"] = 1e3 * weight_bytes(model) / bandwidth(model.device)
    console.print(speed_table(rows, data))
    write_json(data, output, console)
    if figure is not None:
        draw(rows, figure)


def speed_table(rows: Sequence[Row], data: dict[str, Any]) -> Table:
    """One line a method and group; parts in milliseconds."""
    env = data["environment"]
    title = f"{env['device']}, {env['dtype']}, torch {env['torch']}, transformers {env['transformers']}"
    if "floor_ms" in data:
        title += f"; reading the weights takes {data['floor_ms']:.2f} ms"
    table = Table(title=title, caption="* planted acceptance: synthetic")
    for column in ("prompts", "method", "tokens/s", "x AR", "with prefill", "a step", "ms a step", "draft", "verify",
                   "accept", "GPU step", "host", "peak GiB"):  # fmt: skip
        table.add_column(column, justify="left" if column in ("prompts", "method") else "right")
    base = {row.group: row.tokens_per_second for row in rows if row.method == "AR captured"}
    for group in dict.fromkeys(row.group for row in rows):
        for row in (r for r in rows if r.group == group):
            values, parts = row.as_dict(), row.parts
            host = f"{values['ms_per_step'] - parts['step']:.2f}" if "step" in parts else ""
            cells = [f"{parts[name]:.2f}" if name in parts else "" for name in ("draft", "verify", "accept", "step")]
            table.add_row(
                group, row.method + (" *" if row.synthetic else ""), f"{row.tokens_per_second:.1f}",
                f"{row.tokens_per_second / base[group]:.2f}" if group in base else "",
                f"{values['tokens_per_second_with_prefill']:.1f}", f"{values['tokens_per_step']:.2f}",
                f"{values['ms_per_step']:.2f}", *cells, host, f"{row.peak_gib:.1f}",
            )  # fmt: skip
        table.add_section()
    return table


def draw(rows: Sequence[Row], path: Path) -> None:
    """Tokens a second of every method, a group of bars for each group of prompts."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    groups = list(dict.fromkeys(row.group for row in rows))
    methods = list(dict.fromkeys(row.method for row in rows))
    plot, axis = plt.subplots(figsize=(2 + 2 * len(groups), 5), layout="constrained")
    width = 0.8 / len(methods)
    for number, method in enumerate(methods):
        own = {row.group: row for row in rows if row.method == method}
        places = [i + number * width for i, group in enumerate(groups) if group in own]
        heights = [own[group].tokens_per_second for group in groups if group in own]
        synthetic = any(row.synthetic for row in own.values())
        label = method + (" (synthetic)" if synthetic else "")
        axis.bar(places, heights, width, label=label, hatch="//" if synthetic else None)
    axis.set_xticks([i + 0.4 - width / 2 for i in range(len(groups))], groups)
    axis.set_ylabel("tokens a second behind the prefill")
    axis.legend(fontsize="small", frameon=False)
    plot.savefig(path, dpi=100)
    plt.close(plot)
