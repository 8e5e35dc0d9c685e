"""The tree attention kernel: on CPU in triton's interpreter, on a GPU as compiled, always against the reference."""

import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from support import KINDS, random_parents, relative
from transformers.models.gemma2.modeling_gemma2 import eager_attention_forward as capped_attention
from transformers.models.gpt_oss.modeling_gpt_oss import eager_attention_forward as sink_attention

from weaver_kernels import attention, reference
from weaver_kernels.attention import AttentionConfig, split_count, tree_attention

SMALL = AttentionConfig(rows=16, slots=16, warps=4, stages=2, splits=3)
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ROUNDING = {torch.float32: 5e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}


@pytest.fixture(autouse=True)
def _bf16_products(monkeypatch):
    """The interpreter keeps bf16 as the bits of uint16 and multiplies those as integers: widen them to fp32."""
    if DEVICE == "cuda":
        return
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle, tl

    product = InterpreterBuilder.create_dot

    def widen(x):
        if x.dtype.scalar != tl.bfloat16:
            return x
        return TensorHandle((x.data.astype("uint32") << 16).view("float32"), tl.float32)

    monkeypatch.setattr(
        InterpreterBuilder, "create_dot", lambda self, a, b, *rest: product(self, widen(a), widen(b), *rest)
    )


class Case:
    """Random inputs of a batch of random trees; what is no committed slot and no node holds NaN."""

    def __init__(
        self, nodes=5, lens=(37,), heads=2, kv_heads=1, dim=16, starts=None, kind="random", dtype=torch.float32, seed=0
    ):
        gen = torch.Generator().manual_seed(seed)
        batch, capacity = len(lens), max(lens) + nodes + 5
        parents = torch.tensor([random_parents(nodes, kind, seed + b) for b in range(batch)])
        self.topology = reference.TreeTopology(*[x.to(DEVICE) for x in reference.tree_topology(parents, 4)])
        self.lens = torch.tensor(lens, device=DEVICE)
        self.starts = None if starts is None else torch.tensor(starts, device=DEVICE)
        self.scaling = dim**-0.5
        # As a model hands them over: a transposed query, keys and values out of the stack of all layers.
        self.query = torch.randn(batch, nodes, heads, dim, generator=gen).to(DEVICE, dtype).transpose(1, 2)
        self.clean = torch.randn(2, 2, batch, kv_heads, capacity, dim, generator=gen).to(DEVICE, dtype)
        slot = torch.arange(capacity, device=DEVICE)
        unused = slot >= self.lens[:, None] + nodes
        if starts is not None:
            unused |= slot < self.starts[:, None]
        self.stack = self.clean.masked_fill(unused[None, None, :, None, :, None], float("nan"))

    def run(self, config=SMALL, **kwargs):
        key, value = self.stack[1]
        return tree_attention(
            self.query, key, value, self.lens, self.topology, self.scaling, self.starts, config=config, **kwargs
        )

    def visible(self, window=None):
        return reference.visible_slots(self.topology, self.lens, self.clean.shape[-2], self.starts, window)

    def expected(self, window=None):
        key, value = self.clean[1].double()
        return reference.tree_attention(self.query.double(), key, value, self.visible(window), self.scaling)

    def stock(self, forward, window=None, **kwargs):
        """One of transformers' eager attention functions on the same inputs."""
        query, (key, value) = self.query.double(), self.clean[1].double()
        module = SimpleNamespace(
            num_key_value_groups=query.shape[1] // key.shape[1], training=False, **kwargs.pop("module", {})
        )
        mask = torch.zeros(1, dtype=torch.float64, device=query.device)
        mask = mask.masked_fill(~self.visible(window)[:, None], float("-inf"))
        return forward(module, query, key, value, mask, scaling=self.scaling, **kwargs)[0]


@pytest.mark.parametrize(
    ("nodes", "kind"), [(1, "chain"), *[(5, kind) for kind in KINDS], (17, "comb"), (33, "random")]
)
def test_equals_the_reference_at_every_node(nodes, kind):
    case = Case(nodes, kind=kind)
    assert relative(case.run(), case.expected()) < 2e-6


