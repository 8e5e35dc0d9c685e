"""`weaver-hf doctor` and `weaver-hf certify`."""

from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from rich.text import Text as Styled

from .bench import load_prompts
from .certify import Certificate, Text, certify, read_texts, write_texts
from .cli_common import JsonOption, console_beside, load_target, load_weaver, write_json
from .doctor import Report, examine, faults_of, record
from .errors import CheckpointError
from .tiny import TARGET, WEAVER

__all__ = ["certify_command", "doctor_command"]

TargetArgument = Annotated[str, typer.Argument(help="Target: a local folder or a Hub id. [the embedded one]")]
WeaverArgument = Annotated[str, typer.Argument(help="Weaver: a local folder or a Hub id. [the embedded one]")]
COLOURS = {"ok": "green", "warn": "yellow", "fault": "bold red"}


def progress_of(bar: Progress, what: str) -> Any:
    return lambda items: bar.track(items, description=what)


def doctor_command(
    target: TargetArgument = str(TARGET),
    weaver: WeaverArgument = str(WEAVER),
    keep: Annotated[
        bool,
        typer.Option("--record", help="Write what was measured into the artifact's config.json, for later."),
    ] = False,
    output: JsonOption = None,
) -> None:
    """Find out why a Weaver accepts less than it should, or runs slower.

    The target writes a few short texts; the drafter predicts them as declared and as it might have been meant. Exit
    code 0: no fault; 1: a fault; 2: it could not be examined.

    [dim]Example:[/] weaver-hf doctor Qwen/Qwen3.5-4B z-lab/Qwen3.5-4B-DFlash --json report.json
    """
    console = console_beside(output)
    model, tokenizer = load_target(target)
    try:
        loaded = load_weaver(target, weaver)
    except CheckpointError as error:  # an artifact that does not load is what this command is asked about
        report = Report([faults_of("artifact", error)])
    else:
        with Progress(console=Console(stderr=True), transient=True) as bar:
            report = examine(model, tokenizer, loaded, progress=progress_of(bar, "checks"))
    console.print(findings_table(report))
    console.print("healthy" if report.healthy else "not healthy")
    write_json(report.as_dict(), output, console)
    if keep:
        record(report, Path(weaver))
        console.print(f"recorded in {Path(weaver) / 'config.json'}", soft_wrap=True, markup=False)
    raise typer.Exit(0 if report.healthy else 1)


def findings_table(report: Report) -> Table:
    """A line a finding; what to do below those that ask for something."""
    table = Table(show_lines=False)
    for column in ("check", "", "found"):
        table.add_column(column)
    for finding in report.findings:
        words = [finding.found]
        words += [f"expected: {finding.expected}"] if finding.expected else []
        words += [finding.fix] if finding.fix else []
        status = Styled(finding.status, style=COLOURS[finding.status])
        table.add_row(Styled(finding.name), status, Styled("\n".join(words)))
    return table


def certify_command(
    target: TargetArgument = str(TARGET),
    weaver: WeaverArgument = str(WEAVER),
    text: Annotated[
        Path | None, typer.Option(help="Replay the texts of this file, which an earlier --json wrote; no Weaver runs.")
    ] = None,
    prompt: Annotated[list[str] | None, typer.Option(help="Text to continue. [a bench prompt of each domain]")] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="New tokens a prompt.")] = 48,
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16"],
        typer.Option(help="Of the target. auto: float32 on a CPU, the checkpoint's otherwise."),
    ] = "auto",
    output: JsonOption = None,
) -> None:
    """Write texts greedily with trees and replay them in stock code: the first difference, and how large it is.

    Beside it stands how often stock's own prefill and decoding disagree on the same text. Exit code 0: the same tokens;
    1: a difference of tokens, or of logits beyond rounding; 2: it could not be tried.

    [dim]Example:[/] weaver-hf certify Qwen/Qwen3.5-4B z-lab/Qwen3.5-4B-DFlash --dtype bfloat16 --json texts.json
    """
    console = console_beside(output)
    saved = None if text is None else read_texts(text)
    if saved is not None and prompt:
        raise typer.BadParameter("a file of texts brings its own prompts", param_hint="--prompt")
    model, tokenizer = load_target(target, **({} if dtype == "auto" else {"dtype": getattr(torch, dtype)}))
    with Progress(console=Console(stderr=True), transient=True) as bar:
        texts = saved if saved is not None else written(model, tokenizer, target, weaver, prompt, max_new_tokens, bar)
        certificate = certify(model, texts, progress_of(bar, "replaying"))
    console.print(certificate_table(certificate, tokenizer))
    words = "identical" if certificate.identical else "different where logits are as close as rounding makes them"
    console.print(words if certificate.sound else "NOT the target's text: more than rounding differs")
    write_json(certificate.as_dict(), output, console)
    raise typer.Exit(0 if certificate.identical and certificate.sound else 1)


def written(
    model: Any, tokenizer: Any, target: str, weaver: str, prompt: list[str] | None, max_new_tokens: int, bar: Progress
) -> list[Text]:
    """Texts by the Weaver, which then leaves: they are replayed by the stock classes."""
    prompts = prompt or [row.prompt for row in load_prompts(per_domain=1)]
    attached = load_weaver(target, weaver).attach(model)
    try:
        ids = [tokenizer(row).input_ids for row in prompts]
        return write_texts(model, attached, ids, max_new_tokens, progress_of(bar, "writing"))
    finally:
        attached.detach()


def certificate_table(certificate: Certificate, tokenizer: Any) -> Table:
    """A line a text."""
    table = Table(title=f"{certificate.dtype}; logits as shares of the largest", title_justify="left")
    for column in ("prompt", "tokens", "first difference", "gap", "logits off", "stock's own", "stock's own choices"):
        table.add_column(column, justify="left" if column == "prompt" else "right")
    for replay in certificate.replays:
        drift = "–" if replay.drift is None else f"{replay.drift:.1e}"
        table.add_row(
            Styled(repr(tokenizer.decode(replay.prompt_ids[-12:]))),
            str(len(replay.output_ids)),
            "none" if replay.first is None else f"{replay.first} (of {replay.differences})",
            f"{replay.gap:.3g}" + ("" if replay.gap <= replay.allowed_gap else f" > {replay.allowed_gap:.3g}"),
            drift + ("" if replay.drift is None or replay.drift <= replay.allowed_drift else " !"),
            f"{replay.stock_drift:.1e}",
            f"{replay.stock_differences} differ",
        )
    return table
