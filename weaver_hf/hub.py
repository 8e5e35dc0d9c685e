"""Publishing: the model card, filled from facts alone, and the upload.

A card says what the artifact itself, the trainer's files and a bench report say. What none of them says stands in the
card as "not recorded". Without target, its revision, licence and acceptance table nothing is published.
"""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from huggingface_hub import CommitInfo, HfApi, ModelCard, ModelCardData
from transformers import AutoTokenizer

from .configuration_weaver import TreeConfig
from .errors import PublishError

if TYPE_CHECKING:
    from .modeling_weaver import WeaverModel

__all__ = ["PUSH_OPTIONS", "card_facts", "make_card", "push", "read_acceptance", "training_files"]

#: What `save_pretrained(push_to_hub=True)` hands on to `push`.
PUSH_OPTIONS = (
    "acceptance",
    "commit_description",
    "commit_message",
    "create_pr",
    "history",
    "licence",
    "private",
    "revision",
    "tags",
    "tokenizer",
)

# In a wheel the folder is part of the package, in a checkout it stands beside it.
TEMPLATE = next(
    (
        folder / "weaver.md"
        for folder in (Path(__file__).parent / "model_cards", Path(__file__).parents[1] / "model_cards")
        if (folder / "weaver.md").is_file()
    ),
    Path(__file__).parent / "model_cards" / "weaver.md",
)
_TRAINER_FILES = ("train_command.txt", "train_data.json", "log.jsonl", "acceptance.png")
_SUMMARY_FIELDS = ("temperature", "builder", "budget", "acceptance", "domain", "prompts", "accepted_per_step")


