"""The swapped-in mixer against transformers' own Gated DeltaNet layer, run along each node's path."""

import copy

import pytest
import torch
from support import KINDS, prefilled, prompt_ids, random_tree, relative, tiny_random_model
from transformers import DynamicCache

from weaver_hf import TokenTree, WeaverConfig, WeaverModel
from weaver_hf.target.cache import TreeCache

LAYER = 1


def states_after(mixer, cache, rows):
    """Stock outputs of the layer for `rows [n, H]` decoded one by one from a copy of the cache, and that copy."""
    cache = copy.deepcopy(cache)
    with torch.no_grad():
        outputs = [mixer(row[None, None], cache) for row in rows]
    return outputs[-1][0, 0], cache


@pytest.fixture
def layer():
    """A stock mixer with a prefilled cache, and the same mixer attached."""
    stock = tiny_random_model()
    attached = copy.deepcopy(stock)
    WeaverModel(WeaverConfig()).attach(attached)
    cache = prefilled(stock, prompt_ids(7))
    return stock.model.layers[LAYER].linear_attn, attached.model.layers[LAYER].linear_attn, cache


def run_tree(mixer, cache, tree: TokenTree, hidden):
    """Outputs at every node, and the adopted cache with its stash."""
    adopted = TreeCache(copy.deepcopy(cache), None, torch.tensor([7]), room=tree.num_nodes)
    with torch.no_grad():
        output = mixer(hidden, adopted.cache, weaver_tree=adopted.plan(tree))
    return output, adopted


@pytest.mark.parametrize("repeated", [False, True], ids=["random", "repeated-tokens"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("nodes", [1, 2, 17, 33])
def test_every_node_and_its_commit_equal_the_stock_layer_along_its_path(layer, nodes, kind, repeated):
    stock, attached, cache = layer
    tree = random_tree(nodes, kind)
    hidden = torch.randn(1, 1 if repeated else nodes, 64).expand(1, nodes, 64)
    output, _ = run_tree(attached, cache, tree, hidden)
    for node in range(nodes):
        path = tree.path(node)
        expected, after = states_after(stock, cache, hidden[0, path])
        assert relative(output[0, node], expected) < 1e-5
        _, adopted = run_tree(attached, cache, tree, hidden)
        mine = adopted.cache.layers[LAYER]
        mine.commit(torch.tensor([path]), torch.tensor([len(path)]))
        assert relative(mine.recurrent_states[0], after.layers[LAYER].recurrent_states[0]) < 1e-5
        assert relative(mine.conv_states[0], after.layers[LAYER].conv_states[0]) < 1e-6


def test_several_rounds_of_verify_and_commit_follow_the_stock_layer(layer):
    stock, attached, cache = layer
    mine, theirs = copy.deepcopy(cache), copy.deepcopy(cache)
    for round_ in range(12):
        tree = random_tree(9, "random", seed=round_)
        hidden = torch.randn(1, 9, 64)
        path = tree.path([8, 0, 4][round_ % 3])
        output, adopted = run_tree(attached, mine, tree, hidden)
        adopted.cache.layers[LAYER].commit(torch.tensor([path]), torch.tensor([len(path)]))
        mine = adopted.release()
        expected, theirs = states_after(stock, theirs, hidden[0, path])
        assert relative(output[0, path[-1]], expected) < 1e-5
        assert relative(mine.layers[LAYER].recurrent_states[0], theirs.layers[LAYER].recurrent_states[0]) < 1e-5


def test_without_a_tree_the_attached_layer_is_the_stock_layer(layer):
    stock, attached, _ = layer
    hidden = torch.randn(2, 5, 64)
    with torch.no_grad():
        assert torch.equal(attached(hidden), stock(hidden))
        caches = [DynamicCache(config=tiny_random_model().config) for _ in range(2)]
        assert torch.equal(attached(hidden, caches[0]), stock(hidden, caches[1]))


def test_verification_writes_no_committed_state(layer):
    _, attached, cache = layer
    before = copy.deepcopy(cache.layers[LAYER])
    _, adopted = run_tree(attached, cache, random_tree(17, "random"), torch.randn(1, 17, 64))
    after = adopted.cache.layers[LAYER]
    assert torch.equal(after.conv_states[0], before.conv_states[0])
    assert torch.equal(after.recurrent_states[0], before.recurrent_states[0])


def test_bf16_outputs_stay_as_close_to_fp32_as_the_stock_layers_own():
    stock = tiny_random_model()
    half = copy.deepcopy(stock).bfloat16()
    attached = copy.deepcopy(half)
    WeaverModel(WeaverConfig()).attach(attached)
    tree, hidden = random_tree(9, "chain"), torch.randn(1, 9, 64)
    caches = {m: prefilled(m, prompt_ids(7)) for m in (stock, half)}
    exact, _ = states_after(stock.model.layers[LAYER].linear_attn, caches[stock], hidden[0])
    theirs, _ = states_after(half.model.layers[LAYER].linear_attn, caches[half], hidden[0].bfloat16())
    mine, _ = run_tree(attached.model.layers[LAYER].linear_attn, caches[half], tree, hidden.bfloat16())
    assert mine.dtype == torch.bfloat16
    assert relative(mine[0, -1], exact) < 2 * relative(theirs, exact) + 1e-3