@pytest.mark.parametrize("nodes", [64, 130], ids=["one-word", "three-words"])
def test_ancestor_bits_are_read_across_words_and_in_the_sign_bit(nodes):
    case = Case(nodes, lens=(9,), heads=1, kind="chain")  # tiles of 32 slots begin 9 bits before each word's half
    assert relative(case.run(SMALL._replace(rows=64, slots=32, splits=2)), case.expected()) < 2e-6


@pytest.mark.parametrize("length", [0, 1, 15, 16, 17, 48])
def test_every_phase_of_prefix_and_tiles(length):
    case = Case(7, lens=(length,))
    assert relative(case.run(), case.expected()) < 2e-6


@pytest.mark.parametrize("splits", [1, 2, 5, 40])
def test_any_number_of_splits_also_more_than_tiles(splits):
    case = Case(lens=(70,))
    assert relative(case.run(SMALL._replace(splits=splits)), case.expected()) < 2e-6


@pytest.mark.parametrize("slots", [16, 32, 64])
def test_any_tile(slots):
    case = Case(9, lens=(70,))
    assert relative(case.run(SMALL._replace(rows=32, slots=slots)), case.expected()) < 2e-6


@pytest.mark.parametrize(("heads", "kv_heads"), [(2, 2), (4, 2), (3, 1), (12, 2), (8, 1)])
def test_any_ratio_of_query_heads_to_key_heads(heads, kv_heads):
    case = Case(3, heads=heads, kv_heads=kv_heads)
    assert relative(case.run(), case.expected()) < 2e-6


@pytest.mark.parametrize("dim", [16, 48, 64, 80, 256])
def test_any_head_dimension(dim):
    case = Case(3, dim=dim)
    assert relative(case.run(), case.expected()) < 2e-6


def test_each_row_of_a_batch_has_its_own_tree_length_and_padding():
    case = Case(5, lens=(40, 3, 0), kv_heads=2, starts=(20, 0, 0))
    assert relative(case.run(), case.expected()) < 2e-6


@pytest.mark.parametrize("start", [0, 1, 16, 36, 37])
def test_padding_is_not_read(start):
    case = Case(starts=(start,))
    assert relative(case.run(), case.expected()) < 2e-6


@pytest.mark.parametrize(
    ("window", "kind"), [(1, "random"), (2, "chain"), (7, "chain"), (7, "random"), (30, "comb"), (1000, "random")]
)
def test_a_window_counts_positions_along_the_path(window, kind):
    case = Case(9, lens=(37, 12), starts=(3, 12), kind=kind, heads=1)
    assert relative(case.run(window=window), case.expected(window)) < 2e-6


@pytest.mark.parametrize("window", [None, 6])
def test_softcap_equals_gemma2(window):
    case = Case(6, heads=4, kv_heads=2)
    case.query *= 20  # deep in the bend
    assert relative(case.run(softcap=3.0, window=window), case.stock(capped_attention, window, softcap=3.0)) < 2e-6


@pytest.mark.parametrize("window", [None, 6])
def test_sinks_equal_gpt_oss(window):
    case = Case(6, heads=4, kv_heads=2)
    sinks = torch.tensor([-30.0, 0.0, 2.0, 40.0], device=DEVICE)
    expected = case.stock(sink_attention, window, module={"sinks": sinks.double()})
    assert relative(case.run(sinks=sinks, window=window), expected) < 2e-6


@pytest.mark.parametrize("strided", [False, True], ids=["flat", "half-of-a-projection"])
def test_the_gate_multiplies_the_output_by_its_sigmoid(strided):
    case = Case(heads=6, kv_heads=2)
    raw = torch.randn(1, 5, 6, 32, device=DEVICE)[..., 16:]
    gate = raw if strided else raw.reshape(1, 5, 96)
    assert relative(case.run(gate=gate), case.expected() * raw.sigmoid()) < 2e-6


def test_keys_stored_slot_by_slot_need_no_copy():
    case = Case(kv_heads=2)
    case.stack = case.stack.transpose(3, 4).contiguous().transpose(3, 4)  # [.., S, Hkv, D] in memory
    assert relative(case.run(), case.expected()) < 2e-6


