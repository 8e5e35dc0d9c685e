"""`weaver-hf`: see a Weaver at work, measure one, and convert one."""

import sys
from pathlib import Path
from time import perf_counter
from typing import Annotated, Any

import torch
import transformers
import typer
from rich.columns import Columns
from rich.console import Console
from rich.panel import Panel
from rich.progress import Progress
from rich.prompt import Prompt as Ask
from rich.table import Table
from rich.text import Text
from transformers.generation.streamers import BaseStreamer

from .acceptance import LOSSY, RULES
from .bench import DOMAINS, load_prompts, run_bench
from .bench.harness import environment, report
from .bench.shapes import SHAPES
from .cli_check import certify_command, doctor_command
from .cli_common import JsonOption, TargetOption, WeaverOption, console_beside, load, write_json
from .cli_convert import convert
from .cli_hub import push
from .cli_speed import bench_speed
from .errors import EmptyPromptError, WeaverError
from .modeling_weaver import WeaverModel
from .tiny import TARGET
from .training.cli import app as train_app

app = typer.Typer(
    help="Lossless tree decoding for Hugging Face transformers.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)

app.add_typer(train_app, name="train")
app.command()(push)
app.command("doctor")(doctor_command)
app.command("certify")(certify_command)
app.command()(convert)

# In this order, one colour an accepted run; readable on dark and light backgrounds.
RUN_COLOURS = ("green", "blue", "magenta", "dark_orange3")
DEMO_PROMPT = (
    "Tom has 3 boxes. Each box holds 12 pencils. He gives 8 pencils to Ana. How many pencils does Tom have left?"
)


def main() -> None:
    """Entry point: a user's error is one line on stderr and exit code 2, never a traceback."""
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    try:
        app()
    except (WeaverError, OSError, torch.OutOfMemoryError) as error:
        Console(stderr=True).print(Text.assemble(("error: ", "bold red"), str(error)), soft_wrap=True)
        sys.exit(2)


@app.callback()
def _root() -> None:
    """Keeps `weaver-hf` a group of commands."""


@app.command()
def demo(
    prompt: Annotated[str, typer.Option(help="What to continue or answer.")] = DEMO_PROMPT,
    interactive: Annotated[
        bool, typer.Option("--interactive", "-i", help="Ask for prompts until an empty one.")
    ] = False,
    raw: Annotated[bool, typer.Option(help="Continue the text as it is, without the chat template.")] = False,
    target: TargetOption = str(TARGET),
    weaver: WeaverOption = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Length of the text.")] = 96,
    budget: Annotated[int | None, typer.Option(help="Drafted nodes a step; by default the Weaver's own.")] = None,
    output: JsonOption = None,
) -> None:
    """Write a text with trees, then without, and compare.

    Each accepted run of tokens has its own colour: one colour, one pass of the target. Exit code 1: in float32 they
    differ.

    [dim]Example:[/] weaver-hf demo --prompt "Once upon a time" --raw --max-new-tokens 64
    """
    console = console_beside(output)
    model, tokenizer, drafter = load(target, weaver)
    if budget is not None:
        drafter.tree_config.budget = budget
    shown = []
    while True:
        if interactive:
            prompt = Ask.ask("[bold]prompt[/] (empty to leave)", console=console, default="", show_default=False)
            if not prompt:
                break
        shown.append(show(console, model, tokenizer, drafter, prompt, raw, max_new_tokens))
        if not interactive:
            break
    write_json({"environment": environment(model), "texts": shown}, output, console)
    differs = not all(row["identical"] for row in shown)
    # In fp32 a difference is a fault; in bf16 tree and chain round differently, as prefill and decoding do.
    raise typer.Exit(1 if differs and model.dtype == torch.float32 else 0)


def show(
    console: Console, model: Any, tokenizer: Any, weaver: WeaverModel, prompt: str, raw: bool, max_new_tokens: int
) -> dict[str, Any]:
    """One prompt of the demo; returns both texts and what they cost."""
    if tokenizer.chat_template and not raw:
        chat = [{"role": "user", "content": prompt}]
        prompt_text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    else:
        prompt_text = prompt
    inputs = tokenizer(prompt_text, return_tensors="pt").to(model.device)
    length = inputs.input_ids.shape[1]
    if length == 0:
        raise EmptyPromptError("a prompt of 0 tokens", "at least 1 token", "Pass a text to continue as --prompt.")
    options = {"max_new_tokens": max_new_tokens, "do_sample": False}
    for assistant in ({}, {"assistant_model": weaver}):  # the first call of each kind pays for lazy loading
        model.generate(**inputs, **{**options, "max_new_tokens": 4}, **assistant)

    console.print(Text(prompt, style="dim"))
    start = perf_counter()
    assisted = model.generate(**inputs, **options, assistant_model=weaver, streamer=RunStreamer(tokenizer, console))[
        0, length:
    ].tolist()
    assisted_seconds = perf_counter() - start
    start = perf_counter()
    plain = model.generate(**inputs, **options)[0, length:].tolist()
    plain_seconds = perf_counter() - start
    stats = weaver.stats
    assert stats is not None

    def panel(title: str, ids: list[int]) -> Panel:
        text = tokenizer.decode(ids, skip_special_tokens=True)
        return Panel(Text(text), title=title, width=max(30, console.width // 2 - 1))

    console.print(Columns([panel("plain", plain), panel("with the Weaver", assisted)]))
    identical = assisted == plain
    same = next((i for i, (a, b) in enumerate(zip(assisted, plain)) if a != b), min(len(assisted), len(plain)))
    table = Table(title=f"identical: {'yes' if identical else f'NO, first at token {same}'}", title_justify="left")
    for column in ("", "target passes", "tokens", "tokens a pass", "seconds", "tokens/s"):
        table.add_column(column, justify="left" if column == "" else "right")
    for name, ids, passes, seconds in (
        ("plain", plain, len(plain), plain_seconds),
        ("with the Weaver", assisted, stats.target_passes, assisted_seconds),
    ):
        table.add_row(
            name, str(passes), str(len(ids)), f"{len(ids) / passes:.2f}", f"{seconds:.2f}", f"{len(ids) / seconds:.1f}"
        )
    console.print(table)
    if stats.best_tree is not None:
        console.print("The tree with the longest accepted path (*), each node with its probability given its parent:")
        console.print(Text(str(stats.best_tree.annotate(lambda ids: tokenizer.decode(ids)))), soft_wrap=True)
    return {
        "prompt": prompt,
        "identical": identical,
        "plain": {"text": tokenizer.decode(plain), "ids": plain, "seconds": plain_seconds},
        "weaver": {"text": tokenizer.decode(assisted), "ids": assisted, "seconds": assisted_seconds},
        "stats": stats.as_dict(),
    }


class RunStreamer(BaseStreamer):
    """Prints each run of tokens that a step emitted in its own colour, as soon as its text is complete."""

    def __init__(self, tokenizer: Any, console: Console) -> None:
        self.tokenizer, self.console = tokenizer, console
        self.ids: list[int] = []
        self.printed = ""
        self.runs = -1  # the prompt comes first

    def put(self, value: torch.Tensor) -> None:
        if self.runs >= 0:
            self.ids.extend(value.flatten().tolist())
            text = self.tokenizer.decode(self.ids, skip_special_tokens=True)
            if not text.endswith("\ufffd"):  # half a character: wait for the rest
                self._print(text)
        self.runs += 1

    def _print(self, text: str) -> None:
        colour = RUN_COLOURS[self.runs % len(RUN_COLOURS)]
        self.console.print(Text(text[len(self.printed) :], style=colour), end="", soft_wrap=True)
        self.printed = text

    def end(self) -> None:
        self._print(self.tokenizer.decode(self.ids, skip_special_tokens=True))  # what was still waiting
        self.console.print()


@app.command()
def bench(
    domain: Annotated[list[str] | None, typer.Option(help=f"Prompt domains: {', '.join(DOMAINS)}. [all]")] = None,
    prompts: Annotated[int, typer.Option(min=1, max=30, help="Prompts a domain.")] = 3,
    builder: Annotated[list[str] | None, typer.Option(help="Tree builders. [all that the Weaver can serve]")] = None,
    budget: Annotated[list[int] | None, typer.Option(min=1, help="Drafted nodes a step. [7, 15, 31]")] = None,
    temperature: Annotated[list[float] | None, typer.Option(min=0, help="0 is greedy. [0]")] = None,
    acceptance: Annotated[
        list[str] | None, typer.Option(help=f"Rules above temperature 0: {', '.join(RULES)}. [sample, coupled]")
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="New tokens a prompt.")] = 64,
    target: TargetOption = str(TARGET),
    weaver: WeaverOption = None,
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads; by default torch's own choice.")] = None,
    seed: Annotated[int, typer.Option(help="Of sampling and of the bootstrap.")] = 0,
    speed: Annotated[bool, typer.Option("--speed", help="Time calls and the parts of a step instead.")] = False,
    shape: Annotated[str | None, typer.Option(help=f"Time a published shape: {', '.join(SHAPES)}.")] = None,
    random_weights: Annotated[bool, typer.Option("--random-weights", help="Of --shape.")] = False,
    planted_acceptance: Annotated[
        list[float] | None, typer.Option(min=1, help="Tokens a step to plant: synthetic. [with --shape 4, 6, 8]")
    ] = None,
    context: Annotated[list[int] | None, typer.Option(min=1, help="Prompt tokens of --shape. [512]")] = None,
    stock: Annotated[bool, typer.Option(help="Time transformers' own decoding too, eager and compiled.")] = True,
    levers: Annotated[bool, typer.Option("--levers", help="Time one tree setting changed at a time, too.")] = False,
    fold: Annotated[bool, typer.Option("--fold", help="Let the adapter read folded tables.")] = False,
    figure: Annotated[Path | None, typer.Option(help="Draw tokens a second here (needs matplotlib).")] = None,
    output: JsonOption = None,
) -> None:
    """Measure acceptance and time by prompt domain, builder and budget.

    Accepted: drafted tokens accepted a step, mean over steps [95 % interval over prompts]; loop-free: of the steps
    before the text first repeats an 8-gram; expected: what the trees themselves expected in those. Options that are
    lists can be given several times. Exit code 1: in float32 a lossless text differs from plain decoding's.

    With --speed or --shape: tokens a second of whole calls and milliseconds of the parts of a captured step. A planted
    acceptance accepts drafted tokens whatever the target says, so that the loop is timed at a chosen acceptance.

    [dim]Example:[/] weaver-hf bench --domain math --domain code --budget 15 --prompts 30 --json bench.json
    [dim]Example:[/] weaver-hf bench --shape 27b --random-weights --planted-acceptance 8 --json speed.json
    """
    console = console_beside(output)
    if threads is not None:
        torch.set_num_threads(threads)
    if shape is not None and shape not in SHAPES:
        raise typer.BadParameter(f"unknown shape {shape!r}; choose from {', '.join(SHAPES)}", param_hint="--shape")
    if speed or shape is not None:
        bench_speed(
            target=target, weaver=weaver, shape=shape, random_weights=random_weights, planted=planted_acceptance,
            contexts=context or [512], domains=domain or list(DOMAINS), prompts=prompts, new_tokens=max_new_tokens,
            stock=stock, levers=levers, fold=fold, seed=seed, output=output, figure=figure,
        )  # fmt: skip
        return
    if random_weights or planted_acceptance or context or levers or fold or figure:
        raise typer.BadParameter("timing options need --speed or --shape")
    settings: dict[str, Any] = {
        "domains": domain or list(DOMAINS),
        "prompts": prompts,
        "builders": builder,
        "budgets": budget or [7, 15, 31],
        "temperatures": temperature or [0.0],
        "acceptances": acceptance or ["sample", "coupled"],
        "max_new_tokens": max_new_tokens,
        "target": target,
        "weaver": weaver,
        "seed": seed,
    }
    unknown = sorted(set(settings["domains"]) - set(DOMAINS))
    if unknown:
        raise typer.BadParameter(f"unknown domains {unknown}; choose from {', '.join(DOMAINS)}", param_hint="--domain")
    unknown = sorted(set(settings["acceptances"]) - set(RULES))
    if unknown:
        raise typer.BadParameter(f"unknown rules {unknown}; choose from {', '.join(RULES)}", param_hint="--acceptance")
    model, tokenizer, drafter = load(target, weaver)
    settings["builders"] = builder or [
        "suffix",
        *(["chain", "marginal"] if drafter.drafter is not None else []),
        *(["weaver"] if drafter.has_adapter else []),
    ]
    with Progress(console=Console(stderr=True), transient=True) as bar:
        results = run_bench(
            model,
            tokenizer,
            drafter,
            load_prompts(settings["domains"], prompts),
            builders=settings["builders"],
            budgets=settings["budgets"],
            temperatures=settings["temperatures"],
            acceptances=settings["acceptances"],
            max_new_tokens=max_new_tokens,
            seed=seed,
            progress=lambda items, total: bar.track(items, total=total, description="prompts"),
        )
    data = report(results, model, settings, seed)
    console.print(bench_table(data))
    write_json(data, output, console)
    differs = any(not result.identical for result in results if result.acceptance != LOSSY)
    raise typer.Exit(1 if differs and model.dtype == torch.float32 else 0)


def bench_table(data: dict[str, Any]) -> Table:
    """The summary of a bench report as a table."""
    env = data["environment"]
    table = Table(
        title=f"{data['settings']['max_new_tokens']} new tokens, {env['dtype']}, {env['device']}, "
        f"{env['threads']} threads, torch {env['torch']}, transformers {env['transformers']}"
    )
    columns = (
        "T",
        "builder",
        "budget",
        "rule",
        "domain",
        "accepted a step",
        "loop-free",
        "expected",
        "tokens a pass",
        "speed-up",
        "identical",
    )
    for column in columns:
        table.add_column(column, justify="left" if column in ("builder", "rule", "domain") else "right")

    def cell(value: dict[str, Any]) -> str:
        return "–" if value["mean"] is None else f"{value['mean']:.2f} [{value['low']:.2f}, {value['high']:.2f}]"

    for row in data["summary"]:
        table.add_row(
            f"{row['temperature']:g}",
            row["builder"],
            str(row["budget"]),
            row["acceptance"],
            row["domain"],
            cell(row["accepted_per_step"]),
            cell(row["accepted_per_step_loop_free"]),
            "–" if row["expected_per_step_loop_free"] is None else f"{row['expected_per_step_loop_free']:.2f}",
            f"{row['tokens_per_pass']:.2f}",
            f"{row['speedup']:.2f}x",
            f"{row['identical']}/{row['prompts']}",
            end_section=row["domain"] == "all",
        )
    return table


if __name__ == "__main__":
    main()
