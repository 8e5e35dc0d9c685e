"""`weaver-hf train data`, `drafter` and `adapter`."""

import json
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import typer
from huggingface_hub import try_to_load_from_cache
from rich.console import Console
from rich.progress import track

from ..cli_common import JsonOption, TargetOption, load_target, write_json
from ..configuration_weaver import AdapterConfig, TreeConfig, WeaverConfig
from ..modeling_weaver import WeaverModel
from ..peft_weaver import ADAPTER_TARGETS, DRAFTER_TARGETS, add_adapter_part, add_lora
from ..tiny import TARGET
from .adapter import AdapterTrainConfig, PoolLossConfig
from .adapter import train as run_adapter
from .blocks import LossConfig
from .data import DataConfig, Sequences, describe_data, load_data, make_data, read_documents
from .drafter import DrafterTrainConfig
from .drafter import train as run

app = typer.Typer(help="Train drafters and adapters for a target.", no_args_is_help=True)

LORA_RANK = 16

LoraOption = Annotated[
    bool, typer.Option("--lora", help="Train a PEFT adapter over the artifact, which stays as it is.")
]
RankOption = Annotated[int | None, typer.Option(min=1, help=f"Of --lora. [{LORA_RANK}]")]
AlphaOption = Annotated[float | None, typer.Option(help="Of --lora: updates are scaled by alpha / rank. [2 * rank]")]
OptimizerOption = Annotated[Literal["muon", "adamw"], typer.Option(help="muon: for matrices, with AdamW for the rest.")]


def load_frozen(name: str) -> tuple[Any, Any]:
    """A target in its checkpoint's dtype, on the GPU where there is one, and its tokenizer."""
    model, tokenizer = load_target(name, dtype="auto", device_map=None)
    return model.to("cuda" if torch.cuda.is_available() else "cpu"), tokenizer


def cached_commit(name: str) -> str | None:
    """The commit of a Hub id that was just loaded, from where the Hub's cache has it; None for a local folder."""
    path = None if Path(name).exists() else try_to_load_from_cache(name, "config.json")
    return Path(path).parent.name if isinstance(path, str) else None


def for_device(model: Any) -> dict[str, Any]:
    """Settings of `TrainConfig` that depend on where a model is."""
    on_gpu = model.device.type == "cuda"
    return {"mixed_precision": "bf16" if on_gpu else "no", "compile": on_gpu}


def read_data(folders: list[Path], tokenizer: Any, weaver: WeaverModel, out: Path) -> Sequences:
    """The data of a run; what it is goes into the run's folder, where `weaver-hf push` reads it."""
    read = load_data(folders, tokenizer, weaver.config.block_size)
    out.mkdir(parents=True, exist_ok=True)
    (out / "train_data.json").write_text(json.dumps(describe_data(folders), indent=1) + "\n", encoding="utf-8")
    return read


def lora_numbers(lora: bool, rank: int | None, alpha: float | None) -> tuple[int, float]:
    """Rank and alpha of LoRA; either of them without `--lora` is an error."""
    if not lora and (rank, alpha) != (None, None):
        raise typer.BadParameter("is a setting of --lora, which is not given", param_hint="--lora-rank, --lora-alpha")
    rank = rank or LORA_RANK
    return rank, alpha or 2.0 * rank