def test_scores_far_apart_stay_finite():
    case = Case(lens=(70,))
    case.query *= 300
    assert relative(case.run(), case.expected()) < 1e-4


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_precision_rounds_as_its_type_does(dtype):
    case = Case(7, dtype=dtype, lens=(50,))
    out = case.run()
    assert out.dtype == dtype
    assert relative(out, case.expected()) < ROUNDING[dtype]


def test_the_default_configuration_is_right_too():
    case = Case(dim=32)
    assert relative(case.run(config=None), case.expected()) < 2e-6


@pytest.mark.parametrize("dtype", ROUNDING, ids=str)
@pytest.mark.parametrize("dim", [64, 80, 128, 192, 256])
@pytest.mark.parametrize("nodes", [1, 3, 9, 64, 256])
def test_configurations_fit_the_shared_memory_of_a_multiprocessor(nodes, dim, dtype):
    query, key = (
        torch.empty(1, 24, nodes, dim, dtype=dtype, device="meta"),
        torch.empty(1, 4, 70000, dim, device="meta"),
    )
    config = attention.attention_config(query, key)
    size = torch.finfo(dtype).bits // 8 * dim * (config.rows + 2 * config.slots * config.stages)
    assert size <= 227 * 1024 - 4096
    assert config.slots <= 64


@pytest.mark.parametrize(
    ("programs", "most", "splits"),
    [(12, 1000, 11), (4, 1000, 33), (24, 1000, 11), (256, 1000, 1), (4, 7, 7), (4, 0, 1)],
)
def test_splits_fill_a_device_of_132_multiprocessors(programs, most, splits):
    assert split_count(programs, 132, most) == splits


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"window": 0}, "window of 0"),
        ({"softcap": -1.0}, "softcap -1.0"),
        ({"gate": torch.zeros(1, 5, 2, 32)[..., ::2]}, "gate of strides"),
        ({"config": SMALL._replace(slots=128)}, "128 slots"),
    ],
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else "",
)
def test_what_cannot_be_computed_is_refused_with_what_was_found(change, message):
    with pytest.raises(ValueError, match=message):
        Case().run(**change)


def test_inputs_that_do_not_fit_each_other_are_refused():
    case, other = Case(), Case(nodes=6)
    key, value = case.stack[1]
    with pytest.raises(ValueError, match="topology of"):
        tree_attention(case.query, key, value, case.lens, other.topology, 1.0)
    with pytest.raises(TypeError, match="bfloat16"):
        tree_attention(case.query, key.bfloat16(), value, case.lens, case.topology, 1.0)
    with pytest.raises(ValueError, match="multiple of Hkv"):
        tree_attention(case.query, key.repeat(1, 3, 1, 1), value, case.lens, case.topology, 1.0)
    with pytest.raises(ValueError, match="at most 256"):
        Case(1, dim=272).run()


COMPILE = """
import torch, triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from weaver_kernels import attention

def build(kernel, target, limit, name, constants, warps, stages):
    floats = ("partial", "stats")
    indices = ("lens", "starts", "bits", "depths")
    inputs = ("query", "key", "value", "sinks", "gate", "output")
    signature, aligned = {}, {}
    for i, arg in enumerate(kernel.arg_names):
        signature[arg] = (
            "constexpr" if arg in constants else "*fp32" if arg in floats else "*i64" if arg in indices
            else "*" + name if arg in inputs else "fp32" if arg in ("scale", "softcap") else "i32"
        )
        if signature[arg][0] == "*" or arg.startswith(("stride_q", "stride_k", "stride_v")):
            aligned[(i,)] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, signature, constants, aligned)
    made = triton.compile(source, target=target, options={"num_warps": warps, "num_stages": stages})
    assert made.metadata.shared <= limit, (constants, made.metadata.shared)

def compile_for(target, limit, nodes, dim, dtype, name, **absent):
    query = torch.empty(1, 24, nodes, dim, dtype=dtype, device="meta")
    config = attention.attention_config(query, query[:, :4])
    constants = dict(STRIDE_KS=dim, STRIDE_VS=dim, G=6, DIM=dim, DIM2=triton.next_power_of_2(dim), ROWS=config.rows,
                     SLOTS=config.slots, PRECISION="ieee" if name == "fp32" else "tf32")
    build(attention._split_kernel, target, limit, name, constants | absent, config.warps, config.stages)

hopper, limit = GPUTarget("cuda", 90, 32), 227 * 1024
plain = dict(starts=None, window=None, softcap=None)
for nodes in (1, 4, 10, 64):
    compile_for(hopper, limit, nodes, 256, torch.bfloat16, "bf16", **plain)
compile_for(hopper, limit, 64, 80, torch.float16, "fp16")
compile_for(hopper, limit, 64, 256, torch.float32, "fp32", **plain)
merge = dict(G=6, DIM=80, WIDTH=128, SLOTS=32, SPLITS2=64, MERGED=16, LOG2E=attention.LOG2E)
build(attention._merge_kernel, hopper, limit, "bf16", merge, 4, 3)
torch.version.hip = "6"
amd = GPUTarget("hip", "gfx942", 64)
for nodes in (1, 64):
    compile_for(amd, 64 * 1024, nodes, 256, torch.bfloat16, "bf16")
build(attention._merge_kernel, amd, 64 * 1024, "bf16", merge, 4, 1)
"""


