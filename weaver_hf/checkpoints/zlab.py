"""z-lab's DFlash checkpoints (github.com/z-lab/dflash; also what SpecForge and Model-Optimizer export).

`config.json` says `model_type: qwen3`, so a plain `AutoModel` would build a Qwen3 model with the wrong modules; what
tells a checkpoint is its `dflash_config` or its architecture. Keys may stand in `dflash_config` or at the top level.
"""

import json
from pathlib import Path
from typing import Any

from safetensors.torch import save_file

from ..configuration_weaver import TreeConfig, WeaverConfig
from ..errors import CheckpointError

__all__ = ["KEY_MAPPING", "layer_geometry", "read_config", "recognizes", "write"]

#: Their tensors have no prefix; ours are the drafter's.
KEY_MAPPING = {r"^(fc|hidden_norm|norm|layers)\.": r"drafter.\1."}

# What changes the network's mathematics and is not implemented.
_EXTRAS = (
    "input_embedding_scale",
    "output_multiplier",
    "final_logit_softcapping",
    "conv_kernel_size",
    "conv_group_size",
    "selector_rank",
    "selector_top_k",
    "projector_type",
    "use_swa",
)


def recognizes(config: dict[str, Any]) -> bool:
    architectures = config.get("architectures") or []
    return "speculators_model_type" not in config and (
        "dflash_config" in config or any(name.startswith("DFlash") for name in architectures)
    )


def read_config(config: dict[str, Any]) -> WeaverConfig:
    """The Weaver of a z-lab `config.json`; its builder is `marginal`.

    Raises:
        CheckpointError: names an extra that is not supported, or a key that is missing.
    """
    inner = config.get("dflash_config") or {}

    def field(name: str, default: Any = None) -> Any:
        return inner.get(name, config.get(name, default))

    refuse_extras({name: field(name) for name in _EXTRAS})
    mask = field("mask_token_id")
    if mask is None:
        raise CheckpointError("a DFlash config without mask_token_id", "one that names it", "Add it to dflash_config.")
    taps = field("target_layer_ids")
    if taps is None:
        taps = default_taps(config["num_target_layers"], config["num_hidden_layers"])
    return WeaverConfig(
        **layer_geometry(config),
        vocab_size=config["vocab_size"],
        target_layer_ids=taps,
        block_size=field("block_size", 16),
        mask_token_id=mask,
        num_target_layers=config.get("num_target_layers"),
        is_causal=config.get("is_causal", inner.get("causal")),
        tree_config=TreeConfig(builder="marginal"),
        eos_token_id=config.get("eos_token_id"),
        pad_token_id=config.get("pad_token_id"),
        bos_token_id=config.get("bos_token_id"),
    )


def refuse_extras(extras: dict[str, Any]) -> None:
    """Raise on settings of variants that compute something else."""
    found = {name: value for name, value in extras.items() if value not in (None, False)}
    if found:
        raise CheckpointError(
            f"a DFlash variant with {', '.join(f'{name}={value!r}' for name, value in found.items())}",
            "plain DFlash",
            "This variant is not supported yet.",
        )


def layer_geometry(config: dict[str, Any]) -> dict[str, Any]:
    """The fields that describe the drafter's layers, from a Qwen3-style config of either transformers generation.

    Raises:
        CheckpointError: another activation, or rotary embeddings that are not plain.
    """
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind != "default" or rope.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0)) != 1.0:
        raise CheckpointError(f"rope settings {rope}", "plain rotary embeddings", "This variant is not supported yet.")
    if config.get("hidden_act", "silu") != "silu":
        raise CheckpointError(f"hidden_act {config['hidden_act']!r}", "silu", "This variant is not supported yet.")
    heads = config["num_attention_heads"]
    return {
        "hidden_size": config["hidden_size"],
        "num_hidden_layers": config["num_hidden_layers"],
        "num_attention_heads": heads,
        "num_key_value_heads": config.get("num_key_value_heads", heads),
        "head_dim": config.get("head_dim") or config["hidden_size"] // heads,
        "intermediate_size": config["intermediate_size"],
        "rms_norm_eps": config.get("rms_norm_eps", 1e-6),
        "rope_theta": rope.get("rope_theta", config.get("rope_theta", 10000.0)),
        "attention_bias": config.get("attention_bias", False),
        "layer_types": config.get("layer_types"),
        "sliding_window": config.get("sliding_window"),
    }


def default_taps(target_layers: int, draft_layers: int) -> list[int]:
    """z-lab's rule where the config names no taps: evenly from the second layer to the third-last."""
    if draft_layers == 1:
        return [target_layers // 2]
    return [round(1 + i * (target_layers - 4) / (draft_layers - 1)) for i in range(draft_layers)]


def write(weaver: Any, folder: Path) -> None:
    """The drafter of a Weaver as a z-lab checkpoint."""
    config = weaver.config
    folder.mkdir(parents=True, exist_ok=True)
    described = {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "block_size": config.block_size,
        "dflash_config": {"mask_token_id": config.mask_token_id, "target_layer_ids": config.target_layer_ids},
        "num_target_layers": config.num_target_layers,
        "vocab_size": config.vocab_size,
        **written_geometry(weaver),
    }
    if config.is_causal is not None:
        described["is_causal"] = config.is_causal
    (folder / "config.json").write_text(json.dumps(described, indent=2) + "\n")
    save_file(plain_tensors(weaver), folder / "model.safetensors", metadata={"format": "pt"})


def written_geometry(weaver: Any) -> dict[str, Any]:
    """`layer_geometry` the other way."""
    names = (
        "hidden_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "intermediate_size",
        "rms_norm_eps",
        "rope_theta",
        "attention_bias",
        "layer_types",
        "sliding_window",
    )
    config = weaver.config
    return {
        **{name: getattr(config, name) for name in names},
        "hidden_act": "silu",
        "torch_dtype": str(weaver.dtype).removeprefix("torch."),
        "eos_token_id": config.eos_token_id,
        "pad_token_id": config.pad_token_id,
        "bos_token_id": config.bos_token_id,
    }


def plain_tensors(weaver: Any) -> dict[str, Any]:
    """The drafter's tensors under their published names."""
    if weaver.drafter is None:
        raise CheckpointError("a Weaver without a drafter", "one with a drafter", "There is nothing to write.")
    return {name: tensor.contiguous() for name, tensor in weaver.drafter.state_dict().items()}
