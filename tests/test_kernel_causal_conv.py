"""The Triton kernels of the tree convolution and the topology, in the interpreter where there is no GPU."""

import itertools

import pytest
import torch
from support import KINDS, random_parents, relative
from torch import Tensor

from weaver_kernels import reference
from weaver_kernels.causal_conv import ConvConfig, causal_conv_tree, tree_topology

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# The interpreter cuts where a GPU rounds: one unit in the last place.
UNIT = {torch.float32: 1e-6, torch.float16: 2.0**-10, torch.bfloat16: 2.0**-7}


def random_topology(nodes: int, kind: str = "random", width: int = 4, batch: int = 1) -> reference.TreeTopology:
    parents = torch.tensor([random_parents(nodes, kind, seed) for seed in range(batch)], device=DEVICE)
    return reference.tree_topology(parents, width)


def rand(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, device=DEVICE).to(dtype)


def inputs(nodes: int, channels: int, width: int, batch: int = 1, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Rows, window and weight."""
    return [
        rand(*shape, dtype=dtype) for shape in ((batch, nodes, channels), (batch, channels, width), (channels, width))
    ]


def assert_close(output: Tensor, expected: Tensor) -> None:
    assert output.dtype == expected.dtype
    torch.testing.assert_close(output, expected, rtol=UNIT[output.dtype], atol=UNIT[output.dtype])


def check(nodes: int, kind: str, channels: int, width: int, batch: int, dtype: torch.dtype) -> None:
    topology = random_topology(nodes, kind, width, batch)
    args = inputs(nodes, channels, width, batch, dtype)
    bias, stash = rand(channels, dtype=dtype), torch.full_like(args[0], float("nan"))
    output = causal_conv_tree(*args, topology.conv_index, bias, stash=stash)
    assert_close(output, reference.causal_conv_tree(*args, topology.conv_index, bias))
    assert torch.equal(stash, args[0])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("nodes", "width", "channels"), [(1, 4, 40), (5, 2, 33), (17, 3, 64), (33, 8, 17)])
def test_every_node_equals_the_reference(nodes: int, width: int, channels: int, kind: str) -> None:
    check(nodes, kind, channels, width, 1, torch.float32)


@pytest.mark.parametrize("dtype", UNIT)
def test_rows_of_a_batch_have_their_own_tree_and_window_in_every_dtype(dtype: torch.dtype) -> None:
    check(9, "random", 24, 4, 3, dtype)


def test_a_small_tree_with_a_wide_window_reads_mostly_the_window() -> None:
    topology = random_topology(3, "chain", 8)
    rows, window, weight = inputs(3, 20, 8)
    output = causal_conv_tree(torch.zeros_like(rows), window, weight, topology.conv_index, activation=False)
    expected = (window[0, :, 1:] * weight[:, :7]).sum(-1)  # what node 0 sees: itself is zero
    torch.testing.assert_close(output[0, 0], expected)


@pytest.mark.parametrize(("bias", "activation"), list(itertools.product((False, True), repeat=2)))
def test_bias_and_activation_are_optional(bias: bool, activation: bool) -> None:
    index = random_topology(6).conv_index
    args, shift = inputs(6, 20, 4), rand(20) if bias else None
    output = causal_conv_tree(*args, index, shift, activation)
    assert_close(output, reference.causal_conv_tree(*args, index, shift, activation))


def test_views_of_larger_tensors_need_no_copy() -> None:
    batch, nodes, channels, width = 2, 7, 24, 4
    projection = rand(batch, nodes, 3 * channels)
    rows = projection[..., channels : 2 * channels]
    window = rand(3, batch, width, channels)[1].transpose(1, 2)
    weight = rand(channels, 2, width)[:, 1:].squeeze(1)
    index = random_topology(nodes, batch=batch).conv_index
    wide = torch.zeros(2, batch, nodes, channels + 5, device=DEVICE)
    output = causal_conv_tree(rows, window, weight, index, stash=wide[1, ..., :channels])
    assert not any(x.is_contiguous() for x in (rows, window, weight))
    assert_close(output, reference.causal_conv_tree(rows, window, weight, index))
    assert output.is_contiguous()
    assert torch.equal(wide[1, ..., :channels], rows)
    assert not wide[0].any()
    assert not wide[1, ..., channels:].any()


def test_a_window_in_another_dtype_is_rounded_as_the_reference_rounds_it() -> None:
    rows, window, weight = inputs(5, 16, 4)
    rows, weight, index = rows.half(), weight.half(), random_topology(5).conv_index
    output = causal_conv_tree(rows, window * 9, weight, index)
    assert_close(output, reference.causal_conv_tree(rows, window * 9, weight, index))
    assert torch.equal(output, causal_conv_tree(rows, (window * 9).half(), weight, index))


@pytest.mark.parametrize("config", [(2, 32, 1), (8, 16, 2), (32, 64, 4)])
def test_how_it_is_cut_into_programs_changes_no_bit(config: tuple[int, int, int]) -> None:
    index, args = random_topology(19).conv_index, inputs(19, 50, 4)
    assert torch.equal(causal_conv_tree(*args, index, config=ConvConfig(*config)), causal_conv_tree(*args, index))


def test_a_node_equals_a_chain_over_its_path_bit_for_bit_wherever_a_commit_falls() -> None:
    width, nodes = 4, 14
    topology = random_topology(nodes, "comb", width)
    rows, window, weight = inputs(nodes, 21, width)
    output = causal_conv_tree(rows, window, weight, topology.conv_index)
    path = topology.ancestors[0, 12].nonzero().flatten()  # 7 nodes
    for committed in (0, 1, 3, 5):
        lengths = torch.tensor([committed], device=DEVICE)
        moved = reference.causal_conv_commit(window, rows, path[None], lengths)
        rest = path[committed:]
        chain = causal_conv_tree(rows[:, rest], moved, weight, random_topology(len(rest), "chain", width).conv_index)
        assert torch.equal(chain, output[:, rest])


def test_shapes_and_strides_that_the_kernel_cannot_read_are_refused() -> None:
    index = random_topology(5).conv_index
    rows, window, weight = inputs(5, 16, 4)
    with pytest.raises(ValueError, match=r"window \[1, 16, 3\].* a weight of 4 taps"):
        causal_conv_tree(rows, window[..., 1:], weight, index)
    with pytest.raises(ValueError, match=r"index is \[1, 4, 4\]"):
        causal_conv_tree(rows, window, weight, index[:, 1:])
    with pytest.raises(ValueError, match="contiguous"):
        causal_conv_tree(rows.transpose(1, 2).contiguous().transpose(1, 2), window, weight, index)
    with pytest.raises(ValueError, match="as large as rows"):
        causal_conv_tree(rows, window, weight, index, stash=rows.new_empty(1, 4, 16))


def check_topology(parents: Tensor, width: int) -> None:
    for name, found, expected in zip(
        reference.TreeTopology._fields, tree_topology(parents, width), reference.tree_topology(parents, width)
    ):
        assert found.dtype == expected.dtype
        assert torch.equal(found, expected), name


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("nodes", "width"), [(1, 4), (5, 2), (17, 8), (33, 3)])
def test_a_topology_equals_the_reference(nodes: int, width: int, kind: str) -> None:
    check_topology(torch.tensor([random_parents(nodes, kind)], device=DEVICE), width)


@pytest.mark.parametrize(("nodes", "kind"), [(64, "chain"), (65, "random")])
def test_a_topology_fills_words_and_starts_new_ones(nodes: int, kind: str) -> None:
    check_topology(torch.tensor([random_parents(nodes, kind)], device=DEVICE), 4)


def test_a_topology_of_a_batch_with_padding_and_strides() -> None:
    parents = torch.zeros(12, 2, dtype=torch.long, device=DEVICE).t()  # [2, 12], padding hangs at the root
    parents[0, :12] = torch.tensor(random_parents(12, "random"))
    parents[1, :5] = torch.tensor(random_parents(5, "chain"))
    assert not parents.is_contiguous()
    check_topology(parents, 4)


def test_parents_that_are_no_tree_do_not_hang() -> None:
    topology = tree_topology(torch.tensor([[-1, 2, 1]], device=DEVICE), 4)
    assert topology.depths[0, 0] == 0


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", UNIT)
@pytest.mark.parametrize("nodes", [1, 16, 64, 128, 256])
def test_real_sizes_on_the_gpu(nodes: int, dtype: torch.dtype) -> None:
    for kind, width, channels, batch in (("random", 4, 10240, 1), ("chain", 4, 8192, 2), ("comb", 8, 1000, 1)):
        check(nodes, kind, channels, width, batch, dtype)
        check_topology(random_topology(nodes, kind, width, batch).parents, width)


@pytest.mark.gpu
def test_the_error_against_fp64_is_that_of_rounding_the_output() -> None:
    index = random_topology(64).conv_index
    for dtype, bound in ((torch.float32, 3e-7), (torch.float16, 4e-4), (torch.bfloat16, 3e-3)):
        args = inputs(64, 10240, 4, dtype=dtype)
        assert (
            relative(causal_conv_tree(*args, index), reference.causal_conv_tree(*(x.double() for x in args), index))
            < bound
        )


@pytest.mark.gpu
def test_a_hundred_repeats_and_a_captured_graph_give_the_same_bits() -> None:
    parents = random_topology(64, "random").parents.clone()
    args = inputs(64, 10240, 4, dtype=torch.bfloat16)
    stash = torch.empty_like(args[0])

    def step() -> tuple[Tensor, reference.TreeTopology]:
        topology = tree_topology(parents, 4)
        return causal_conv_tree(*args, topology.conv_index, stash=stash), topology

    first, _ = step()
    for _ in range(100):
        assert torch.equal(step()[0], first)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output, topology = step()
    parents.copy_(torch.tensor([random_parents(64, "comb")]))
    args[0].normal_()
    graph.replay()
    assert torch.equal(topology.bits, reference.tree_topology(parents, 4).bits)
    assert torch.equal(output, step()[0])
    assert torch.equal(stash, args[0])
