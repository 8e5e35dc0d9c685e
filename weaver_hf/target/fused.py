"""The decoder layer of a captured verification: one product for projections that read the same rows, one launch for
what stands between two products.

Swapped in before a Qwen3.5 decoder layer, it runs where the call carries a plan with `fused=True`; any part of a layer
that somebody changed (LoRA, quantization, hooks, offload, another library's kernel) is called as the module it is.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel
from transformers.activations import SiLUActivation

from weaver_kernels import fused_reference, ops

from .compat import CACHE_KEY
from .families import family_of

__all__ = ["FusedLayer", "fuse_projections", "joined", "listeners", "unfuse_projections"]


class FusedLayer(nn.Module):
    """Mixed in before a decoder layer class: with a plan that is `fused` it runs the forward of this file.

    Such a plan (the keyword `weaver_tree`) also offers `topology`, `lens` and `starts`, and the cache's layers offer
    buffers: `rows` and `delta` beside the states of Gated DeltaNet, `keys_buffer` and `values_buffer` of attention.
    """

    def forward(self, hidden_states: Tensor, *args: Any, weaver_tree: Any = None, **kwargs: Any) -> Any:
        if getattr(weaver_tree, "fused", False):
            return _forward(self, hidden_states, weaver_tree, kwargs)
        if weaver_tree is not None:
            kwargs["weaver_tree"] = weaver_tree
        return super().forward(hidden_states, *args, **kwargs)


# ---- one weight for projections of the same rows ----


def fuse_projections(model: PreTrainedModel) -> int:
    """Make the weights of projections that read the same rows views of one tensor: qkv|z|b|a, q|k|v, gate|up.

    Layer by layer, so that no second copy of the model exists at any time. The modules, their parameters and
    `state_dict` stay what they are. Whatever gives parameters new memory (`.to()`, `copy.deepcopy`) ends the sharing,
    which `joined` sees; calling this again fuses again. Groups that are not plain `nn.Linear` are left alone.

    Returns:
        How many groups are fused now.
    """
    fused = 0
    for linears in _groups(model):
        weights, biases = [m.weight for m in linears], [m.bias for m in linears]
        if joined(linears) is None and _can_join(linears):
            _join(weights)
            if biases[0] is not None:
                _join(biases)
        fused += joined(linears) is not None
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()  # the separate weights' memory: too small for the next group, and graphs want it
    return fused


def unfuse_projections(model: PreTrainedModel) -> None:
    """Give the parameters that `fuse_projections` joined memory of their own again."""
    for linears in _groups(model):
        if joined(linears) is not None:
            with torch.inference_mode(False), torch.no_grad():
                for parameter in (p for m in linears for p in m.parameters(recurse=False)):
                    parameter.data = parameter.data.clone()


def joined(linears: Sequence[Any]) -> tuple[Tensor, Tensor | None] | None:
    """The weight and the bias that those of `linears` are rows of, in order; None where they cannot share a product."""
    if not all(_is_plain(m) for m in linears):
        return None
    weight, biases = _whole([m.weight for m in linears]), [m.bias for m in linears]
    if weight is None or biases.count(None) == len(biases):
        return None if weight is None else (weight, None)
    bias = None if None in biases else _whole(biases)
    return None if bias is None else (weight, bias)


def _whole(parts: list[Tensor]) -> Tensor | None:
    """The tensor that consists of `parts` in order, where they lie in one memory without gaps."""
    first = parts[0]
    storage, place = first.untyped_storage().data_ptr(), first.data_ptr()
    for part in parts:
        like_first = part.dtype == first.dtype and part.device == first.device and part.shape[1:] == first.shape[1:]
        if not like_first or not part.is_contiguous() or part.data_ptr() != place:
            return None
        if part.untyped_storage().data_ptr() != storage:  # neighbours in memory by accident
            return None
        place += part.numel() * part.element_size()
    return first.detach().as_strided((sum(len(part) for part in parts), *first.shape[1:]), first.stride())


def _groups(model: PreTrainedModel) -> Iterator[list[Any]]:
    for layer in family_of(model).decoder_of(model).layers:  # type: ignore[union-attr]
        yield from (g for g in (_mixer_projections(layer), _mlp_projections(layer)) if g)


def _mixer_projections(layer: Any) -> list[Any]:
    if hasattr(layer, "linear_attn"):
        mixer = layer.linear_attn
        return [mixer.in_proj_qkv, mixer.in_proj_z, mixer.in_proj_b, mixer.in_proj_a]
    return [layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj]


def _mlp_projections(layer: Any) -> list[Any]:
    """Of a dense MLP; empty for a mixture of experts."""
    return [layer.mlp.gate_proj, layer.mlp.up_proj] if hasattr(layer.mlp, "gate_proj") else []


def _can_join(linears: list[Any]) -> bool:
    if not all(_is_plain(m) for m in linears) or len({m.bias is None for m in linears}) > 1:
        return False
    parameters = [p for m in linears for p in m.parameters(recurse=False)]
    alike = {(p.dtype, p.device) for p in parameters}
    return len(alike) == 1 and len({m.in_features for m in linears}) == 1


def _join(parameters: list[Any]) -> None:
    with torch.inference_mode(False), torch.no_grad():  # the model may be trained later
        parts = torch.cat([p.data for p in parameters]).split([len(p) for p in parameters])
        for parameter, part in zip(parameters, parts, strict=True):
            parameter.data = part


# ---- what may be replaced ----


def _is_plain(linear: Any) -> bool:
    """Whether a product with `linear.weight` is all that calling the module would do."""
    if type(linear) is not nn.Linear or not _is_untouched(linear):
        return False
    return type(linear.weight.data) is Tensor and linear.weight.device.type != "meta"


def listeners(module: nn.Module) -> list[Any]:
    """Forward hooks that somebody waits for."""
    hooks = [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]
    # transformers leaves hooks behind that gather attention weights when asked; a tree's attention has none to gather.
    return [h for h in hooks if getattr(h, "__module__", None) != "transformers.utils.output_capturing"]


def _is_untouched(module: nn.Module) -> bool:
    """Whether calling the module runs the forward of its class, and nobody listens."""
    return not listeners(module) and "forward" not in module.__dict__  # set on instances by accelerate and by kernels


def _is_stock(module: nn.Module, name: str) -> bool:
    """Whether it is transformers' `Qwen3_5<name>` (or its twin of the mixtures of experts), as they made it."""
    cls = getattr(type(module), "_weaver_original", type(module))
    stock = cls.__module__.startswith("transformers.models.qwen3_5") and cls.__name__ in (
        f"Qwen3_5{name}",
        f"Qwen3_5Moe{name}",
    )
    return stock and _is_untouched(module)


