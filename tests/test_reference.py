"""The torch reference of the kernels: against the sequential recurrence in fp64 and transformers' own functions."""

import pytest
import torch
from support import KINDS, random_parents, random_tree, relative, sequential_delta
from transformers.models.qwen3_5 import modeling_qwen3_5 as qwen

from weaver_kernels import reference

SIZES = (1, 2, 16, 33, 64)


def inputs(nodes, batch=1, key_heads=2, value_heads=4, dk=16, dv=24, repeated=0.0, dtype=torch.float64, seed=0):
    """Random inputs of `gated_delta_tree`; `repeated` is the share of nodes with nearly one node's key (same token)."""
    gen = torch.Generator().manual_seed(seed)

    def rand(*shape):
        return torch.randn(*shape, generator=gen, dtype=torch.float64)

    key = rand(batch, nodes, key_heads, dk)
    same = torch.rand(batch, nodes, 1, 1, generator=gen) < repeated
    key = torch.where(same, key[:, :1] + 0.01 * rand(batch, nodes, key_heads, dk), key)
    g = -0.1 * torch.nn.functional.softplus(rand(batch, nodes, value_heads))
    beta = torch.sigmoid(rand(batch, nodes, value_heads) + (4.0 if repeated else 0.0))
    query, value = rand(batch, nodes, key_heads, dk), rand(batch, nodes, value_heads, dv)
    state = 0.3 * rand(batch, value_heads, dk, dv)
    return [x.to(dtype) for x in (query, key, value, g, beta, state)]