@pytest.mark.slow
def test_the_kernels_compile_for_hopper_and_rocm_and_fit_their_shared_memory(tmp_path):
    """Without a GPU. The interpreter accepts more than the compiler does."""
    env = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    env["PYTHONPATH"] = os.pathsep.join(sys.path)
    script = tmp_path / "compile.py"
    script.write_text(COMPILE, encoding="utf-8")
    done = subprocess.run([sys.executable, str(script)], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]


gpu = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU on this machine")]


def real(nodes=64, **kwargs):
    return Case(nodes, **{"lens": (8191,), "heads": 24, "kv_heads": 4, "dim": 256, "dtype": torch.bfloat16, **kwargs})


class TestOnTheCard:
    pytestmark = gpu

    @pytest.mark.parametrize("dtype", ROUNDING, ids=str)
    @pytest.mark.parametrize("nodes", [1, 5, 16, 64, 128])
    def test_27b_heads_equal_the_reference_in_fp64(self, nodes, dtype):
        case = real(nodes, dtype=dtype)
        assert relative(case.run(config=None), case.expected()) < ROUNDING[dtype]

    @pytest.mark.parametrize("dim", [64, 80, 128, 256])
    @pytest.mark.parametrize("nodes", [1, 4, 8, 33, 200])
    def test_every_row_of_the_table(self, nodes, dim):
        case = real(nodes, lens=(1000, 77), starts=(13, 0), heads=8, kv_heads=2, dim=dim)
        assert relative(case.run(config=None), case.expected()) < ROUNDING[torch.bfloat16]

    @pytest.mark.parametrize("window", [1, 128, 4096])
    def test_windows(self, window):
        case = real(lens=(6000, 100), starts=(0, 9), heads=16, kv_heads=2, dim=64)
        assert relative(case.run(config=None, window=window), case.expected(window)) < ROUNDING[torch.bfloat16]

    def test_softcap_sinks_and_gate(self):
        case = real(heads=8, kv_heads=4, lens=(2000,))
        assert relative(case.run(config=None, softcap=50.0), case.stock(capped_attention, softcap=50.0)) < 8e-3
        sinks = torch.linspace(-5, 12, 8, device=DEVICE, dtype=torch.bfloat16)
        expected = case.stock(sink_attention, module={"sinks": sinks.double()})
        assert relative(case.run(config=None, sinks=sinks), expected) < 8e-3
        gate = torch.randn(1, 64, 8 * 256, device=DEVICE, dtype=torch.bfloat16)
        gated = case.expected() * gate.double().sigmoid().view(1, 64, 8, 256)
        assert relative(case.run(config=None, gate=gate), gated) < 8e-3

    def test_100_runs_are_bit_identical(self):
        case = real()
        first = case.run(config=None)
        assert all(torch.equal(first, case.run(config=None)) for _ in range(100))

    def test_one_captured_graph_serves_every_length(self):
        case = real(lens=(30000,))
        case.stack, case.clean = case.clean, case.clean  # nodes are moved below: nothing is NaN
        case.run(config=None)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = case.run(config=None)
        for length in (0, 5, 1000, 29999):
            case.lens.fill_(length)
            graph.replay()
            assert relative(out, case.expected()) < 8e-3
