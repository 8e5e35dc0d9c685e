"""The gated delta tree kernel against the torch reference: in Triton's interpreter without a GPU, compiled with one."""

import os
import subprocess
import sys

import pytest
import torch
from support import KINDS, random_tree, relative, sequential_delta
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5RMSNormGated

from weaver_kernels import reference
from weaver_kernels.gated_delta import GatedDeltaConfig, default_config, gated_delta_tree, unsupported

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = {torch.float32: 2e-6, torch.float16: 3e-4, torch.bfloat16: 2e-3}  # of outputs: their own rounding flips
STASH = 1e-6  # of u, k, G, whatever the dtype of the inputs


def inputs(nodes, batch=1, key_heads=1, ratio=2, dk=16, dv=32, dtype=torch.float32, repeated=0.0, seed=0):
    """Arguments up to the state: heads are views of one row of all channels, a and b of one projection."""
    gen = torch.Generator().manual_seed(seed)
    heads = key_heads * ratio

    def rand(*shape):
        return torch.randn(*shape, generator=gen)

    rows = rand(batch, nodes, 2 * key_heads * dk + heads * dv)
    same = torch.rand(batch, nodes, 1, generator=gen) < repeated
    rows = torch.where(same, rows[:, :1] + 0.01 * rand(*rows.shape), rows)
    gates = rand(batch, nodes, 2 * heads)
    if repeated:  # what breaks low precision: equal keys written at full strength, little decay
        gates += torch.tensor([-3.0] * heads + [4.0] * heads)
    rows, gates = rows.to(DEVICE, dtype), gates.to(DEVICE, dtype)
    query, key, value = rows.split([key_heads * dk, key_heads * dk, heads * dv], -1)
    a, b = gates.chunk(2, -1)
    A_log, dt_bias = (rand(heads).to(DEVICE) for _ in range(2))
    state = 0.3 * rand(batch, heads, dk, dv).to(DEVICE)
    split = (query.unflatten(-1, (-1, dk)), key.unflatten(-1, (-1, dk)), value.unflatten(-1, (-1, dv)))
    return [*split, a, b, A_log, dt_bias, state]


def topology(nodes, kind, batch=1, seed=0):
    return reference.tree_topology(
        random_tree(nodes, kind, seed=seed, batch=batch, vocab=nodes + 1).parents.to(DEVICE), 4
    )


def expected(args, tree, dtype=None):
    """The reference; in `dtype`, from the same rounded inputs, g and beta."""
    query, key, value, a, b, A_log, dt_bias, state = args
    rows = query, key, value, *reference.gating(a, b, A_log, dt_bias), state
    return reference.gated_delta_tree(*(x if dtype is None else x.to(dtype) for x in rows), tree.ancestors)


def assert_equal_up_to_rounding(got, want, dtype):
    assert got[0].dtype == dtype
    assert got[0].is_contiguous()
    assert relative(got[0], want[0]) < DTYPES[dtype]
    for mine, theirs in zip(got[1], want[1], strict=True):
        assert mine.dtype == torch.float32
        assert relative(mine, theirs) < STASH


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("nodes", [1, 5, 17, 33])
def test_outputs_and_stash_equal_the_reference(nodes, kind, dtype):
    args, tree = inputs(nodes, ratio=1, dtype=dtype), topology(nodes, kind)
    assert_equal_up_to_rounding(gated_delta_tree(*args, tree), expected(args, tree), dtype)


@pytest.mark.parametrize("ratio", [1, 3, 4, 5])
def test_each_group_of_value_heads_reads_its_own_key_head(ratio):
    args, tree = inputs(9, key_heads=2, ratio=ratio, dtype=torch.bfloat16), topology(9, "random")
    assert_equal_up_to_rounding(gated_delta_tree(*args, tree), expected(args, tree), torch.bfloat16)


