"""The attention implementation `weaver_tree`: tree nodes over committed slots and their own ancestors."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch.nn as nn
from torch import Tensor
from transformers import PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask
from transformers.modeling_utils import AttentionInterface

from weaver_kernels import reference

if TYPE_CHECKING:
    from .cache import TreePlan

__all__ = ["tree_attention", "weaver_tree_attention"]


def weaver_tree_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    weaver_tree: "TreePlan | None" = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention by transformers' interface; without a tree (a plain forward in another thread) it is `sdpa`."""
    if weaver_tree is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **kwargs)
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    return reference.tree_attention(query, key, value, weaver_tree.visible, scaling), None


AttentionInterface.register("weaver_tree", weaver_tree_attention)
AttentionMaskInterface.register("weaver_tree", sdpa_mask)


@contextmanager
def tree_attention(model: PreTrainedModel) -> Iterator[None]:
    """Switch the model to `weaver_tree` for one verify call; whatever it used (also flash, eager, flex) comes back."""
    config = model.config
    before = config._attn_implementation
    config._attn_implementation = "weaver_tree"
    try:
        yield
    finally:
        config._attn_implementation = before
