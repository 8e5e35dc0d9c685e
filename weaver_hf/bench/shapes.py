"""Published shapes with random weights: what a step costs, where no checkpoint can be loaded.

Sizes are those of the published configurations (Qwen3.5 and Qwen3.6; DFlash drafters of z-lab; the released Weaver
adapter for 27B, its widths scaled with the hidden size elsewhere). Texts of such a model mean nothing.
"""

from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from ..configuration_weaver import AdapterConfig, TreeConfig, WeaverConfig
from ..modeling_weaver import WeaverModel

__all__ = ["SHAPES", "Shape", "random_pair"]

VOCAB = 248320
DEPTHS = 15


@dataclass(frozen=True)
class Shape:
    """Sizes of a target and of its drafter.

    Attributes:
        target: fields of the target's configuration.
        intermediate, layers, kv_heads: of the drafter; its hidden size is the target's.
        taps: target layers that it reads.
        window: of its sliding layers (all but the last), None where all see everything.
        experts: the target is a mixture of experts.
    """

    target: dict[str, Any]
    intermediate: int
    layers: int
    kv_heads: int
    taps: tuple[int, ...]
    window: int | None = None
    experts: bool = False


def _dense(hidden: int, intermediate: int, layers: int, heads: int, value_heads: int, **more: Any) -> dict[str, Any]:
    return {
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": 4,
        "linear_num_value_heads": value_heads,
        **more,
    }


SHAPES = {
    "4b": Shape(_dense(2560, 9216, 32, 16, 32, tie_word_embeddings=True), 9728, 5, 8, (1, 8, 15, 22, 29)),
    "9b": Shape(_dense(4096, 12288, 32, 16, 32), 12288, 5, 8, (1, 8, 15, 22, 29)),
    "27b": Shape(_dense(5120, 17408, 64, 24, 48), 17408, 5, 8, (1, 16, 31, 46, 61), window=2048),
    "35b-a3b": Shape(
        _dense(2048, 0, 40, 16, 32, num_key_value_heads=2, num_experts=256, num_experts_per_tok=8,
               moe_intermediate_size=512, shared_expert_intermediate_size=512),
        6144, 8, 4, (1, 10, 19, 28, 37), experts=True,
    ),
}  # fmt: skip


def random_pair(
    name: str, device: torch.device | str, dtype: torch.dtype = torch.bfloat16, seed: int = 0, **changes: Any
) -> tuple[Any, WeaverModel]:
    """A target and a Weaver with drafter and adapter of a published shape, attached.

    Args:
        name: of `SHAPES`.
        seed: of the weights.
        changes: fields of the target's configuration (tests make it small with them).
    """
    shape = SHAPES[name]
    fields = {
        "vocab_size": VOCAB,
        "head_dim": 256,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_num_key_heads": 16,
        "linear_conv_kernel_dim": 4,
        "max_position_embeddings": 262144,
        "tie_word_embeddings": False,
        "eos_token_id": None,
        "pad_token_id": 0,
        **shape.target,
        **changes,
    }
    config = AutoConfig.for_model("qwen3_5_moe_text" if shape.experts else "qwen3_5_text", **fields)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    model = model.to_empty(device=device).eval()
    taps = [t for t in shape.taps if t < config.num_hidden_layers - 1] or [0]
    layers = ["full_attention"] * shape.layers
    if shape.window is not None:
        layers[:-1] = ["sliding_attention"] * (shape.layers - 1)
    hidden, rank = config.hidden_size, max(64, config.hidden_size * 2048 // 5120 // 64 * 64)
    weaver_config = WeaverConfig(
        vocab_size=config.vocab_size,
        hidden_size=hidden,
        target_layer_ids=taps,
        num_hidden_layers=shape.layers,
        mask_token_id=1,
        num_target_layers=config.num_hidden_layers,
        num_key_value_heads=shape.kv_heads,
        intermediate_size=changes.get("intermediate_size", shape.intermediate),
        layer_types=layers,
        sliding_window=shape.window,
        adapter=AdapterConfig(
            rank=rank, mlp_dim=rank, num_heads=16, num_layers=1, max_depth=DEPTHS,
            pool_size=min(512, config.vocab_size),
        ),
    )  # fmt: skip
    with torch.device("meta"):
        weaver = WeaverModel(weaver_config)
    weaver = weaver.to(dtype).to_empty(device=device)
    _fill(model, seed)
    _fill(weaver, seed + 1)
    # Random logits say next to nothing. Sharpened like this, trees reach the depths that trained ones reach.
    sharp = {"0.0": [0.02] * DEPTHS}
    weaver.tree_config = TreeConfig(builder="weaver", draft_temperature=sharp, adapter_temperature=sharp)
    return model, weaver.attach(model)


def _fill(model: Any, seed: int) -> None:
    """Weights of trained size; norms and gates as a fresh model has them. Rotary tables lie in buffers: made anew."""
    generator = torch.Generator(device=model.device).manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("A_log"):
                parameter.uniform_(1, 16, generator=generator).log_()
            elif name.endswith("dt_bias"):
                parameter.fill_(1.0)
            elif parameter.ndim == 1:  # Qwen3.5's own norms scale by 1 + weight
                one = "linear_attn.norm" in name or type(model) is WeaverModel
                parameter.fill_(1.0 if one and name.endswith("weight") else 0.0)
            else:
                parameter.normal_(0, 0.02, generator=generator)
        for module in list(model.modules()):
            if type(module).__name__.endswith("RotaryEmbedding"):
                for name, buffer in type(module)(model.config).named_buffers():
                    getattr(module, name).copy_(buffer)