@pytest.mark.parametrize(("dk", "dv"), [(16, 16), (32, 64), (64, 16)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_key_and_value_dimensions_may_differ(dk, dv, dtype):
    args, tree = inputs(7, dk=dk, dv=dv, dtype=dtype), topology(7, "comb")
    assert_equal_up_to_rounding(gated_delta_tree(*args, tree), expected(args, tree), dtype)


@pytest.mark.parametrize("nodes", [31, 70])
@pytest.mark.parametrize("block", [16, 32, 64])
def test_every_block_size_gives_the_same_result_below_at_and_beyond_its_width(block, nodes):
    args, tree = inputs(nodes, ratio=1, dv=16, dtype=torch.bfloat16), topology(nodes, "random")
    got = gated_delta_tree(*args, tree, config=GatedDeltaConfig(block, 16, 16, 4))
    assert_equal_up_to_rounding(got, expected(args, tree), torch.bfloat16)


@pytest.mark.parametrize("block", [16, 64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_key_columns_may_be_taken_in_parts(dtype, block):
    args, tree = inputs(19, dk=32, dtype=dtype), topology(19, "random")
    got = gated_delta_tree(*args, tree, config=GatedDeltaConfig(block, 32, 16, 4))
    assert_equal_up_to_rounding(got, expected(args, tree), dtype)


@pytest.mark.parametrize("kind", KINDS)
def test_trees_beyond_two_words_of_bits(kind):
    args, tree = inputs(130, ratio=1, dv=16, dtype=torch.bfloat16), topology(130, kind)
    assert_equal_up_to_rounding(gated_delta_tree(*args, tree), expected(args, tree), torch.bfloat16)


def test_dead_blocks_are_skipped_without_a_trace():
    """Two branches of the root, one after the other: the second reads nothing of the first but the root's block."""
    parents = torch.tensor([[-1, *range(47), 0, *range(48, 95)]], device=DEVICE)
    args, tree = inputs(96, ratio=1, dv=16, dtype=torch.bfloat16), reference.tree_topology(parents, 4)
    assert not tree.ancestors[0, 48:, 16:48].any()
    got = gated_delta_tree(*args, tree, config=GatedDeltaConfig(16, 16, 16, 4))
    assert_equal_up_to_rounding(got, expected(args, tree), torch.bfloat16)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rows_of_a_batch_use_their_own_tree_and_state(dtype):
    args, tree = inputs(19, batch=3, ratio=1, dtype=dtype), topology(19, "random", batch=3)
    assert not torch.equal(tree.ancestors[0], tree.ancestors[1])
    assert_equal_up_to_rounding(gated_delta_tree(*args, tree), expected(args, tree), dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", ["chain", "random"])
@pytest.mark.parametrize("nodes", [16, 64])
def test_repeated_keys_lose_no_precision_in_the_inverse(nodes, kind, dtype):
    args, tree = inputs(nodes, ratio=1, repeated=1.0, dtype=dtype), topology(nodes, kind)
    _, stash = gated_delta_tree(*args, tree)
    _, exact = expected(args, tree, torch.float64)
    assert relative(stash.updates, exact.updates) < 4e-6


def test_every_node_equals_a_chain_over_its_path():
    args, tree = inputs(24, ratio=1), random_tree(24, "random")
    whole, _ = gated_delta_tree(*args, topology(24, "random"))
    for node in (23, 11):
        path = tree.path(node)
        rows = [x[:, path] for x in args[:5]]
        chain, _ = gated_delta_tree(*rows, *args[5:], topology(len(path), "chain"))
        assert relative(chain[0, -1], whole[0, node]) < 2e-6


def test_the_stash_is_written_into_given_buffers_and_nowhere_else():
    args, tree = inputs(17, batch=2, dtype=torch.bfloat16), topology(17, "random", batch=2)
    room = [torch.full((3, 2, *shape), 7.0, device=DEVICE) for shape in ((1, 17, 16), (2, 17, 32), (2, 17))]
    given = reference.GatedDeltaStash(*(x[1] for x in room))
    output, stash = gated_delta_tree(*args, tree, given)
    assert all(mine is theirs for mine, theirs in zip(stash, given, strict=True))
    assert_equal_up_to_rounding((output, stash), expected(args, tree), torch.bfloat16)
    for x in room:
        assert (x[[0, 2]] == 7.0).all()


def test_a_stash_with_room_for_more_nodes_keeps_what_lies_behind_them():
    args, tree = inputs(9), topology(9, "comb")
    room = [torch.full(shape, 7.0, device=DEVICE) for shape in ((1, 1, 20, 16), (1, 2, 20, 32), (1, 2, 20))]
    given = reference.GatedDeltaStash(*(x[:, :, :9] for x in room))
    assert_equal_up_to_rounding(gated_delta_tree(*args, tree, given), expected(args, tree), torch.float32)
    for x in room:
        assert (x[:, :, 9:] == 7.0).all()


def test_inputs_and_state_are_only_read():
    args, tree = inputs(18, dtype=torch.bfloat16), topology(18, "random")
    before = [x.clone() for x in args]
    gated_delta_tree(*args, tree)
    for x, y in zip(args, before, strict=True):
        assert torch.equal(x, y)


@pytest.mark.parametrize("shift", [-40.0, -12.0, 0.0, 19.0, 60.0])
def test_decays_of_any_size_are_accurate_and_finite(shift):
    args, tree = inputs(20), topology(20, "random")
    args[3] = args[3] + shift
    output, stash = gated_delta_tree(*args, tree)
    assert_equal_up_to_rounding((output, stash), expected(args, tree), torch.float32)
    assert output.isfinite().all()


def test_zero_keys_stay_finite():
    args, tree = inputs(6), topology(6, "star")
    args[1] = torch.zeros_like(args[1])
    (output, stash), (want, want_stash) = gated_delta_tree(*args, tree), expected(args, tree)
    assert relative(output, want) < 2e-6
    assert relative(stash.updates, want_stash.updates) < STASH
    assert (stash.keys == 0).all()


@pytest.mark.parametrize("rounds", [4, pytest.param(300, marks=pytest.mark.slow)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_committed_states_do_not_drift(dtype, rounds):
    state = state64 = torch.zeros(1, 1, 16, 16, device=DEVICE)
    worst = 0.0
    for round_ in range(rounds):
        args = inputs(16, ratio=1, dv=16, repeated=0.3, dtype=dtype, seed=round_)
        tree = topology(16, "random", seed=round_)
        nodes = random_tree(16, "random", seed=round_).path(round_ % 16)
        path, lengths = torch.tensor([nodes], device=DEVICE), torch.tensor([len(nodes)], device=DEVICE)
        _, stash = gated_delta_tree(*args[:-1], state, tree)
        _, exact = expected([*args[:-1], state64], tree, torch.float64)
        state = reference.gated_delta_commit(state, stash, path, lengths)
        state64 = reference.gated_delta_commit(state64.double(), exact, path, lengths)
        worst = max(worst, relative(state, state64))
    assert worst < 1e-6


@pytest.mark.parametrize("weights", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_fused_norm_equals_the_layers_own(dtype, weights):
    args, tree = inputs(19, dtype=dtype), topology(19, "random")
    norm = Qwen3_5RMSNormGated(32, eps=1e-5).to(DEVICE, weights)
    norm.weight.requires_grad_(False).normal_()
    z = torch.randn(1, 19, 2, 40, device=DEVICE).to(dtype)[..., :32]
    plain, _ = expected(args, tree)
    want = norm(plain.reshape(-1, 32), z.reshape(-1, 32)).view_as(plain)
    got, stash = gated_delta_tree(*args, tree, z=z, norm_weight=norm.weight, eps=1e-5)
    assert got.dtype == dtype
    assert relative(got, want.to(dtype)) < 2 * DTYPES[dtype]
    assert relative(stash.updates, expected(args, tree)[1].updates) < STASH


def test_the_default_configuration_fits_every_shape():
    for nodes in (1, 16, 17, 64, 65, 256):
        for dtype in DTYPES:
            for dim in (16, 64, 128):
                config = default_config(nodes, dim, dim, dtype)
                assert dim % config.block_values == 0
                assert dim % config.block_keys == 0
                assert default_config(nodes, dim, dim, dtype, whole=True).block_values == dim


def test_what_the_kernel_cannot_take_is_named():
    query, _, value, *_ = inputs(3)
    assert unsupported(query, value) is None
    assert "24" in unsupported(query, value[..., :24])
    assert "float64" in unsupported(query.double(), value.double())
    assert "2 value heads over 4" in unsupported(query.expand(-1, -1, 4, -1), value)
    args, tree = inputs(3), topology(3, "chain")
    with pytest.raises(NotImplementedError, match=r"24.*reference"):
        gated_delta_tree(*args[:2], args[2][..., :24], *args[3:], tree)


def test_arguments_that_would_be_read_wrongly_are_refused():
    args, tree = inputs(3), topology(3, "chain")
    with pytest.raises(ValueError, match=r"query with stride 2"):
        gated_delta_tree(torch.randn(1, 3, 1, 32, device=DEVICE)[..., ::2], *args[1:], tree)
    with pytest.raises(ValueError, match=r"one dtype"):
        gated_delta_tree(args[0].bfloat16(), *args[1:], tree)
    with pytest.raises(ValueError, match=r"float32.*drift"):
        gated_delta_tree(*args[:-1], args[-1].bfloat16(), tree)
    with pytest.raises(ValueError, match=r"block_nodes=48"):
        gated_delta_tree(*args, tree, config=GatedDeltaConfig(48, 16, 16, 4))
    z, weight = torch.randn(1, 3, 2, 32, device=DEVICE), torch.ones(32, device=DEVICE)
    with pytest.raises(ValueError, match=r"both or neither"):
        gated_delta_tree(*args, tree, z=z)
    with pytest.raises(ValueError, match=r"block_values=32"):
        gated_delta_tree(*args, tree, z=z, norm_weight=weight, config=GatedDeltaConfig(16, 16, 16, 4))


COMPILE = """
import torch, triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from weaver_kernels.gated_delta import _gated_delta_tree as kernel, default_config

def compile_for(target, nodes, dtype, name, whole):
    config = default_config(nodes, 64, 64, dtype, whole)
    exact = dtype == torch.float32
    constants = dict(
        HEADS=4, GROUPS=2, DK=64, DV=64, BT=config.block_nodes, BV=config.block_values, BK=config.block_keys,
        BLOCKS=triton.cdiv(nodes, config.block_nodes), SOLVE=config.solve, INVERT=config.invert, READ=config.read,
        STATE_READ="ieee" if exact else "tf32",
    )
    if not whole:
        constants |= dict(z_ptr=None, weight_ptr=None)
    fp32 = ("a_log_ptr", "bias_ptr", "state_ptr", "keys_ptr", "updates_ptr", "decay_ptr")
    signature = {
        arg: "constexpr" if arg in constants else "*i64" if arg == "bits_ptr" else "*fp32" if arg in fp32
        else "*" + name if arg.endswith("_ptr") else "fp32" if arg in ("scale", "eps") else "i32"
        for arg in kernel.arg_names
    }
    source = ASTSource(kernel, signature, constexprs=constants)
    triton.compile(source, target=target, options={"num_warps": config.warps})

hopper = GPUTarget("cuda", 90, 32)
compile_for(hopper, 9, torch.bfloat16, "bf16", True)
compile_for(hopper, 70, torch.bfloat16, "bf16", False)
compile_for(hopper, 20, torch.float16, "fp16", False)
compile_for(hopper, 20, torch.float32, "fp32", False)
compile_for(GPUTarget("hip", "gfx942", 64), 9, torch.bfloat16, "bf16", False)
"""


@pytest.mark.slow
def test_the_kernel_compiles_for_hopper_and_rocm_without_a_gpu(tmp_path):
    """The interpreter accepts more than the compiler does."""
    env = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    env["PYTHONPATH"] = os.pathsep.join(sys.path)
    script = tmp_path / "compile.py"
    script.write_text(COMPILE, encoding="utf-8")
    done = subprocess.run([sys.executable, str(script)], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]


REAL = {"key_heads": 16, "ratio": 3, "dk": 128, "dv": 128}


@pytest.mark.gpu
@pytest.mark.parametrize("repeated", [0.0, 0.9], ids=["random-keys", "repeated-keys"])
@pytest.mark.parametrize("kind", ["chain", "random"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("nodes", [1, 16, 64, 100, 256])
def test_real_heads_stay_close_to_fp64(nodes, dtype, kind, repeated):
    args, tree = inputs(nodes, dtype=dtype, repeated=repeated, **REAL), topology(nodes, kind)
    output, stash = gated_delta_tree(*args, tree)
    exact, exact_stash = expected(args, tree, torch.float64)
    bounds = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 5e-3}
    assert relative(output, exact) < bounds[dtype]
    assert relative(stash.updates, exact_stash.updates) < 1e-5
    assert relative(stash.keys, exact_stash.keys) < 1e-6


@pytest.mark.gpu
def test_real_heads_equal_the_sequential_recurrence():
    args, tree = inputs(64, dtype=torch.bfloat16, **REAL), topology(64, "random")
    output, _ = gated_delta_tree(*args, tree)
    query, key, value, a, b, A_log, dt_bias, state = args
    g, beta = (x.double().cpu() for x in reference.gating(a, b, A_log, dt_bias))
    q, k = (reference.l2norm(x.double().cpu()) for x in (query, key))
    parents = tree.parents[0].tolist()
    for head in (0, 17, 47):
        rows = q[0, :, head // 3] * 128**-0.5, k[0, :, head // 3], value[0, :, head].double().cpu()
        o, _ = sequential_delta(*rows, g[0, :, head], beta[0, :, head], state[0, head].double().cpu(), parents)
        assert relative(output[0, :, head].cpu(), o) < 5e-3


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("nodes", [16, 64, 200])
def test_a_hundred_repeats_are_bit_identical(nodes, dtype):
    args, tree = inputs(nodes, batch=2, dtype=dtype, **REAL), topology(nodes, "random", batch=2)
    first = gated_delta_tree(*args, tree)
    for _ in range(100):
        again = gated_delta_tree(*args, tree)
        assert torch.equal(again[0], first[0])
        assert all(torch.equal(x, y) for x, y in zip(again[1], first[1], strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("nodes", [16, 64, 256])
def test_a_captured_graph_replays_the_same_result(nodes):
    args, tree = inputs(nodes, dtype=torch.bfloat16, **REAL), topology(nodes, "random")
    want = gated_delta_tree(*args, tree)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = gated_delta_tree(*args, tree)
    graph.replay()
    assert torch.equal(got[0], want[0])
    assert all(torch.equal(x, y) for x, y in zip(got[1], want[1], strict=True))
