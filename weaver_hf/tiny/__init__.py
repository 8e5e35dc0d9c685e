"""The embedded default: a small trained Gated DeltaNet hybrid, its tokenizer and its Weaver; see `NOTICE`."""

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from ..modeling_weaver import WeaverModel

__all__ = ["TARGET", "WEAVER", "load_tiny"]

TARGET = Path(__file__).parent / "target"
WEAVER = Path(__file__).parent / "weaver"


def load_tiny(dtype: torch.dtype | None = None) -> tuple[Any, Any, WeaverModel]:
    """The embedded target, its tokenizer and its Weaver, attached: `model, tokenizer, weaver = load_tiny()`.

    Args:
        dtype: of the weights, fp32 by default (the checkpoint is bf16; fp32 makes greedy decoding exactly comparable).

    Returns:
        On the CPU. A 13.7M-parameter Qwen3.5-style model: it writes text of its kind but knows nothing.
    """
    model = AutoModelForCausalLM.from_pretrained(TARGET, dtype=dtype or torch.float32)
    return model, AutoTokenizer.from_pretrained(TARGET), WeaverModel.from_pretrained(WEAVER).attach(model)
