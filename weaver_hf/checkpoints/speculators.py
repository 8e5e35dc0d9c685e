"""The DFlash layout of vllm-project/speculators, which vLLM loads.

`config.json` has no `model_type`; the layers' geometry is nested, tap ids count hidden states (z-lab's ids plus one),
and the verifier is named in it.
"""

import json
from pathlib import Path
from typing import Any

from safetensors.torch import save_file

from ..configuration_weaver import TreeConfig, WeaverConfig
from ..errors import CheckpointError
from .zlab import layer_geometry, plain_tensors, written_geometry

__all__ = ["IGNORED", "one_causality", "read_config", "recognizes", "write"]

#: Copies of the target's embedding and head, which the drafter takes from the target itself.
IGNORED = [r"^embed_tokens\.", r"^lm_head\."]


def recognizes(config: dict[str, Any]) -> bool:
    return "speculators_model_type" in config


def read_config(config: dict[str, Any]) -> WeaverConfig:
    """The Weaver of a speculators `config.json`; its builder is `marginal`.

    Raises:
        CheckpointError: another algorithm than DFlash, a reduced vocabulary, or blocks that predict from the anchor.
    """
    kind = config["speculators_model_type"]
    if kind != "dflash":
        raise CheckpointError(
            f"a speculators model of type {kind!r}", "dflash", "Other algorithms are not supported yet."
        )
    layers = config["transformer_layer_config"]
    vocabulary = layers["vocab_size"]
    if config.get("draft_vocab_size") not in (None, vocabulary):
        raise CheckpointError(
            f"a draft vocabulary of {config['draft_vocab_size']} tokens",
            f"the target's {vocabulary}",
            "Reduced vocabularies are not supported yet.",
        )
    if config.get("sample_from_anchor"):
        raise CheckpointError(
            "sample_from_anchor: slots that predict the next position",
            "slots that predict their own position",
            "Shifted blocks are not supported yet.",
        )
    verifier = (config.get("speculators_config") or {}).get("verifier") or {}
    return WeaverConfig(
        **layer_geometry(layers),
        vocab_size=vocabulary,
        target_layer_ids=[tap - 1 for tap in config["aux_hidden_state_layer_ids"]],
        block_size=config["block_size"],
        mask_token_id=config["mask_token_id"],
        num_target_layers=config.get("num_target_layers"),
        # Said of sliding layers; full ones are never causal here.
        is_causal=False if config.get("sliding_window_non_causal") and _slides(layers) else None,
        tree_config=TreeConfig(builder="marginal"),
        base_model_name_or_path=verifier.get("name_or_path"),
        eos_token_id=layers.get("eos_token_id"),
        pad_token_id=layers.get("pad_token_id"),
        bos_token_id=layers.get("bos_token_id"),
    )


def one_causality(config: WeaverConfig) -> bool:
    """Whether all layers agree, so that vLLM, which reads one flag for all from this layout, runs them as trained."""
    return config.is_causal is False or (config.is_causal is None and len(set(config.layer_types or [])) <= 1)


def _slides(layers: dict[str, Any]) -> bool:
    return "sliding_attention" in (layers.get("layer_types") or [])


def write(weaver: Any, folder: Path) -> None:
    """The drafter of a Weaver in this layout."""
    config = weaver.config
    if config.is_causal:
        raise CheckpointError("a drafter that is causal in all layers", "one that is not", "This layout cannot say it.")
    folder.mkdir(parents=True, exist_ok=True)
    target = weaver.target
    described = {
        "architectures": ["DFlashSpeculator"],
        "speculators_model_type": "dflash",
        "speculators_version": "0.5.0",
        "transformer_layer_config": {
            "model_type": "qwen3",
            "vocab_size": config.vocab_size,
            **written_geometry(weaver),
        },
        "draft_vocab_size": config.vocab_size,
        "block_size": config.block_size,
        "aux_hidden_state_layer_ids": [tap + 1 for tap in config.target_layer_ids],
        "mask_token_id": config.mask_token_id,
        "num_target_layers": config.num_target_layers,
        # vLLM lets this decide for all layers, full ones too (`dflash_config.causal`).
        "sliding_window_non_causal": config.is_causal is False or not _slides(config.to_dict()),
        "sample_from_anchor": False,
        "speculators_config": {
            "algorithm": "dflash",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": config.block_size - 1}],
            "default_proposal_method": "greedy",
            "verifier": {
                "name_or_path": config.base_model_name_or_path,
                "architectures": [] if target is None else target.config.architectures or [type(target).__name__],
            },
        },
    }
    (folder / "config.json").write_text(json.dumps(described, indent=2) + "\n")
    save_file(plain_tensors(weaver), folder / "model.safetensors", metadata={"format": "pt"})
