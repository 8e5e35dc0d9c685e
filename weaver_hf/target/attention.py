"""Tree attention of the full-attention layers, chosen call by call.

An attached attention module runs its own stock forward; where the call carries a tree, it runs it with a config that
names the implementation `weaver_tree`. Nothing shared is switched, so plain forwards of other threads are untouched,
and whatever implementation the model uses (flash, eager, flex) stays in force for prefill and plain decoding.
"""

from typing import TYPE_CHECKING, Any

import torch.nn as nn
from torch import Tensor
from transformers.modeling_utils import AttentionInterface

from weaver_kernels import ops, reference

if TYPE_CHECKING:
    from .cache import TreePlan

__all__ = ["TreeAttention", "weaver_tree_attention"]


def weaver_tree_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    *,
    weaver_tree: "TreePlan",
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention by transformers' interface, of tree nodes over committed slots and their own ancestors."""
    weaver_tree.attended.add(module.layer_idx)
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    plan = weaver_tree
    if plan.mask is not None:  # padding inside the prompt
        return reference.tree_attention(query, key, value, plan.visible(key.shape[2]), scaling), None
    visible = None if query.is_cuda else plan.visible(key.shape[2])
    return ops.tree_attention(query, key, value, plan.lens, plan.topology, scaling, plan.starts, visible), None


AttentionInterface.register("weaver_tree", weaver_tree_attention)


class TreeAttention(nn.Module):
    """Mixed in before an attention class: with `weaver_tree` it attends along a tree, without it nothing changes."""

    def forward(self, *args: Any, weaver_tree: "TreePlan | None" = None, **kwargs: Any) -> Any:
        if weaver_tree is None:
            return super().forward(*args, **kwargs)
        original: Any = type(self)._weaver_original  # type: ignore[attr-defined]
        return original.forward(_Overlay(self, config=_tree_config(self)), *args, weaver_tree=weaver_tree, **kwargs)


class _Overlay:
    """An object with some attributes of its own and all others of what lies under it."""

    def __init__(self, under: Any, **own: Any) -> None:
        self.__dict__.update(own, _under=under)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._under, name)


def _tree_config(module: Any) -> _Overlay:
    return _Overlay(module.config, _attn_implementation="weaver_tree")
