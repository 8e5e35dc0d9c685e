"""The tree forward of Qwen3.5's Gated DeltaNet module, swapped in by class."""

from typing import Any

import torch.nn as nn
from torch import Tensor
from transformers.integrations.accelerate import force_accelerate_hooks

from weaver_kernels import reference

from .cache import LinearStash, TreeLinearLayer, TreePlan
from .compat import cache_argument

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
def _tree_forward(mixer: Any, hidden_states: Tensor, layer: TreeLinearLayer, plan: TreePlan) -> Tensor:
    batch, nodes, _ = hidden_states.shape
    mixed = mixer.in_proj_qkv(hidden_states)  # [B, N, C], raw rows: the window of a later step is made of them
    z = mixer.in_proj_z(hidden_states)
    b, a = mixer.in_proj_b(hidden_states), mixer.in_proj_a(hidden_states)

    conv = reference.causal_conv_tree(
        mixed, layer.conv_states[0], mixer.conv1d.weight.squeeze(1), plan.topology.conv_index, mixer.conv1d.bias
    )
    query, key, value = conv.split([mixer.key_dim, mixer.key_dim, mixer.value_dim], -1)
    query = query.reshape(batch, nodes, -1, mixer.head_k_dim)
    key = key.reshape(batch, nodes, -1, mixer.head_k_dim)
    value = value.reshape(batch, nodes, -1, mixer.head_v_dim)
    g, beta = reference.gating(a, b, mixer.A_log, mixer.dt_bias)
    state, ancestors = layer.recurrent_states[0], plan.topology.ancestors
    output, delta = reference.gated_delta_tree(query, key, value, g, beta, state, ancestors)
    layer.stash = LinearStash(mixed, delta)
    output = mixer.norm(output.reshape(-1, mixer.head_v_dim), z.reshape(-1, mixer.head_v_dim))
    return mixer.out_proj(output.reshape(batch, nodes, -1))