def truth(query, key, value, g, beta, state, parents, row=0):
    """fp64 outputs `[T, Hv, dv]` and states `[T, Hv, dk, dv]` of one row by the sequential recurrence."""
    q, k, v, g, beta, state = (x[row].double() for x in (query, key, value, g, beta, state))
    groups = v.shape[1] // k.shape[1]
    outputs, states = [], []
    for h in range(v.shape[1]):
        qh, kh = reference.l2norm(q[:, h // groups]) * q.shape[-1] ** -0.5, reference.l2norm(k[:, h // groups])
        o, s = sequential_delta(qh, kh, v[:, h], g[:, h], beta[:, h], state[h], parents)
        outputs.append(o)
        states.append(s)
    return torch.stack(outputs, 1), torch.stack(states, 1)


@pytest.mark.parametrize("repeated", [0.0, 0.9], ids=["random-keys", "repeated-keys"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("nodes", SIZES)
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, 1e-12), (torch.float32, 5e-6)], ids=["fp64", "fp32"])
def test_gated_delta_tree_equals_the_sequential_recurrence_at_every_node(nodes, kind, repeated, dtype, bound):
    tree = random_tree(nodes, kind)
    args = inputs(nodes, repeated=repeated, dtype=dtype)
    output, stash = reference.gated_delta_tree(*args, tree.ancestors)
    expected, states = truth(*args, tree.parents[0].tolist())
    assert relative(output[0], expected) < bound
    for leaf in {0, nodes - 1, nodes // 2}:
        path = torch.tensor([tree.path(leaf)])
        new = reference.gated_delta_commit(args[-1], stash, path, torch.tensor([path.shape[1]]))
        assert relative(new[0], states[leaf]) < bound


@pytest.mark.parametrize("ratio", [1, 2, 3, 4])
def test_each_group_of_value_heads_reads_its_own_key_head(ratio):
    tree = random_tree(13, "random")
    args = inputs(13, key_heads=2, value_heads=2 * ratio)
    output, _ = reference.gated_delta_tree(*args, tree.ancestors)
    assert relative(output[0], truth(*args, tree.parents[0].tolist())[0]) < 1e-12


def test_rows_of_a_batch_use_their_own_tree_state_and_path():
    tree = random_tree(19, "random", batch=3)
    args = inputs(19, batch=3)
    output, stash = reference.gated_delta_tree(*args, tree.ancestors)
    leaves, lengths = [18, 7, 0], []
    path = torch.zeros(3, 19, dtype=torch.long)
    for row, leaf in enumerate(leaves):
        nodes = tree.path(leaf, row)
        path[row, : len(nodes)] = torch.tensor(nodes)
        lengths.append(len(nodes))
    new = reference.gated_delta_commit(args[-1], stash, path, torch.tensor(lengths))
    for row, leaf in enumerate(leaves):
        expected, states = truth(*args, tree.parents[row].tolist(), row=row)
        assert relative(output[row], expected) < 1e-12
        assert relative(new[row], states[leaf]) < 1e-12


def test_a_path_of_no_nodes_leaves_the_state_as_it_is():
    args = inputs(5)
    _, stash = reference.gated_delta_tree(*args, random_tree(5, "random").ancestors)
    new = reference.gated_delta_commit(args[-1], stash, torch.zeros(1, 3, dtype=torch.long), torch.tensor([0]))
    assert torch.equal(new, args[-1])


def test_adding_a_branch_changes_no_other_node():
    parents = random_parents(20, "random")
    args = inputs(20)
    tree = random_tree(20, "random")
    whole, _ = reference.gated_delta_tree(*args, tree.ancestors)
    part, _ = reference.gated_delta_tree(*[x[:, :12] for x in args[:5]], args[5], tree.ancestors[:, :12, :12])
    assert parents == tree.parents[0].tolist()
    assert torch.equal(whole[:, :12], part) or relative(whole[:, :12], part) < 1e-15


def test_large_decays_stay_finite():
    query, key, value, g, beta, state = inputs(40, dtype=torch.float32)
    output, stash = reference.gated_delta_tree(
        query, key, value, g * 1000, beta, state, random_tree(40, "random").ancestors
    )
    assert output.isfinite().all()
    assert stash.updates.isfinite().all()


def test_bf16_inputs_are_computed_and_stashed_in_fp32():
    args = inputs(9, dtype=torch.bfloat16)
    args[-1] = args[-1].float()
    output, stash = reference.gated_delta_tree(*args, random_tree(9, "random").ancestors)
    assert output.dtype == torch.bfloat16
    assert {x.dtype for x in stash} == {torch.float32}
    expected, _ = truth(*args, random_parents(9, "random"))
    assert relative(output[0], expected) < 4e-3  # the rounding of the output alone


def test_the_committed_state_does_not_drift_over_300_rounds():
    state32, state64 = torch.zeros(1, 4, 16, 24), torch.zeros(1, 4, 16, 24, dtype=torch.float64)
    worst = 0.0
    for round_ in range(300):
        args = inputs(16, repeated=0.3, dtype=torch.float32, seed=round_)
        tree = random_tree(16, "random", seed=round_)
        path = torch.tensor([tree.path(round_ % 16)])
        lengths = torch.tensor([path.shape[1]])
        _, stash = reference.gated_delta_tree(*args[:5], state32, tree.ancestors)
        state32 = reference.gated_delta_commit(state32, stash, path, lengths)
        _, states = truth(*args[:5], state64, tree.parents[0].tolist())
        state64 = states[round_ % 16][None]
        worst = max(worst, relative(state32, state64))
    assert worst < 1e-6


@pytest.mark.parametrize("kind", KINDS)
def test_each_node_equals_transformers_functions_run_along_its_path(kind):
    tree = random_tree(24, kind)
    query, key, value, g, beta, state = inputs(24, dtype=torch.float32)
    output, stash = reference.gated_delta_tree(query, key, value, g, beta, state, tree.ancestors)
    for leaf in range(24):
        path = tree.path(leaf)
        for function in (qwen.torch_recurrent_gated_delta_rule, qwen.torch_chunk_gated_delta_rule):
            expected, new = function(
                *(x[:, path].repeat_interleave(2, 2) for x in (query, key)),
                value[:, path],
                g=g[:, path],
                beta=beta[:, path],
                initial_state=state,
                output_final_state=True,
                use_qk_l2norm_in_kernel=True,
            )
            committed = reference.gated_delta_commit(state, stash, torch.tensor([path]), torch.tensor([len(path)]))
            assert relative(output[:, leaf], expected[:, -1]) < 1e-5
            assert relative(committed, new) < 1e-5


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("width", [2, 3, 4, 8])
def test_conv_taps_run_along_ancestors_and_into_the_window(kind, width):
    tree = random_tree(21, kind)
    gen = torch.Generator().manual_seed(1)
    rows, window = torch.randn(1, 21, 10, generator=gen), torch.randn(1, 10, width, generator=gen)
    weight = torch.randn(10, width, generator=gen)
    index = reference.causal_conv_index(tree.parents, tree.depths, width)
    output = reference.causal_conv_tree(rows, window, weight, index)
    for leaf in range(21):
        path = tree.path(leaf)
        state = window.clone()
        expected = qwen.causal_conv1d_update(rows[:, path].transpose(1, 2), state, weight, None, "silu")
        assert relative(output[:, leaf], expected[:, :, -1]) < 1e-6
        committed = reference.causal_conv_commit(window, rows, torch.tensor([path]), torch.tensor([len(path)]))
        assert torch.equal(committed, state)


def test_conv_takes_a_bias_and_can_leave_the_activation_out():
    tree = random_tree(7, "random")
    rows, window, weight, bias = torch.randn(1, 7, 5), torch.randn(1, 5, 4), torch.randn(5, 4), torch.randn(5)
    index = reference.causal_conv_index(tree.parents, tree.depths, 4)
    plain = reference.causal_conv_tree(rows, window, weight, index, activation=False)
    biased = reference.causal_conv_tree(rows, window, weight, index, bias, activation=False)
    torch.testing.assert_close(biased, plain + bias)
    torch.testing.assert_close(reference.causal_conv_tree(rows, window, weight, index), torch.nn.functional.silu(plain))


@pytest.mark.parametrize("groups", [1, 2, 3])
@pytest.mark.parametrize("dim", [16, 20])
def test_tree_attention_equals_sdpa_with_the_same_mask(groups, dim):
    tree = random_tree(11, "random")
    query = torch.randn(1, 2 * groups, 11, dim)
    key, value = torch.randn(1, 2, 18, dim), torch.randn(1, 2, 18, dim)
    visible = torch.cat([torch.rand(1, 11, 7) < 0.7, tree.ancestors], -1)
    output = reference.tree_attention(query, key, value, visible, 0.3)
    expected = torch.nn.functional.scaled_dot_product_attention(
        query, *(x.repeat_interleave(groups, 1) for x in (key, value)), attn_mask=visible[:, None], scale=0.3
    )
    torch.testing.assert_close(output, expected.transpose(1, 2))


def test_commit_of_all_layers_moves_each_as_its_own_functions_do() -> None:
    torch.manual_seed(0)
    tree = random_tree(9, "random")
    layers, batch, channels, width, nodes = 2, 1, 12, 4, 9
    buffers = reference.TreeBuffers(
        state=torch.randn(layers, batch, 4, 8, 6),
        window=torch.randn(layers, batch, channels, width),
        rows=torch.randn(layers, batch, nodes, channels),
        keys=torch.randn(layers, batch, 2, nodes, 8),
        updates=torch.randn(layers, batch, 4, nodes, 6),
        decay=-torch.rand(layers, batch, 4, nodes),
        kv=torch.randn(3, 2, batch, 2, 24, 5),
    )
    before = reference.TreeBuffers(*(x.clone() for x in buffers))
    path, lens = torch.tensor([tree.path(8)]), torch.tensor([11])
    lengths = torch.tensor([path.shape[1]])
    reference.commit(buffers, path, lengths, lens)
    for layer in range(layers):
        state = reference.gated_delta_commit(before.state[layer], before.stash(layer), path, lengths)
        assert torch.equal(buffers.state[layer], state)
        window = reference.causal_conv_commit(before.window[layer], before.rows[layer], path, lengths)
        assert torch.equal(buffers.window[layer], window)
    taken = before.kv[..., 11 + path[0], :]
    assert torch.equal(buffers.kv[..., 11 : 11 + path.shape[1], :], taken)
    assert torch.equal(buffers.kv[..., :11, :], before.kv[..., :11, :])


def test_a_topology_says_what_the_tree_says() -> None:
    tree = random_tree(70, "random")
    topology = reference.tree_topology(tree.parents, 4)
    assert torch.equal(topology.ancestors, tree.ancestors)
    assert torch.equal(topology.depths, tree.depths)
    bit = torch.arange(70)
    assert torch.equal((topology.bits[..., bit // 64] >> (bit % 64) & 1).bool(), tree.ancestors)


@pytest.mark.parametrize("window", [None, 5])
def test_visible_slots_are_the_committed_ones_in_the_window_and_the_ancestors(window: int | None) -> None:
    tree = random_tree(7, "random")
    lens, starts = torch.tensor([6]), torch.tensor([2])
    visible = reference.visible_slots(reference.tree_topology(tree.parents, 4), lens, 16, starts, window)[0]
    for node in range(7):
        position = 6 + int(tree.depths[0, node])
        for slot in range(16):
            if slot < 6:
                seen, place = slot >= 2, slot
            else:
                seen = slot - 6 in tree.path(node)
                place = 6 + int(tree.depths[0, slot - 6]) if seen else 0
            assert bool(visible[node, slot]) == (seen and (window is None or position - place < window))
