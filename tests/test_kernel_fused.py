"""The Triton kernels around the matrices against their torch twins, and the twins against transformers' own modules."""

import pytest
import torch
from support import tiny_random_model
from torch import Tensor
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5RMSNorm, Qwen3_5RMSNormGated, apply_rotary_pos_emb

from weaver_kernels import fused, fused_reference
from weaver_kernels.fused import FusedConfig

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# Roundings in between turn one unit in the last place into two; the interpreter cuts where a GPU rounds.
UNIT = {torch.float32: 2e-6, torch.float16: 3 * 2.0**-10, torch.bfloat16: 3 * 2.0**-7}
DTYPES = list(UNIT)


def rand(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, device=DEVICE).to(dtype)


def columns(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Random columns of something wider: the last axis contiguous, the others not."""
    return rand(*shape[:-1], shape[-1] + 7, dtype=dtype)[..., 3:-4]


def assert_close(output: Tensor, expected: Tensor) -> None:
    assert output.dtype == expected.dtype
    torch.testing.assert_close(output, expected, rtol=UNIT[output.dtype], atol=UNIT[output.dtype])


# ---- norms and gates ----


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("plus_one", [True, False], ids=["one-plus-weight", "weight"])
@pytest.mark.parametrize("with_residual", [True, False], ids=["residual", "alone"])
@pytest.mark.parametrize("shape", [(1, 1, 64), (2, 5, 33)], ids=str)
def test_rms_norm_equals_its_twin(shape, with_residual, plus_one, dtype) -> None:
    x, weight = columns(*shape, dtype=dtype), rand(shape[-1], dtype=dtype)
    residual = columns(*shape, dtype=dtype) if with_residual else None
    normed, total = fused.rms_norm(x, weight, 1e-6, residual, plus_one)
    expected, expected_total = fused_reference.rms_norm(x, weight, 1e-6, residual, plus_one)
    assert_close(normed, expected)
    assert_close(total, expected_total)
    assert total is x or with_residual


def test_rms_norm_writes_neither_its_input_nor_the_residual() -> None:
    x, residual, weight = rand(3, 32), rand(3, 32), rand(32)
    before = x.clone(), residual.clone()
    fused.rms_norm(x, weight, 1e-6, residual)
    assert torch.equal(x, before[0])
    assert torch.equal(residual, before[1])


def test_a_weight_in_fp32_lifts_what_transformers_lifts() -> None:
    x, z, weight = (rand(1, 5, 3, 16, dtype=torch.float16) for _ in range(3))
    weight = weight[0, 0, 0].float()
    assert_close(
        fused.rms_norm(x, weight, 1e-6, plus_one=False)[0], fused_reference.rms_norm(x, weight, 1e-6, None, False)[0]
    )
    assert_close(fused.gated_rms_norm(x, z, weight, 1e-6), fused_reference.gated_rms_norm(x, z, weight, 1e-6))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("batch", "nodes", "heads", "dim"), [(1, 1, 4, 16), (2, 5, 3, 24), (1, 17, 1, 64)])
def test_gated_rms_norm_equals_its_twin(batch, nodes, heads, dim, dtype) -> None:
    x, weight = columns(batch, nodes, heads, dim, dtype=dtype), rand(dim, dtype=dtype)
    z = columns(batch, nodes, heads * dim, dtype=dtype).unflatten(-1, (heads, dim))
    for config in (None, FusedConfig(2, 1)):
        assert_close(
            fused.gated_rms_norm(x, z, weight, 1e-6, config), fused_reference.gated_rms_norm(x, z, weight, 1e-6)
        )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 1, 64), (2, 5, 66), (17, 200)], ids=str)
def test_silu_mul_equals_its_twin(shape, dtype) -> None:
    gate_up = columns(*shape, dtype=dtype)
    for config in (None, FusedConfig(16, 1)):
        assert_close(fused.silu_mul(gate_up, config), fused_reference.silu_mul(gate_up))


def test_large_gates_neither_overflow_nor_vanish() -> None:
    gate_up = torch.tensor([[-1e4, -90.0, 0.0, 90.0, 3e4, 1.0, 1.0, 1.0, 1.0, 1.0]], device=DEVICE)
    assert_close(fused.silu_mul(gate_up), fused_reference.silu_mul(gate_up))


# ---- q and k ----


def attention_inputs(batch, nodes, heads, kv_heads, dim, rotary, slots, dtype=torch.float32):
    """Arguments of qk_norm_rope as a fused projection leaves them: q beside its gate, head by head."""
    projected = rand(batch, nodes, (2 * heads + 2 * kv_heads) * dim, dtype=dtype)
    q_gate, k, v = projected.split([2 * heads * dim, kv_heads * dim, kv_heads * dim], -1)
    angle = rand(batch, nodes, rotary // 2).repeat(1, 1, 2)
    lens = torch.randint(0, slots - nodes + 1, (batch,), device=DEVICE)
    return (
        q_gate.unflatten(-1, (heads, 2 * dim))[..., :dim],
        k.unflatten(-1, (kv_heads, dim)),
        v.unflatten(-1, (kv_heads, dim)),
        rand(dim, dtype=dtype),
        rand(dim, dtype=dtype),
        angle.cos().to(dtype),
        angle.sin().to(dtype),
        1e-6,
        rand(batch, kv_heads, slots, dim, dtype=dtype),
        rand(batch, kv_heads, slots, dim, dtype=dtype),
        lens,
    )


def check_qk_norm_rope(args, config=None) -> None:
    mine, theirs = [[*args[:8], args[8].clone(), args[9].clone(), args[10]] for _ in range(2)]
    assert_close(fused.qk_norm_rope(*mine, config=config), fused_reference.qk_norm_rope(*theirs))
    assert_close(mine[8], theirs[8])
    assert torch.equal(mine[9], theirs[9])


@pytest.mark.parametrize(
    ("batch", "nodes", "heads", "kv_heads", "dim", "rotary"),
    [(1, 1, 4, 2, 16, 4), (2, 5, 3, 1, 24, 24), (1, 17, 2, 2, 32, 8), (3, 3, 6, 3, 16, 2)],
)
def test_qk_norm_rope_equals_its_twin_and_touches_no_other_slot(batch, nodes, heads, kv_heads, dim, rotary):
    check_qk_norm_rope(attention_inputs(batch, nodes, heads, kv_heads, dim, rotary, nodes + 6))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_qk_norm_rope_in_half_precision(dtype):
    check_qk_norm_rope(attention_inputs(2, 3, 4, 2, 16, 8, 9, dtype))


@pytest.mark.parametrize("config", [FusedConfig(1, 1), FusedConfig(8, 4)], ids=str)
def test_qk_norm_rope_in_blocks_smaller_and_larger_than_the_heads(config):
    check_qk_norm_rope(attention_inputs(1, 2, 3, 2, 16, 8, 9), config)


def test_a_node_behind_the_end_of_the_buffer_writes_nothing() -> None:
    args = attention_inputs(2, 3, 2, 1, 16, 4, 8)
    args[-1].copy_(torch.tensor([6, 0]))
    whole = torch.zeros(2, 2, 1, 12, 16, device=DEVICE)  # room behind the buffers, to be seen untouched
    fused.qk_norm_rope(*args[:8], whole[0, :, :, :8], whole[1, :, :, :8], args[-1])
    assert not whole[:, :, :, 8:].any()
    assert whole[:, 0, :, 6:8].all()
    assert whole[:, 1, :, :3].all()
    assert not whole[:, 1, :, 3:].any()


def test_angles_of_one_row_serve_the_batch() -> None:
    args = list(attention_inputs(2, 3, 2, 1, 16, 4, 8))
    args[5], args[6] = args[5][:1], args[6][:1]
    one = fused.qk_norm_rope(*args)
    args[5], args[6] = args[5].expand(2, -1, -1), args[6].expand(2, -1, -1)
    assert torch.equal(one, fused.qk_norm_rope(*args))


# ---- errors ----


def test_inputs_that_do_not_fit_are_named() -> None:
    with pytest.raises(ValueError, match=r"strides \(1, 4\); expected rows of contiguous elements"):
        fused.silu_mul(rand(6, 4).t())
    with pytest.raises(ValueError, match=r"shape \[4\].*expected a weight of shape \[6\]"):
        fused.rms_norm(rand(2, 6), rand(4), 1e-6)
    with pytest.raises(ValueError, match="expected a residual like"):
        fused.rms_norm(rand(2, 6), rand(6), 1e-6, rand(2, 5))
    with pytest.raises(ValueError, match="expected an even number of columns"):
        fused.silu_mul(rand(2, 5))
    with pytest.raises(ValueError, match=r"expected a gate of shape \[1, 2, 3, 4\]"):
        fused.gated_rms_norm(rand(1, 2, 3, 4), rand(1, 2, 3, 5), rand(4), 1e-6)
    args = list(attention_inputs(1, 2, 2, 1, 16, 4, 8))
    with pytest.raises(ValueError, match=r"expected contiguous angles in torch.float32"):
        fused.qk_norm_rope(*args[:5], args[5].half(), *args[6:])
    with pytest.raises(ValueError, match=r"expected buffers of shape \[1, 1, 8, 16\]"):
        fused.qk_norm_rope(*args[:9], args[9][:, :, :7], args[10])


# ---- the twins are transformers' modules ----


def filled(module: torch.nn.Module, dtype: torch.dtype) -> torch.nn.Module:
    torch.nn.init.normal_(module.weight)
    return module.to(dtype).to(DEVICE)


@pytest.mark.parametrize("dtype", DTYPES)
def test_twins_of_the_norms_equal_the_modules_bit_for_bit(dtype) -> None:
    x, residual, z = (rand(2, 5, 3, 16, dtype=dtype) for _ in range(3))
    norm, gated = filled(Qwen3_5RMSNorm(16), dtype), filled(Qwen3_5RMSNormGated(16), dtype)
    with torch.no_grad():
        assert torch.equal(fused_reference.rms_norm(x, norm.weight, norm.eps, residual)[0], norm(x + residual))
        assert torch.equal(fused_reference.gated_rms_norm(x, z, gated.weight, gated.variance_epsilon), gated(x, z))


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_twin_of_the_mlp_equals_the_module_bit_for_bit(dtype) -> None:
    mlp = tiny_random_model().model.layers[0].mlp.to(dtype).to(DEVICE)
    x = rand(1, 5, 64, dtype=dtype)
    with torch.no_grad():
        gate_up = torch.cat([mlp.gate_proj(x), mlp.up_proj(x)], -1)
        assert torch.equal(mlp.down_proj(fused_reference.silu_mul(gate_up)), mlp(x))


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_twin_of_norm_and_rotary_equals_the_modules_bit_for_bit(dtype) -> None:
    args = attention_inputs(2, 5, 4, 2, 16, 8, 9, dtype)
    q_norm, k_norm = Qwen3_5RMSNorm(16).to(dtype), Qwen3_5RMSNorm(16).to(dtype)
    q_norm.weight.data, k_norm.weight.data = args[3], args[4]
    with torch.no_grad():
        q, k = apply_rotary_pos_emb(q_norm(args[0]).transpose(1, 2), k_norm(args[1]).transpose(1, 2), args[5], args[6])
        assert torch.equal(fused_reference.qk_norm_rope(*args), q)
    for row, length in enumerate(args[10].tolist()):
        assert torch.equal(args[8][row, :, length : length + 5], k[row])
        assert torch.equal(args[9][row, :, length : length + 5], args[2].transpose(1, 2)[row])


# ---- real sizes ----

gpu = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU on this machine")]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("nodes", [1, 16, 64])
class TestOnTheCard:
    pytestmark = gpu

    def same_each_time(self, function, *args):
        first = function(*args)
        first = first if isinstance(first, Tensor) else first[0]
        for _ in range(100):
            again = function(*args)
            assert torch.equal(first, again if isinstance(again, Tensor) else again[0])
        return first

    def test_rms_norm(self, nodes, dtype):
        args = rand(1, nodes, 5120, dtype=dtype), rand(5120, dtype=dtype), 1e-6, rand(1, nodes, 5120, dtype=dtype)
        assert_close(self.same_each_time(fused.rms_norm, *args), fused_reference.rms_norm(*args)[0])

    def test_gated_rms_norm(self, nodes, dtype):
        z = columns(1, nodes, 6144, dtype=dtype).unflatten(-1, (48, 128))
        args = rand(1, nodes, 48, 128, dtype=dtype), z, rand(128, dtype=dtype), 1e-6
        assert_close(self.same_each_time(fused.gated_rms_norm, *args), fused_reference.gated_rms_norm(*args))

    def test_silu_mul(self, nodes, dtype):
        gate_up = rand(1, nodes, 34816, dtype=dtype)
        assert_close(self.same_each_time(fused.silu_mul, gate_up), fused_reference.silu_mul(gate_up))

    def test_qk_norm_rope(self, nodes, dtype):
        args = attention_inputs(1, nodes, 24, 4, 256, 64, 1024, dtype)
        mine = [*args[:8], args[8].clone(), args[9].clone(), args[10]]
        assert_close(self.same_each_time(fused.qk_norm_rope, *mine), fused_reference.qk_norm_rope(*args))
        assert_close(mine[8], args[8])
        assert torch.equal(mine[9], args[9])