# ---- the forward ----


def _forward(layer: Any, hidden: Tensor, plan: Any, kwargs: dict[str, Any]) -> Tensor:
    normed, _ = _norm(layer.input_layernorm, hidden)
    if hasattr(layer, "linear_attn"):
        mixed = _gated_delta(layer, normed, plan, kwargs)
    else:
        mixed = _attention(layer, normed, plan, kwargs)
    # The sum is new memory, which the MLP may then add to in place: the layer's input may be somebody's tap.
    normed, residual = _norm(layer.post_attention_layernorm, mixed, hidden)
    return _mlp(layer, normed, residual)


def _gated_delta(layer: Any, normed: Tensor, plan: Any, kwargs: dict[str, Any]) -> Tensor:
    mixer, cache = layer.linear_attn, kwargs[CACHE_KEY]
    if not _is_stock(mixer, "GatedDeltaNet") or not _is_untouched(mixer.conv1d):
        return mixer(normed, cache, weaver_tree=plan)
    store = cache.layers[mixer.layer_idx]
    rows, z, b, a = _project(_mixer_projections(layer), normed)
    conv = ops.causal_conv_tree(
        rows,
        store.conv_states[0],
        mixer.conv1d.weight.squeeze(1),
        plan.topology.conv_index,
        mixer.conv1d.bias,
        stash=store.rows,
    )
    query, key, value = conv.split([mixer.key_dim, mixer.key_dim, mixer.value_dim], -1)
    output, _ = ops.gated_delta_tree(
        query.unflatten(-1, (-1, mixer.head_k_dim)),
        key.unflatten(-1, (-1, mixer.head_k_dim)),
        value.unflatten(-1, (-1, mixer.head_v_dim)),
        a,
        b,
        mixer.A_log,
        mixer.dt_bias,
        store.recurrent_states[0],
        plan.topology,
        store.delta,
    )
    z = z.unflatten(-1, (-1, mixer.head_v_dim))
    if _is_stock(mixer.norm, "RMSNormGated"):
        output = _around(output).gated_rms_norm(output, z, mixer.norm.weight, mixer.norm.variance_epsilon)
    else:
        output = mixer.norm(output.reshape(-1, mixer.head_v_dim), z.reshape(-1, mixer.head_v_dim)).view_as(output)
    plan.attended.add(mixer.layer_idx)
    return mixer.out_proj(output.flatten(-2))


