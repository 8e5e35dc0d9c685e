"""The tree forward of Qwen3.5's Gated DeltaNet module, swapped in by class."""

from typing import Any

import torch.nn as nn
from torch import Tensor
from transformers.integrations.accelerate import force_accelerate_hooks

from weaver_kernels import ops

from .cache import LinearStash, TreeLinearLayer, TreePlan
from .compat import cache_argument
from .static_cache import StaticLinearLayer

__all__ = ["TreeMixer"]


class TreeMixer(nn.Module):
    """Mixed in before a Gated DeltaNet class: with `weaver_tree` it verifies a tree, without it nothing changes."""

    def forward(self, hidden_states: Tensor, *args: Any, weaver_tree: TreePlan | None = None, **kwargs: Any) -> Tensor:
        if weaver_tree is None:
            return super().forward(hidden_states, *args, **kwargs)
        cache = cache_argument(args, kwargs)
        assert cache is not None, "a tree is verified against a cache"
        return _tree_forward(self, hidden_states, cache.layers[self.layer_idx], weaver_tree)


# The convolution's weight is read directly, so accelerate's hooks of `conv1d` (offload) must be fired by hand. The
# projections are called as modules, never through their weights: LoRA and 4-bit weights live in their forward.
@force_accelerate_hooks("conv1d")
def _tree_forward(
    mixer: Any, hidden_states: Tensor, layer: TreeLinearLayer | StaticLinearLayer, plan: TreePlan
) -> Tensor:
    batch, nodes, _ = hidden_states.shape
    mixed = mixer.in_proj_qkv(hidden_states)  # [B, N, C], raw rows: the window of a later step is made of them
    z = mixer.in_proj_z(hidden_states)
    b, a = mixer.in_proj_b(hidden_states), mixer.in_proj_a(hidden_states)

    rows = delta = None  # where a static cache wants them
    if isinstance(layer, StaticLinearLayer):
        rows, delta = layer.rows, layer.delta
    weight, index = mixer.conv1d.weight.squeeze(1), plan.topology.conv_index
    conv = ops.causal_conv_tree(mixed, layer.conv_states[0], weight, index, mixer.conv1d.bias, rows)
    query, key, value = conv.split([mixer.key_dim, mixer.key_dim, mixer.value_dim], -1)
    query, key = (x.unflatten(-1, (-1, mixer.head_k_dim)) for x in (query, key))
    value = value.unflatten(-1, (-1, mixer.head_v_dim))
    state = layer.recurrent_states[0]
    output, delta = ops.gated_delta_tree(
        query, key, value, a, b, mixer.A_log, mixer.dt_bias, state, plan.topology, delta
    )
    if isinstance(layer, TreeLinearLayer):
        layer.stash = LinearStash(mixed, delta)
    plan.attended.add(mixer.layer_idx)
    output = mixer.norm(output.reshape(-1, mixer.head_v_dim), z.reshape(-1, mixer.head_v_dim))
    return mixer.out_proj(output.reshape(batch, nodes, -1))
