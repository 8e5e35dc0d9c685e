"""`weaver-hf push`: publish an artifact with a card of facts."""

import json
from pathlib import Path
from typing import Annotated

import typer
from huggingface_hub.errors import HfHubHTTPError
from rich.console import Console

from .errors import PublishError
from .modeling_weaver import WeaverModel

__all__ = ["push"]


def push(
    folder: Annotated[Path, typer.Argument(help="The artifact: ours, or a PEFT folder over a drafter.")],
    repo_id: Annotated[str, typer.Argument(help="Repository on the Hub; made where it is not there.")],
    licence: Annotated[str | None, typer.Option("--licence", help="The Hub's identifier, as apache-2.0.")] = None,
    acceptance: Annotated[
        Path | None, typer.Option(help="What `weaver-hf bench --json` wrote. [FOLDER/acceptance.json]")
    ] = None,
    target: Annotated[str | None, typer.Option(help="Hub id of the target. [the config's]")] = None,
    target_revision: Annotated[str | None, typer.Option(help="Its commit. [the config's]")] = None,
    tokenizer: Annotated[str | None, typer.Option(help="Folder or Hub id. [the target's]")] = None,
    custom_generate: Annotated[
        bool, typer.Option("--custom-generate", help="Add what `generate(..., custom_generate=REPO_ID)` runs.")
    ] = False,
    private: Annotated[bool, typer.Option("--private", help="Make a new repository private.")] = False,
    revision: Annotated[str | None, typer.Option(help="Branch to push to. [main]")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the commit as JSON.")] = False,
) -> None:
    """Upload weights, config, tokenizer and a model card of facts, in one commit.

    Refused without the target's Hub id and revision, a licence and an acceptance table. The token is that of
    `hf auth login`, or HF_TOKEN.

    [dim]Example:[/] weaver-hf push weaver org/weaver --licence apache-2.0 --acceptance bench.json
    """
    if not folder.is_dir():
        raise typer.BadParameter(f"there is no folder {folder}", param_hint="FOLDER")
    weaver = WeaverModel.from_pretrained(folder)
    weaver.config.base_model_name_or_path = target or weaver.config.base_model_name_or_path
    weaver.config.base_model_revision = target_revision or weaver.config.base_model_revision
    try:
        commit = weaver.push_to_hub(
            repo_id,
            licence=licence,
            acceptance=acceptance,
            tokenizer=tokenizer,
            history=folder,
            custom_generate=custom_generate,
            private=private or None,
            revision=revision,
        )
    except HfHubHTTPError as error:
        raise PublishError(
            f"a refusal of the Hub ({str(error).strip().splitlines()[0]})",
            f"write access to {repo_id}",
            "Log in with `hf auth login`, and check the repository's name.",
        ) from error
    if as_json:
        typer.echo(json.dumps({"repo_id": repo_id, "commit": commit.oid, "url": commit.commit_url}))
    else:
        Console(highlight=False).print(f"pushed to {commit.commit_url}", soft_wrap=True, markup=False)