def _attention(layer: Any, normed: Tensor, plan: Any, kwargs: dict[str, Any]) -> Tensor:
    attention = layer.self_attn
    norms = attention.q_norm, attention.k_norm
    stock = _is_stock(attention, "Attention") and all(_is_stock(norm, "RMSNorm") for norm in norms)
    if not stock or norms[0].eps != norms[1].eps:
        return attention(hidden_states=normed, weaver_tree=plan, **kwargs)[0]
    store, dim = kwargs[CACHE_KEY].layers[attention.layer_idx], attention.head_dim
    query, key, value = _project(_mixer_projections(layer), normed)
    query, gate = query.unflatten(-1, (-1, 2 * dim)).chunk(2, -1)  # head by head, the query and then its gate
    query = _around(normed).qk_norm_rope(
        query,
        key.unflatten(-1, (-1, dim)),
        value.unflatten(-1, (-1, dim)),
        norms[0].weight,
        norms[1].weight,
        *kwargs["position_embeddings"],
        norms[0].eps,
        store.keys_buffer,
        store.values_buffer,
        plan.lens,
    )
    output = ops.tree_attention(
        query,
        store.keys_buffer,
        store.values_buffer,
        plan.lens,
        plan.topology,
        attention.scaling,
        plan.starts,
        gate=gate,
    )
    plan.attended.add(attention.layer_idx)
    return attention.o_proj(output.flatten(-2))


def _mlp(layer: Any, normed: Tensor, residual: Tensor) -> Tensor:
    """The MLP's output added to `residual`, in its memory where that saves a launch."""
    mlp, whole = layer.mlp, None
    if _is_stock(mlp, "MLP") and isinstance(mlp.act_fn, SiLUActivation | nn.SiLU) and _is_untouched(mlp.act_fn):
        whole = joined(_mlp_projections(layer))
    if whole is None:
        output = mlp(normed)
        return residual + (output[0] if isinstance(output, tuple) else output)  # some mixtures return router logits too
    inner = _around(normed).silu_mul(F.linear(normed, *whole))
    if not _is_plain(mlp.down_proj) or mlp.down_proj.bias is not None:
        return residual + mlp.down_proj(inner)
    residual.flatten(0, -2).addmm_(inner.flatten(0, -2), mlp.down_proj.weight.t())
    return residual


def _norm(norm: Any, x: Tensor, residual: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The normed sum, and the sum."""
    if _is_stock(norm, "RMSNorm"):
        return _around(x).rms_norm(x, norm.weight, norm.eps, residual)
    total = x if residual is None else residual + x
    return norm(total), total


def _project(linears: list[Any], x: Tensor) -> Sequence[Tensor]:
    """What each of `linears` makes of `x`; columns of one product where their weights are one."""
    whole = joined(linears)
    if whole is None:
        return [linear(x) for linear in linears]
    return F.linear(x, *whole).split([linear.out_features for linear in linears], -1)


def _around(x: Tensor) -> Any:
    """The kernels for `x`, or their torch twins."""
    if not x.is_cuda:
        return fused_reference
    from weaver_kernels import fused  # Triton is asked for where it is used

    return fused
