"""The adapter's kernels against torch's own layers."""

import pytest
import torch
import torch.nn.functional as F
from support import relative

from weaver_hf.adapter import AdapterNorm
from weaver_hf.drafter import rope_at, rotate
from weaver_kernels.adapter_step import adapter_attention, adapter_linear

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def rand(*shape, dtype=torch.float32):
    return torch.randn(*shape, device=DEVICE).to(dtype)


def norm_of(width, dtype=torch.float32):
    norm = AdapterNorm(width).to(DEVICE, dtype)
    with torch.no_grad():
        norm.weight.normal_(1, 0.3)
        norm.bias.normal_()
    return norm


@pytest.mark.parametrize(("batch", "nodes", "width", "features"), [(1, 1, 16, 16), (2, 3, 40, 23), (3, 7, 70, 17)])
@pytest.mark.parametrize("normed", [False, True])
@torch.no_grad()
def test_a_linear_layer_with_its_norm_bias_and_residual(batch, nodes, width, features, normed):
    x, weight, bias, norm = rand(batch, nodes, width), rand(features, width), rand(features), norm_of(width)
    residual = rand(batch, nodes, features)
    expected = residual + F.linear(norm(x) if normed else x, weight, bias)
    got = adapter_linear(
        x, weight, bias, norm=(norm.weight, norm.bias) if normed else None, residual=residual, config={"BLOCK_K": 32}
    )
    torch.testing.assert_close(got, expected, rtol=2e-5, atol=2e-5)


@torch.no_grad()
def test_gelu_is_the_exact_one_and_the_first_half_gates():
    x, weight, bias = rand(1, 5, 24), rand(38, 24), rand(38)
    product = F.linear(x, weight, bias)
    torch.testing.assert_close(
        adapter_linear(x, weight, bias, activation="gelu"), F.gelu(product), rtol=1e-5, atol=1e-5
    )
    gate, values = product.chunk(2, -1)
    gated = adapter_linear(x, weight, bias, activation="swiglu")
    torch.testing.assert_close(gated, F.silu(gate) * values, rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_rows_can_be_taken_from_tables_and_from_strided_views():
    table, weight, shifts = rand(50, 24), rand(20, 24), rand(9, 20)
    tokens = torch.tensor([[3, 49, 3, 0], [7, 1, 2, 30]], device=DEVICE)[:, ::2]
    depths = torch.tensor([[0, 8], [4, 4]], device=DEVICE)
    got = adapter_linear(table, weight, x_index=tokens, residual=shifts, residual_index=depths)
    torch.testing.assert_close(got, F.linear(table[tokens], weight) + shifts[depths], rtol=1e-5, atol=1e-5)
    x = rand(2, 6, 48)[:, 1::2, 24:]
    torch.testing.assert_close(adapter_linear(x, weight), F.linear(x, weight), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@torch.no_grad()
def test_half_precision_is_rounded_where_the_layers_round(dtype):
    x, weight, norm = rand(1, 4, 64, dtype=dtype), rand(32, 64, dtype=dtype) / 8, norm_of(64, dtype)
    got = adapter_linear(x, weight, norm=(norm.weight, norm.bias))
    assert got.dtype == dtype
    exact = norm(x).double() @ weight.double().t()  # of the same rounded operands
    bounds = {torch.bfloat16: 3e-3 if got.is_cuda else 8e-3, torch.float16: 4e-4}  # the interpreter truncates to bf16
    assert relative(got, exact) < bounds[dtype]


# Slots 0.. of a tree: the anchor, three children of it, two of node 1, and one of node 5 (nodes 6, 7 are this round's).
PARENTS = [-1, 0, 0, 0, 1, 1, 5, 0]


def paths_of(parents, depths):
    paths, depth = torch.full((len(parents), depths), 99), []
    for node, parent in enumerate(parents):
        depth.append(0 if parent < 0 else depth[parent] + 1)
        line, above = [], parent
        while above >= 0:
            line.insert(0, above)
            above = parents[above]
        paths[node, : len(line)] = torch.tensor(line)
    return paths.int(), torch.tensor(depth)


@pytest.mark.parametrize("turned", [False, True], ids=["plain", "rope"])
@pytest.mark.parametrize(("heads", "width", "prefix"), [(1, 8, 1), (3, 12, 6)])
def test_nodes_attend_to_the_prefix_their_ancestors_and_themselves(heads, width, prefix, turned):
    batch, depths, first, slots = 2, 5, 6, len(PARENTS)
    paths, depth = (x.to(DEVICE).expand(batch, *x.shape).contiguous() for x in paths_of(PARENTS, depths))
    nodes = torch.stack([torch.zeros_like(depth)] * 2 + [depth]).long()
    fused = rand(batch, 2, 3 * heads * width)
    keys, values = rand(batch, heads, prefix + slots, width), rand(batch, heads, prefix + slots, width)
    before = keys.clone(), values.clone()
    rope = rope_at(torch.arange(depths + 1, device=DEVICE), width, 100.0, torch.float32) if turned else None
    flat = (rope[0][0], rope[1][0]) if rope else None
    mixed = adapter_attention(*fused.chunk(3, -1), keys, values, nodes, paths, first, flat)

    q, k, v = (part.unflatten(-1, (heads, width)).transpose(1, 2) for part in fused.chunk(3, -1))
    if turned:
        at = rope_at(depth[:, first:] + 1, width, 100.0, torch.float32)
        q, k = rotate(q, at), rotate(k, at)
    all_keys, all_values = before
    all_keys[:, :, prefix + first :], all_values[:, :, prefix + first :] = k, v
    visible = torch.zeros(2, prefix + slots, dtype=torch.bool, device=DEVICE)
    visible[:, :prefix] = True
    for i, seen in enumerate(([0, 1, 5, 6], [0, 7])):
        visible[i, prefix + torch.tensor(seen)] = True
    expected = F.scaled_dot_product_attention(q, all_keys, all_values, attn_mask=visible)
    torch.testing.assert_close(mixed, expected.transpose(1, 2).flatten(2), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(keys, all_keys, rtol=1e-6, atol=1e-6)
    assert torch.equal(values, all_values)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU on this machine")
@pytest.mark.parametrize("nodes", [1, 4, 8, 17])
@torch.no_grad()
def test_at_the_real_size_layers_equal_torchs(nodes):
    norm = norm_of(2048, torch.bfloat16)
    x, weight = rand(1, nodes, 2048, dtype=torch.bfloat16), rand(6144, 2048, dtype=torch.bfloat16) / 45
    got = adapter_linear(x, weight, norm=(norm.weight, norm.bias))
    assert relative(got, norm(x).double() @ weight.double().t()) < 3e-3
    for _ in range(100):
        assert torch.equal(adapter_linear(x, weight, norm=(norm.weight, norm.bias)), got)
    exact = adapter_linear(x.float(), weight.float(), activation="gelu")
    expected = F.gelu(x.double() @ weight.double().t())
    assert relative(exact, expected) < 1e-6
