"""Launches and times of what stands around the matrices of a Qwen3.5 decoder layer, captured, on a GPU.

    python -m weaver_kernels.benchmarks.bench_fused

The cores (convolution, delta rule, attention) are skipped in every variant: stock transformers as it is, the same under
torch.compile, the same with Liger's kernels where they are installed, and the fused layers of weaver_hf. `gemms` is the
floor: the four products of a layer with fused weights. A layer's weights exceed the cache, so every call finds it cold.
"""

import copy
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import torch.nn as nn
import torch.nn.functional as F
import triton
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from weaver_kernels import fused, fused_reference
from weaver_kernels.benchmarks.timing import copies, report, time_captured
from weaver_kernels.fused import FusedConfig

try:
    from liger_kernel.ops.rms_norm import LigerRMSNormFunction
    from liger_kernel.ops.swiglu import LigerSiLUMulFunction
except ImportError:
    LigerRMSNormFunction = LigerSiLUMulFunction = None

DEVICE = "cuda"
SLOTS = 1024
ROWS = (1, 16, 64)
LAYERS = {"gdn": 2, "attention": 3}  # of a model of one period
SHAPES: dict[str, dict[str, int]] = {
    "9b": {
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_attention_heads": 16,
        "linear_num_value_heads": 32,
    },
    "27b": {
        "hidden_size": 5120,
        "intermediate_size": 17408,
        "num_attention_heads": 24,
        "linear_num_value_heads": 48,
    },
}
REST: dict[str, Any] = {
    "vocab_size": 1024,
    "num_hidden_layers": 4,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "linear_num_key_heads": 16,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
}