@app.command()
def data(
    text: Annotated[list[Path], typer.Argument(help="Text files (.xz is unpacked), documents separated by NUL.")],
    out: Annotated[Path, typer.Option(help="Folder of the data set; a started one of the same settings is resumed.")],
    target: TargetOption = str(TARGET),
    sequences: Annotated[int, typer.Option(min=1, help="Completions.")] = 1024,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Of each completion.")] = 256,
    batch_size: Annotated[int, typer.Option(min=1, help="Sequences generated at once.")] = 256,
    own_share: Annotated[float, typer.Option(min=0, max=1, help="Prompts that the target writes itself.")] = 0.7,
    ask_share: Annotated[float, typer.Option(min=0, max=1, help="Prompts of plain text asked as a user's turn.")] = 0.4,
    seed: Annotated[int, typer.Option()] = 0,
    output: JsonOption = None,
) -> None:
    """Cut prompts from text and let the target complete them, at temperatures 1, 0.7 and 0.

    [dim]Example:[/] weaver-hf train data corpus.txt.xz --out data --sequences 32768
    """
    model, tokenizer = load_frozen(target)
    config = DataConfig(
        sequences=sequences,
        max_new_tokens=max_new_tokens,
        batch_size=batch_size,
        own_share=own_share,
        ask_share=ask_share,
        seed=seed,
    )
    console = Console(stderr=True)
    facts = make_data(
        model,
        tokenizer,
        read_documents(text),
        out,
        config,
        lambda items, total: track(items, "batches", total=total, console=console),
    )
    console.print(f"{sequences} sequences in {out}; {facts['prompts_dropped_for_overlap']} prompts dropped for overlap")
    write_json({"folder": str(out), **facts}, output, console)


@app.command()
def drafter(
    data: Annotated[list[Path], typer.Option(help="Data set of `weaver-hf train data`; can be given several times.")],
    out: Annotated[Path, typer.Option(help="Folder of the artifact; a started run there is resumed.")],
    target: TargetOption = str(TARGET),
    init: Annotated[str | None, typer.Option(help="Go on from this artifact (ours or a published one).")] = None,
    lora: LoraOption = False,
    lora_rank: RankOption = None,
    lora_alpha: AlphaOption = None,
    layers: Annotated[int, typer.Option(min=1, help="Layers of the drafter.")] = 3,
    block_size: Annotated[int, typer.Option(min=2, help="Slots of a block, the anchor's included.")] = 16,
    taps: Annotated[list[int] | None, typer.Option(help="Tapped target layers. [spread over the target]")] = None,
    mask_token_id: Annotated[int | None, typer.Option(help="By default the tokenizer's <|mask|> token.")] = None,
    heads: Annotated[int, typer.Option(min=1)] = 8,
    kv_heads: Annotated[int, typer.Option(min=1)] = 4,
    head_dim: Annotated[int, typer.Option(min=2)] = 64,
    intermediate_size: Annotated[int | None, typer.Option(help="By default the target's.")] = None,
    anchors: Annotated[int, typer.Option(min=1, help="Blocks to train on in all.")] = 30_000_000,
    batch_size: Annotated[int, typer.Option(min=1, help="Sequences a step and process.")] = 64,
    anchors_per_sequence: Annotated[int, typer.Option(min=1)] = 64,
    width: Annotated[int, typer.Option(min=32, help="Longest piece of a sequence, in tokens.")] = 448,
    optimizer: OptimizerOption = "muon",
    learning_rate: Annotated[float, typer.Option()] = 1e-3,
    weighting: Annotated[Literal["decay", "dpace"], typer.Option()] = "decay",
    gamma: Annotated[float, typer.Option(help="Of the decay.")] = 7.0,
    soft: Annotated[float, typer.Option(min=0, max=1, help="Share of the loss towards the whole distribution.")] = 1.0,
    max_seconds: Annotated[float | None, typer.Option(help="End the run by then.")] = None,
    seed: Annotated[int, typer.Option()] = 0,
    output: JsonOption = None,
) -> None:
    """Train a DFlash block drafter for a frozen target. Several GPUs: `accelerate launch -m weaver_hf ...`.

    [dim]Example:[/] weaver-hf train drafter --data data --out drafter --taps 1 --taps 3 --taps 5 --taps 6
    """
    rank, alpha = lora_numbers(lora, lora_rank, lora_alpha)
    if lora and init is None:
        raise typer.BadParameter("needs a trained drafter to lie over; name it as --init", param_hint="--lora")
    model, tokenizer = load_frozen(target)
    text = model.config.get_text_config()
    count = text.num_hidden_layers
    if mask_token_id is None:
        mask_token_id = tokenizer.convert_tokens_to_ids("<|mask|>")
    if not isinstance(mask_token_id, int) or mask_token_id == tokenizer.unk_token_id:
        raise typer.BadParameter("the tokenizer has no <|mask|> token; name an id", param_hint="--mask-token-id")
    torch.manual_seed(seed)
    if init is not None:
        weaver = WeaverModel.from_pretrained(init)
        if weaver.drafter is None:
            raise typer.BadParameter("the artifact has no drafter", param_hint="--init")
        if lora and weaver.peft_adapter is None:
            add_lora(weaver, DRAFTER_TARGETS, rank, alpha).revision = cached_commit(init)
        elif weaver.peft_adapter is not None:
            raise typer.BadParameter(
                f"{init} is a PEFT folder; `weaver-hf convert` merges it into an artifact", param_hint="--init"
            )
    else:
        # The shape of an adapter that can come later: a PEFT folder brings its weights.
        geometry = adapter_geometry(text, block_size)
        weaver = WeaverModel(
            WeaverConfig(
                vocab_size=text.vocab_size,
                hidden_size=text.hidden_size,
                # DFlash's rule: evenly from the second layer to the one before the last two.
                target_layer_ids=taps or [round(1 + i * (count - 4) / 3) for i in range(4)],
                num_hidden_layers=layers,
                block_size=block_size,
                mask_token_id=mask_token_id,
                num_target_layers=count,
                num_attention_heads=heads,
                num_key_value_heads=kv_heads,
                head_dim=head_dim,
                intermediate_size=intermediate_size or text.intermediate_size,
                rope_theta=10000.0,
                tree_config=TreeConfig(builder="marginal"),
                adapter=geometry,
                adapter_initialized=False,
                base_model_name_or_path=None if Path(target).exists() else target,
                base_model_revision=cached_commit(target),
                eos_token_id=text.eos_token_id,
                pad_token_id=text.pad_token_id,
            )
        )
    config = DrafterTrainConfig(
        anchors=anchors,
        batch_size=batch_size,
        anchors_per_sequence=anchors_per_sequence,
        width=width,
        optimizer=optimizer,
        learning_rate=learning_rate,
        max_seconds=max_seconds,
        seed=seed,
        **for_device(model),
        loss=LossConfig(weighting=weighting, gamma=gamma, soft=soft),
    )
    last = run(model, weaver, read_data(data, tokenizer, weaver, out), out, config, text.pad_token_id or 0)
    write_json({"folder": str(out), **last}, output, Console(stderr=True))


