"""`weaver-hf convert`: other layouts, and what serving engines load, with the command that starts them."""

import json
import shlex
from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import typer
from transformers import AutoConfig

from .checkpoints import speculators, trymirai, zlab
from .cli_common import JsonOption, console_beside, write_json
from .errors import CheckpointError
from .modeling_weaver import WeaverModel

__all__ = ["convert"]

SGLANG_BUDGET = 64  # what the fork publishes its numbers with


class Layout(str, Enum):
    """What `convert` writes."""

    weaver = "weaver"
    zlab = "zlab"
    speculators = "speculators"
    trymirai = "trymirai"
    sglang = "sglang"
    vllm = "vllm"


def convert(
    source: Annotated[str, typer.Argument(help="Drafter, with or without an adapter: a local folder or a Hub id.")],
    destination: Annotated[Path, typer.Argument(help="Folder to write; for trymirai also a .pth file.")],
    to: Annotated[Layout, typer.Option(help="Layout, or serving engine, to write.")] = Layout.weaver,
    adapter: Annotated[
        str | None, typer.Option(help="Adapter to put beside the drafter: a .pth file, a local folder or a Hub id.")
    ] = None,
    target: Annotated[
        str | None, typer.Option(help="For serving engines: the target to serve. [the one that the artifact names]")
    ] = None,
    output: JsonOption = None,
) -> None:
    """Write a drafter or an adapter in another layout; tensors are never changed, but a PEFT folder is merged.

    weaver: ours, drafter and adapter in one folder. zlab, speculators: the drafter, for DFlash tools.
    trymirai: the adapter as the authors' file. sglang, vllm: all that the engine can use, and the command to serve it.

    [dim]Example:[/] weaver-hf convert z-lab/Qwen3.6-27B-DFlash both --adapter trymirai/weaver
    """
    if destination.is_file() or (destination.is_dir() and any(destination.iterdir())):
        raise typer.BadParameter(f"{destination} is there already; name a new one", param_hint="DESTINATION")
    engine = to in (Layout.sglang, Layout.vllm)
    if target is not None and not engine:
        raise typer.BadParameter(f"{to.value} names no target; it goes with sglang and vllm", param_hint="--target")
    weaver = WeaverModel.from_pretrained(source, adapter=adapter).merge_adapter()
    console, command = console_beside(output), None
    if engine:
        served = named_target(weaver, target)
        command = (sglang if to is Layout.sglang else vllm)(weaver, destination, served)
    elif to is Layout.weaver:
        weaver.save_pretrained(destination)
    elif to is Layout.trymirai:
        trymirai.write(weaver, destination)
    else:
        {Layout.zlab: zlab, Layout.speculators: speculators}[to].write(weaver, destination)
    if weaver.has_adapter and to in (Layout.zlab, Layout.speculators, Layout.vllm):
        console.print("The adapter is no part of this layout; write it with --to trymirai.", soft_wrap=True)
    console.print(f"written to {destination}", soft_wrap=True, markup=False)
    if command is not None:
        console.print(command, soft_wrap=True, markup=False)
    result = {"source": source, "layout": to.value, "destination": str(destination), "command": command}
    write_json(result, output, console)


def named_target(weaver: WeaverModel, name: str | None) -> Any:
    """The config of the target to serve, after checking that the Weaver was made for such a target.

    Raises:
        CheckpointError: nobody names a target, or another kind of target is named.
        OSError: nothing is there.
    """
    name = name or weaver.config.base_model_name_or_path
    if name is None:
        raise CheckpointError(
            "an artifact that does not name its target",
            "the target to serve",
            "Pass it as --target.",
        )
    try:
        config = AutoConfig.from_pretrained(name)
    except ValueError as error:  # transformers' own words for a folder that holds something else
        raise CheckpointError(
            f"no model in {name} ({error})", "the target to serve", "Pass its folder or Hub id as --target."
        ) from error
    weaver.config.check_target(config)
    weaver.config.base_model_name_or_path = name
    return config


def sglang(weaver: WeaverModel, folder: Path, target: Any) -> str:
    """`drafter/` in z-lab's layout and, where there is an adapter, `weaver.pth`; returns the command.

    The adapter needs the authors' fork (github.com/trymirai/sglang), a drafter alone any SGLang with DFlash.
    """
    drafter = folder / "drafter"
    zlab.write(weaver, drafter)
    complete(drafter, target)
    options = {"--model-path": weaver.config.base_model_name_or_path, "--speculative-draft-model-path": drafter}
    if weaver.has_adapter:
        trymirai.write(weaver, folder)
        # The published command less what depends on the card (attention backends, memory).
        options |= {
            "--speculative-algorithm": "DFLASH_TFM",
            "--speculative-dflash-tfm-path": folder / "weaver.pth",
            "--speculative-dflash-tfm-tree-budget": weaver.tree_config.budget or SGLANG_BUDGET,
            "--speculative-gdn-verify-kernel": "chunk",
            "--page-size": 64,
            "--tp-size": 1,
            "--disable-radix-cache": None,
            "--disable-overlap-schedule": None,
        }
    else:
        options |= {
            "--speculative-algorithm": "DFLASH",
            "--speculative-num-draft-tokens": weaver.config.block_size,
        }
        if "linear_attention" in (getattr(target.get_text_config(), "layer_types", None) or []):
            options["--mamba-scheduler-strategy"] = "extra_buffer"
    return command_line("python3 -m sglang.launch_server", options)


def vllm(weaver: WeaverModel, folder: Path, target: Any) -> str:
    """The drafter in the layout that vLLM runs it from as it was trained; returns the command.

    That is speculators', but for drafters with causal and other layers side by side: vLLM reads one causality for all
    layers from it, and each layer's own from z-lab's.
    """
    if speculators.one_causality(weaver.config):
        speculators.write(weaver, folder)
    else:
        zlab.write(weaver, folder)
    complete(folder, target)
    settings = {"method": "dflash", "model": str(folder), "num_speculative_tokens": weaver.config.block_size - 1}
    options = {"--speculative-config": json.dumps(settings)}
    return command_line(f"vllm serve {shlex.quote(str(weaver.config.base_model_name_or_path))}", options)


def complete(folder: Path, target: Any) -> None:
    """Put into a written `config.json` what engines want to know of the target."""
    path = folder / "config.json"
    described = json.loads(path.read_text())
    text = target.get_text_config()
    # Without it the drafter counts as made for 32,768 tokens, which would bound the target's context too.
    described.get("transformer_layer_config", described)["max_position_embeddings"] = text.max_position_embeddings
    if "speculators_config" in described:
        described["speculators_config"]["verifier"]["architectures"] = target.architectures or []
    path.write_text(json.dumps(described, indent=2) + "\n")


def command_line(program: str, options: dict[str, Any]) -> str:
    """A command to copy, an option a line; None stands for a switch."""
    words = [name if value is None else f"{name} {shlex.quote(str(value))}" for name, value in options.items()]
    return " \\\n  ".join([program, *words])