def push(
    weaver: "WeaverModel",
    repo_id: str,
    *,
    licence: str | None = None,
    acceptance: str | Path | dict[str, Any] | None = None,
    tokenizer: Any = None,
    history: str | Path | None = None,
    custom_generate: bool = False,
    tags: Sequence[str] | None = None,
    private: bool | None = None,
    revision: str | None = None,
    create_pr: bool = False,
    commit_message: str = "Upload Weaver",
    commit_description: str | None = None,
    token: bool | str | None = None,
    max_shard_size: int | str = "50GB",
) -> CommitInfo:
    """Upload a Weaver in one commit: weights, config, tokenizer, card, acceptance table, training record.

    Args:
        weaver: with `config.base_model_name_or_path` and `config.base_model_revision` set.
        repo_id: made where it is not there.
        licence: the Hub's identifier, as in `"apache-2.0"`.
        acceptance: what `weaver-hf bench --json` wrote for this Weaver. By default `acceptance.json` in `history`.
        tokenizer: the target's: itself, a folder or a Hub id. By default that of the target at its revision.
        history: folder with the trainer's files. By default the one that the Weaver was loaded from.
        custom_generate: add `custom_generate/`, so that `generate(..., custom_generate=repo_id)` decodes with it.
        tags: besides those of every Weaver.
        private, revision, create_pr, commit_message, commit_description, token, max_shard_size: as in transformers.

    Returns:
        The Hub's answer; its text is the commit's URL.

    Raises:
        PublishError: a fact is missing that every published card must have. Nothing has been uploaded then.
        OSError: the tokenizer cannot be loaded.
    """
    if history is None and weaver.peft_adapter is None and Path(weaver.name_or_path or "/nowhere").is_dir():
        history = weaver.name_or_path
    folder = None if history is None else Path(history)
    if acceptance is None and folder is not None and (folder / "acceptance.json").is_file():
        acceptance = folder / "acceptance.json"
    report = None if acceptance is None else read_acceptance(acceptance)
    _require(weaver, licence, report)
    if tokenizer is None or isinstance(tokenizer, str | Path):
        config = weaver.config
        name = tokenizer or config.base_model_name_or_path
        at = {"revision": config.base_model_revision} if tokenizer is None else {}
        tokenizer = AutoTokenizer.from_pretrained(name, token=token, **at)
    size = weaver.config.vocab_size
    if size is not None and len(tokenizer) > size:
        raise PublishError(
            f"a tokenizer of {len(tokenizer)} tokens",
            f"the target's, of at most {size}",
            "Pass the target's tokenizer as `tokenizer=` (--tokenizer).",
        )
    facts = card_facts(weaver, repo_id, licence, report, tokenizer, folder, custom_generate)
    with TemporaryDirectory() as made:
        weaver.save_pretrained(made, custom_generate=custom_generate, max_shard_size=max_shard_size)
        tokenizer.save_pretrained(made)
        (Path(made) / "acceptance.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
        for name, file in training_files(folder).items():
            (Path(made) / name).parent.mkdir(exist_ok=True)
            shutil.copyfile(file, Path(made) / name)
        make_card(facts, tags or ()).save(Path(made) / "README.md")
        api = HfApi(token=token)
        repo_id = api.create_repo(repo_id, private=private, exist_ok=True).repo_id
        if revision is not None and not create_pr and not revision.startswith("refs/pr"):
            api.create_branch(repo_id, branch=revision, exist_ok=True)
        return api.upload_folder(
            repo_id=repo_id,
            folder_path=made,
            revision=revision,
            create_pr=create_pr,
            commit_message=commit_message,
            commit_description=commit_description,
        )


def _require(weaver: "WeaverModel", licence: str | None, report: dict[str, Any] | None) -> None:
    """Raise where a fact is missing without which nothing is published."""
    target, commit = weaver.config.base_model_name_or_path, weaver.config.base_model_revision
    missing = {
        "the target's Hub id (`weaver.config.base_model_name_or_path`, --target)": target,
        "the target's revision (`weaver.config.base_model_revision`, --target-revision)": commit,
        "a licence (`licence=`, --licence)": licence,
        "an acceptance table (`acceptance=`, --acceptance: what `weaver-hf bench --json` writes)": report,
    }
    lacking = [name for name, value in missing.items() if not value]
    if lacking:
        raise PublishError(
            f"an artifact without {'; '.join(lacking)}",
            "all four, so that others can tell what it drafts for, and how well",
            "Add what is missing and push again; nothing was uploaded.",
        )
    locals_ = {"target": target}
    if weaver.peft_adapter is not None:
        locals_["drafter that the PEFT adapter lies over"] = (
            weaver.peft_config[weaver.peft_adapter].base_model_name_or_path or weaver.name_or_path
        )
    for role, name in locals_.items():
        if not name or Path(name).exists():
            raise PublishError(
                f"a local folder {name} as the {role}",
                "its Hub id, which others can load",
                "Publish it first, and name it by its id.",
            )
    assert report is not None
    measured_on = report.get("settings", {}).get("target")
    if measured_on and not Path(measured_on).exists() and measured_on != target:
        raise PublishError(
            f"an acceptance table measured on {measured_on}",
            f"one measured on {target}, the target of this Weaver",
            f"Run `weaver-hf bench --target {target} --weaver FOLDER --json acceptance.json`.",
        )


def read_acceptance(report: str | Path | dict[str, Any]) -> dict[str, Any]:
    """Environment, settings and summary of a bench report, without the results of single prompts and local paths.

    Raises:
        PublishError: it is not what `weaver-hf bench --json` writes, or nothing was measured.
        OSError: there is no such file.
    """
    name = str(report) if isinstance(report, str | Path) else "the dict"
    if isinstance(report, str | Path):
        try:
            report = json.loads(Path(report).read_text(encoding="utf-8"))
        except ValueError:
            report = {}
    rows = report.get("summary") if isinstance(report, dict) else None
    whole = isinstance(rows, list) and all(isinstance(r, dict) and not set(_SUMMARY_FIELDS) - set(r) for r in rows)
    if not whole or not any(row["accepted_per_step"].get("mean") is not None for row in rows or ()):
        raise PublishError(
            f"no acceptance table in {name}",
            "the report of a bench run, with a `summary` of at least one measured row",
            "Pass what `weaver-hf bench --json acceptance.json` wrote.",
        )
    assert isinstance(report, dict)
    kept: dict[str, Any] = {key: report[key] for key in ("environment", "settings", "summary") if key in report}
    settings = kept.get("settings") or {}
    # Folders of the machine that measured say nothing to others.
    local = [key for key in ("target", "weaver") if settings.get(key) and Path(settings[key]).exists()]
    kept["settings"] = settings | dict.fromkeys(local)
    return kept


def training_files(folder: Path | None) -> dict[str, Path]:
    """Where the trainer's files go in the repository (`training/...`), and where they are."""
    if folder is None:
        return {}
    own = {f"training/{name}": folder / name for name in _TRAINER_FILES if (folder / name).is_file()}
    kept = sorted(path for path in (folder / "training").glob("*") if path.is_file())
    return {f"training/{path.name}": path for path in kept} | own


def card_facts(
    weaver: "WeaverModel",
    name: str,
    licence: str | None = None,
    report: dict[str, Any] | None = None,
    tokenizer: Any = None,
    history: Path | None = None,
    custom_generate: bool = False,
) -> dict[str, Any]:
    """What the template of the card reads; None and empty lists stand for what is not recorded.

    `use` is the code under "Use", where it is not what every artifact is loaded by.

    Args:
        weaver: the artifact.
        name: repository id, or what else the card is called by.
        licence, report, tokenizer, history, custom_generate: as in `push`, the report as `read_acceptance` gives it.
    """
    from .training.data import tokenizer_fingerprint  # only here: training needs much that publishing does not

    config, files = weaver.config, training_files(history)
    texts = {name: path.read_text(encoding="utf-8") for name, path in files.items() if path.suffix in (".txt", ".json")}
    data: list[dict[str, Any]] = json.loads(texts.get("training/train_data.json", "[]"))
    trees = weaver.tree_config
    lora = None if weaver.peft_adapter is None else weaver.peft_config[weaver.peft_adapter]
    return {
        "name": name,
        "licence": licence,
        "config": config,
        "tokenizer_sha256": None if tokenizer is None else tokenizer_fingerprint(tokenizer),
        "drafter_parameters": _count(weaver.drafter),
        "adapter": config.adapter if weaver.has_adapter else None,
        "adapter_parameters": _count(weaver.adapter) if weaver.has_adapter else None,
        "dtype": str(weaver.dtype).removeprefix("torch."),
        "trees": trees,
        "fitted": {
            setting: sorted(table, key=float)
            for setting in TreeConfig.__slots__
            if setting.endswith("_temperature") and (table := getattr(trees, setting))
        },
        "peft": None if lora is None else _peft_facts(weaver, lora),
        "commands": [text.strip() for name, text in texts.items() if "command" in name],
        "data": data,
        "logs": [name for name in files if name.endswith(".jsonl")],
        "notes": [name for name in files if name.endswith(".md")],
        "report": report,
        "custom_generate": custom_generate,
        "use": None,
    }


def _peft_facts(weaver: "WeaverModel", lora: Any) -> dict[str, Any]:
    ranks = lora.target_modules != "dummy-target-modules"
    return {
        "base": lora.base_model_name_or_path or weaver.name_or_path or None,
        "revision": lora.revision,
        "rank": lora.r if ranks else None,
        "alpha": lora.lora_alpha if ranks else None,
        "targets": lora.target_modules if ranks else None,
        "modules": sorted(lora.modules_to_save or ()),
    }


def _count(part: Any) -> int | None:
    """Parameters of a part as it is in use: without PEFT's, which are another artifact's."""
    if part is None:
        return None
    part = getattr(part, "original_module", part)
    return sum(p.numel() for name, p in part.named_parameters() if "lora_" not in name)


def make_card(facts: dict[str, Any], tags: Sequence[str] = ()) -> ModelCard:
    """The card of the facts that `card_facts` gathers."""
    peft = facts["peft"]
    own = ["weaver", "speculative-decoding", "dflash"]
    own += ["custom_generate"] if facts["custom_generate"] else []
    data = ModelCardData(
        license=facts["licence"],
        library_name="transformers" if peft is None else "peft",
        pipeline_tag="text-generation",
        base_model=facts["config"].base_model_name_or_path if peft is None else peft["base"],
        base_model_relation="adapter" if (facts["config"].base_model_name_or_path or peft) else None,
        tags=[*own, *(["lora"] if peft else []), *(tag for tag in tags if tag not in own)],
    )
    return ModelCard.from_template(data, template_path=str(TEMPLATE), **facts)