def adapter_geometry(
    text: Any,
    block_size: int,
    generation: str | None = None,
    rank: int | None = None,
    layers: int | None = None,
    heads: int | None = None,
    mlp_dim: int | None = None,
    pool_size: int | None = None,
) -> AdapterConfig:
    """The geometry that is trained where nothing else is asked for, for a target's text config."""
    rank = rank or min(text.hidden_size, 2048)
    return AdapterConfig(
        generation=generation or "rope",
        rank=rank,
        num_layers=layers or 1,
        num_heads=heads or max(rank // 64, 1),
        mlp_dim=mlp_dim or rank,
        max_depth=block_size - 1,
        pool_size=pool_size or min(512, text.vocab_size),
    )


@app.command()
def adapter(
    drafter: Annotated[str, typer.Option(help="The drafter's artifact (ours or a published one); it stays as it is.")],
    data: Annotated[list[Path], typer.Option(help="Data set of `weaver-hf train data`; can be given several times.")],
    out: Annotated[Path, typer.Option(help="Folder of the artifact; a started run there is resumed.")],
    target: TargetOption = str(TARGET),
    lora: LoraOption = False,
    lora_rank: RankOption = None,
    lora_alpha: AlphaOption = None,
    generation: Annotated[
        str | None, typer.Option(help="rope (rotary positions, SwiGLU) or learned (the paper's). [rope]")
    ] = None,
    rank: Annotated[int | None, typer.Option(help="Width. [the target's, at most 2048]")] = None,
    layers: Annotated[int | None, typer.Option(min=1, help="[1]")] = None,
    heads: Annotated[int | None, typer.Option(help="[rank / 64]")] = None,
    mlp_dim: Annotated[int | None, typer.Option(help="[rank]")] = None,
    pool_size: Annotated[int | None, typer.Option(min=2, help="Candidates a depth. [512]")] = None,
    anchors: Annotated[int, typer.Option(min=1, help="Blocks to train on in all.")] = 30_000_000,
    batch_size: Annotated[int, typer.Option(min=1, help="Sequences a step and process.")] = 64,
    anchors_per_sequence: Annotated[int, typer.Option(min=1)] = 64,
    width: Annotated[int, typer.Option(min=32, help="Longest piece of a sequence, in tokens.")] = 448,
    optimizer: OptimizerOption = "muon",
    learning_rate: Annotated[float, typer.Option()] = 1e-3,
    loss: Annotated[Literal["lk", "alpha", "kl", "ce"], typer.Option(help="alpha: -log α.")] = "lk",
    max_seconds: Annotated[float | None, typer.Option(help="End the run by then.")] = None,
    seed: Annotated[int, typer.Option()] = 0,
    output: JsonOption = None,
) -> None:
    """Train Weaver's adapter for a frozen target and drafter. Goes on from the drafter's own adapter if it has one.

    With --lora: LoRA on the adapter that the drafter has; where it only declares one, or is a PEFT folder itself, the
    whole adapter, saved beside that folder's LoRA.

    [dim]Example:[/] weaver-hf train adapter --drafter drafter --data data --out weaver --pool-size 256
    """
    lora_width, alpha = lora_numbers(lora, lora_rank, lora_alpha)
    model, tokenizer = load_frozen(target)
    torch.manual_seed(seed)
    weaver = WeaverModel.from_pretrained(drafter).float()
    if weaver.drafter is None:
        raise typer.BadParameter("the artifact has no drafter", param_hint="--drafter")
    if not lora and weaver.peft_adapter is not None:
        raise typer.BadParameter(
            f"{drafter} is a PEFT folder: train with --lora, or merge it first with `weaver-hf convert`",
            param_hint="--drafter",
        )
    if lora and weaver.adapter is None:
        raise typer.BadParameter(
            f"{drafter} declares no adapter, so nothing could load its weights from a PEFT folder: load the drafter, "
            "call `weaver.declare_adapter(AdapterConfig(...))` and save it",
            param_hint="--drafter",
        )
    text = model.config.get_text_config()
    asked = {
        "generation": generation,
        "rank": rank,
        "num_layers": layers,
        "num_heads": heads,
        "mlp_dim": mlp_dim,
        "pool_size": pool_size,
    }
    if weaver.adapter is not None and (lora or weaver.has_adapter):
        for name, value in asked.items():
            if value not in (None, getattr(weaver.adapter.config, name)):
                raise typer.BadParameter(
                    f"{name} {value} beside the adapter of {drafter}, which has {getattr(weaver.adapter.config, name)} "
                    "and is trained on; leave it out, or name a drafter without an adapter"
                )
        if lora and weaver.has_adapter and weaver.peft_adapter is None:
            add_lora(weaver, ADAPTER_TARGETS, lora_width, alpha).revision = cached_commit(drafter)
        elif lora:
            add_adapter_part(weaver)
    else:
        weaver.init_adapter(
            adapter_geometry(text, weaver.config.block_size, generation, rank, layers, heads, mlp_dim, pool_size)
        )
    config = AdapterTrainConfig(
        anchors=anchors,
        batch_size=batch_size,
        anchors_per_sequence=anchors_per_sequence,
        width=width,
        optimizer=optimizer,
        learning_rate=learning_rate,
        max_seconds=max_seconds,
        seed=seed,
        **for_device(model),
        loss=PoolLossConfig(kind=loss),
    )
    last = run_adapter(model, weaver, read_data(data, tokenizer, weaver, out), out, config, text.pad_token_id or 0)
    write_json({"folder": str(out), **last}, output, Console(stderr=True))