class SkippedCores:
    """The mixers' kernels with nothing in them; `gated` applies the attention's gate, which its kernel would."""

    gated = True

    @staticmethod
    def causal_conv_tree(rows: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return rows

    @staticmethod
    def gated_delta_tree(query: Tensor, key: Tensor, value: Tensor, *args: Any) -> tuple[Tensor, None]:
        return value, None

    @staticmethod
    def tree_attention(query: Tensor, *args: Any, gate: Tensor) -> Tensor:
        output = query.transpose(1, 2)
        return output * gate.sigmoid() if SkippedCores.gated else output


class Slots:
    """A static cache of one attention layer, as the stock forward sees it and as the fused one does."""

    def __init__(self, heads: int, dim: int, nodes: int) -> None:
        self.keys_buffer = torch.zeros(1, heads, SLOTS, dim, dtype=torch.bfloat16, device=DEVICE)
        self.values_buffer = torch.zeros_like(self.keys_buffer)
        self.lens = torch.full((1,), SLOTS // 2, device=DEVICE)
        self.slots = self.lens + torch.arange(nodes, device=DEVICE)
        self.layers = [SimpleNamespace(conv_states=[None], recurrent_states=[None], rows=None, delta=None)] * 3 + [self]

    def update(self, keys: Tensor, values: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        self.keys_buffer.index_copy_(2, self.slots, keys)
        self.values_buffer.index_copy_(2, self.slots, values)
        return self.keys_buffer, self.values_buffer


def skip_stock_cores() -> None:
    from transformers import AttentionInterface
    from transformers.models.qwen3_5 import modeling_qwen3_5 as stock

    stock.causal_conv1d_fn = lambda x, *args, **kwargs: x
    stock.torch_chunk_gated_delta_rule = lambda query, key, value, **kwargs: (value, None)
    AttentionInterface.register("skipped", lambda module, query, *args, **kwargs: (query.transpose(1, 2), None))


def make_model(shape: str) -> Any:
    """A stock model of one period (three Gated DeltaNet layers, one attention layer), random weights."""
    from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

    config = Qwen3_5TextConfig(**{**REST, **SHAPES[shape]}, attn_implementation="skipped")
    with torch.device("meta"):
        model = Qwen3_5ForCausalLM(config)
    model = model.to(torch.bfloat16).to_empty(device=DEVICE).eval()
    for name, parameter in model.named_parameters():
        scale = 0.3 if parameter.ndim == 1 else 0.02
        nn.init.normal_(parameter, 1.0 if "A_log" in name or "linear_attn.norm" in name else 0.0, scale)
    model.model.rotary_emb = type(model.model.rotary_emb)(config).to(DEVICE)
    return model


class Inputs(NamedTuple):
    hidden: Tensor
    angles: tuple[Tensor, Tensor]
    slots: Slots


def make_inputs(model: Any, nodes: int) -> Inputs:
    config = model.config
    hidden = torch.randn(1, nodes, config.hidden_size, device=DEVICE).bfloat16()
    positions = torch.arange(nodes, device=DEVICE)[None].expand(3, 1, -1) + SLOTS // 2
    angles = model.model.rotary_emb(hidden, positions)
    return Inputs(hidden, angles, Slots(config.num_key_value_heads, config.head_dim, nodes))


def stock_call(layer: Any, kind: str, inputs: Inputs) -> Callable[[], Tensor]:
    from weaver_hf.target.compat import CACHE_KEY

    kwargs = {CACHE_KEY: inputs.slots if kind == "attention" else None}
    return lambda: layer(inputs.hidden, position_embeddings=inputs.angles, attention_mask=None, **kwargs)


def fused_call(layer: Any, inputs: Inputs) -> Callable[[], Tensor]:
    from weaver_hf.target.compat import CACHE_KEY

    topology = SimpleNamespace(conv_index=None)
    plan = SimpleNamespace(fused=True, topology=topology, lens=inputs.slots.lens, starts=None, attended=set())
    kwargs = {CACHE_KEY: inputs.slots, "weaver_tree": plan}
    return lambda: layer(inputs.hidden, position_embeddings=inputs.angles, **kwargs)


def gemms_call(layer: Any, inputs: Inputs) -> Callable[[], Tensor]:
    """The four products of a layer whose weights are fused, and nothing else."""
    from weaver_hf.target.fused import _mixer_projections, _mlp_projections, joined

    mixer, mlp = joined(_mixer_projections(layer)), joined(_mlp_projections(layer))
    assert mixer is not None
    assert mlp is not None
    last = layer.linear_attn.out_proj if hasattr(layer, "linear_attn") else layer.self_attn.o_proj
    nodes = inputs.hidden.shape[1]
    first, inner = (torch.randn(nodes, n, device=DEVICE).bfloat16() for n in (last.in_features, mlp[0].shape[0] // 2))
    total = torch.zeros(nodes, last.out_features, dtype=torch.bfloat16, device=DEVICE)

    def call() -> Tensor:
        F.linear(inputs.hidden, mixer[0])
        F.linear(first, last.weight)
        F.linear(inputs.hidden, mlp[0])
        return total.addmm_(inner, layer.mlp.down_proj.weight.t())

    return call


def with_liger(model: Any) -> Any:
    """A copy with Liger's RMS norms and SwiGLU; it has nothing for the gated norm and for q and k."""

    def norm(module: Any) -> Callable[[Tensor], Tensor]:
        return lambda x: LigerRMSNormFunction.apply(x, module.weight, module.eps, 1.0, "gemma", False)

    model = copy.deepcopy(model)
    for module in model.modules():
        if type(module).__name__ == "Qwen3_5RMSNorm":
            module.forward = norm(module)
        elif type(module).__name__ == "Qwen3_5MLP":
            module.forward = lambda x, m=module: m.down_proj(LigerSiLUMulFunction.apply(m.gate_proj(x), m.up_proj(x)))
    return model


def count_launches(call: Callable[[], Any]) -> int:
    """Kernels and copies of one replay of the captured call."""
    for _ in range(2):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    graph.replay()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        graph.replay()
        torch.cuda.synchronize()
    return sum(event.count for event in profiled.key_averages() if event.self_device_time_total > 0)


# ---- correctness ----


def require(name: str, error: float, limit: float) -> None:
    report(row="gate", what=name, error=error, limit=limit)
    if not error < limit:
        raise SystemExit(f"Found an error of {error} in {name}; expected less than {limit}. No speed is printed.")


def relative(output: Tensor, expected: Tensor) -> float:
    return float((output.double() - expected.double()).norm() / expected.double().norm())


def kernel_args(nodes: int) -> dict[str, tuple[Any, ...]]:
    """Arguments of each kernel at 27B shapes, bf16."""

    def rand(*shape: int) -> Tensor:
        return torch.randn(*shape, device=DEVICE).bfloat16()

    projected = rand(1, nodes, 2 * 24 * 256 + 2 * 4 * 256)
    q, k, v = projected.split([2 * 24 * 256, 4 * 256, 4 * 256], -1)
    angle = torch.randn(1, nodes, 32, device=DEVICE).repeat(1, 1, 2)
    slots = Slots(4, 256, nodes)
    return {
        "rms_norm": (rand(1, nodes, 5120), rand(5120), 1e-6, rand(1, nodes, 5120)),
        "gated_rms_norm": (
            rand(1, nodes, 48, 128),
            rand(1, nodes, 16480)[..., 10240:16384].unflatten(-1, (48, 128)),
            rand(128),
            1e-6,
        ),
        "silu_mul": (rand(1, nodes, 34816),),
        "qk_norm_rope": (
            q.unflatten(-1, (24, 512))[..., :256],
            k.unflatten(-1, (4, 256)),
            v.unflatten(-1, (4, 256)),
            rand(256),
            rand(256),
            angle.cos().bfloat16(),
            angle.sin().bfloat16(),
            1e-6,
            slots.keys_buffer,
            slots.values_buffer,
            slots.lens,
        ),
    }


def first(output: Any) -> Tensor:
    return output if isinstance(output, Tensor) else output[0]


def gate_kernels(nodes: int) -> None:
    for name, args in kernel_args(nodes).items():
        kept = [x.clone() if isinstance(x, Tensor) and x.dim() == 4 and x.is_contiguous() else x for x in args]
        expected = first(getattr(fused_reference, name)(*kept))
        require(f"{name} T={nodes}", relative(first(getattr(fused, name)(*args)), expected), 2e-3)
        if name == "qk_norm_rope":
            require(f"its keys T={nodes}", relative(args[8], kept[8]), 2e-3)
            require(f"its values T={nodes}", relative(args[9], kept[9]), 1e-9)


# ---- times ----

SWEEP = {
    "rms_norm": [FusedConfig(1, warps) for warps in (4, 8, 16)],
    "gated_rms_norm": [FusedConfig(b, w) for b, w in ((4, 1), (4, 4), (8, 4), (16, 4), (16, 8))],
    "silu_mul": [FusedConfig(b, w) for b, w in ((256, 2), (512, 4), (1024, 4), (2048, 4), (2048, 8))],
    "qk_norm_rope": [FusedConfig(b, w) for b, w in ((1, 1), (2, 1), (2, 2), (4, 2), (4, 4))],
}


def bench_kernels(nodes: int) -> None:
    """Each kernel alone: every configuration, the default, and the torch operations that it replaces."""
    size = sum(x.numel() * x.element_size() for x in kernel_args(nodes)["silu_mul"])
    sets = [kernel_args(nodes) for _ in range(min(copies(size), 64))]  # far from cold at T = 1, where bytes are few
    for name, configs in SWEEP.items():

        def times(function: Callable[..., Any], name: str = name, **kwargs: Any) -> float:
            return time_captured([lambda args=s[name]: function(*args, **kwargs) for s in sets])  # type: ignore[misc]

        function = getattr(fused, name)
        by_config = {config: times(function, config=config) for config in configs}
        best = min(by_config, key=lambda config: by_config[config])
        report(
            row="kernel",
            name=name,
            T=nodes,
            us=times(function),
            torch_us=times(getattr(fused_reference, name)),
            best=list(best),
            best_us=by_config[best],
            sweep={str(list(c)): round(t, 2) for c, t in by_config.items()},
        )


def bench_layers(shape: str) -> None:
    """Launches and microseconds of one layer of each kind, and what it takes over its products."""
    from weaver_hf import WeaverConfig, WeaverModel
    from weaver_hf.target.fused import fuse_projections

    stock = make_model(shape)
    liger = with_liger(stock) if LigerRMSNormFunction is not None else None
    mine = copy.deepcopy(stock)
    WeaverModel(WeaverConfig()).attach(mine)
    apart = copy.deepcopy(stock)
    WeaverModel(WeaverConfig()).attach(apart)
    fuse_projections(mine)
    inputs = {nodes: make_inputs(stock, nodes) for nodes in ROWS}
    SkippedCores.gated = True
    for nodes, kind in ((nodes, kind) for nodes in ROWS for kind in LAYERS):
        expected = stock_call(stock.model.layers[LAYERS[kind]], kind, inputs[nodes])()
        for name, model in (("fused", mine), ("apart", apart)):
            output = fused_call(model.model.layers[LAYERS[kind]], inputs[nodes])()
            require(f"{shape} {kind} {name} T={nodes}", relative(output, expected), 1e-2)
    SkippedCores.gated = False
    for kind, index in LAYERS.items():
        for nodes in ROWS:
            calls = {
                "gemms": gemms_call(mine.model.layers[index], inputs[nodes]),
                "stock": stock_call(stock.model.layers[index], kind, inputs[nodes]),
                "apart": fused_call(apart.model.layers[index], inputs[nodes]),
                "fused": fused_call(mine.model.layers[index], inputs[nodes]),
            }
            if liger is not None:
                calls["liger"] = stock_call(liger.model.layers[index], kind, inputs[nodes])
            if nodes == max(ROWS):  # compiling takes longer than all else here
                calls["compiled"] = torch.compile(calls["stock"], dynamic=False)
            floor = None
            for variant, call in calls.items():
                us = time_captured([call] * 8)
                floor = us if floor is None else floor
                row = {
                    "shape": shape,
                    "kind": kind,
                    "T": nodes,
                    "variant": variant,
                    "us": us,
                    "over_gemms_us": us - floor,
                }
                report(row="layer", **row, launches=count_launches(call))


@torch.no_grad()
def main() -> None:
    if not torch.cuda.is_available():
        raise SystemExit("Found no GPU; this measures Triton kernels on one.")
    torch.manual_seed(0)
    from weaver_hf.target import fused as layers

    layers.ops = SkippedCores  # type: ignore[assignment]
    skip_stock_cores()
    report(row="card", name=torch.cuda.get_device_name(0), torch=torch.__version__, triton=triton.__version__)
    for nodes in ROWS:
        gate_kernels(nodes)
    for nodes in ROWS:
        bench_kernels(nodes)
    for shape in SHAPES:
        bench_layers(shape)
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
