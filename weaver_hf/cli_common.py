"""What the commands of `weaver-hf` share: options, loading, results as JSON."""

import json
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from transformers import AutoModelForCausalLM, AutoTokenizer

from .configuration_weaver import WeaverConfig
from .errors import CheckpointError
from .modeling_weaver import WeaverModel
from .tiny import TARGET, WEAVER

__all__ = ["JsonOption", "TargetOption", "WeaverOption", "console_beside", "load", "load_target", "write_json"]

TargetOption = Annotated[str, typer.Option(help="Target: a local folder or a Hub id.")]
WeaverOption = Annotated[
    str | None,
    typer.Option(help="Weaver: a local folder or a Hub id. [the embedded one; for other targets one without weights]"),
]
JsonOption = Annotated[
    Path | None, typer.Option("--json", help="Also write everything to this file; - is standard output.")
]


def load_target(target: str, **options: Any) -> tuple[Any, Any]:
    """Target and tokenizer: fp32 on a CPU, the checkpoint's dtype on an accelerator.

    Args:
        options: of `from_pretrained`, instead of those.

    Raises:
        CheckpointError: the folder holds something else.
        OSError: nothing is there.
    """
    by_device: dict[str, Any] = {"dtype": torch.float32}
    if torch.cuda.is_available():
        by_device = {"dtype": "auto", "device_map": "auto"}
    try:
        model = AutoModelForCausalLM.from_pretrained(target, **{**by_device, **options})
        return model, AutoTokenizer.from_pretrained(target)
    except ValueError as error:  # transformers' own words for a folder that holds something else
        raise CheckpointError(
            f"no causal language model in {target} ({str(error).splitlines()[0]})",
            "a folder or Hub id that AutoModelForCausalLM loads",
            "Pass the target here, and the Weaver in its own place.",
        ) from error


def load_weaver(target: str, weaver: str | None) -> WeaverModel:
    """A Weaver, by default the one that belongs to this target."""
    if weaver is None and target == str(TARGET):
        weaver = str(WEAVER)
    return WeaverModel(WeaverConfig()) if weaver is None else WeaverModel.from_pretrained(weaver)


def load(target: str, weaver: str | None, **options: Any) -> tuple[Any, Any, WeaverModel]:
    """Target, tokenizer and attached Weaver."""
    model, tokenizer = load_target(target, **options)
    return model, tokenizer, load_weaver(target, weaver).attach(model)


def console_beside(output: Path | None) -> Console:
    """Where a command prints for people: standard error where standard output is for JSON."""
    return Console(highlight=False, stderr=str(output) == "-")


def write_json(data: Any, output: Path | None, console: Console) -> None:
    """Write a command's result where `--json` says, if it says so."""
    if output is None:
        return
    text = json.dumps(data, indent=1)
    if str(output) == "-":
        print(text)
        return
    output.write_text(text + "\n", encoding="utf-8")
    console.print(f"written to {output}", soft_wrap=True, markup=False)
