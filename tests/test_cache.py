"""The adopted cache: adoption, plans, commits, release; and which caches are refused."""

import copy

import pytest
import torch
from support import path_logits, prefilled, prompt_ids, random_tree, tiny_random_model
from transformers import DynamicCache, QuantizedCache, StaticCache
from transformers.cache_utils import DynamicLayer, LinearAttentionLayer

from weaver_hf import WeaverConfig, WeaverModel
from weaver_hf.errors import UnsupportedCacheError, UnsupportedModelError
from weaver_hf.target.cache import TreeCache, TreeKVLayer, check_cache, check_verified
from weaver_hf.target.compat import CACHE_KEY


def verify(model, cache: TreeCache, tree):
    plan = cache.plan(tree)
    with torch.no_grad():
        logits = model(
            tree.token_ids,
            position_ids=plan.position_ids,
            attention_mask=dict.fromkeys(model.config.layer_types),
            use_cache=True,
            weaver_tree=plan,
            **{CACHE_KEY: cache.cache},
        ).logits
    check_verified(plan, len(cache.cache.layers))
    return logits


def adopt(cache, length, mask=None, offset=0, room=40):
    return TreeCache(cache, mask, torch.tensor([length + offset]), room)


@pytest.mark.parametrize("kind", ["chain", "star", "comb", "random"])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_every_node_of_a_tree_equals_stock_decoding_along_its_path(kind, attention):
    stock = tiny_random_model(attention)
    model = copy.deepcopy(stock)
    WeaverModel(WeaverConfig()).attach(model)
    cache = prefilled(stock, prompt_ids(9))
    tree = random_tree(18, kind).pad_to(21)
    logits = verify(model, adopt(copy.deepcopy(cache), 9), tree)
    for node in range(18):
        expected, _ = path_logits(stock, cache, [int(tree.token_ids[0, n]) for n in tree.path(node)])
        assert (logits[0, node] - expected).abs().max() < 1e-5 * expected.abs().max()


def test_a_released_cache_is_stock_equal_to_stocks_own_and_owns_its_memory(model, weaver):
    stock = tiny_random_model()
    cache = prefilled(stock, prompt_ids(9))
    adopted = adopt(copy.deepcopy(cache), 9)
    tree = random_tree(12, "random")
    path = tree.path(11)
    verify(model, adopted, tree)
    adopted.defer(torch.tensor([path]), torch.tensor([len(path)]), len(path))
    mine = adopted.release()
    _, theirs = path_logits(stock, cache, [int(tree.token_ids[0, n]) for n in path])
    assert [type(x) for x in mine.layers] == [type(x) for x in theirs.layers]
    for a, b in zip(mine.layers, theirs.layers):
        assert sorted(vars(a)) == sorted(vars(b)), "nothing of ours stays on the layer"
        if isinstance(a, DynamicLayer):
            torch.testing.assert_close(a.keys, b.keys)
            torch.testing.assert_close(a.values, b.values)
            assert a.keys.untyped_storage().nbytes() == a.keys.nbytes, "no buffer is kept alive"
        else:
            torch.testing.assert_close(a.recurrent_states[0], b.recurrent_states[0])
            torch.testing.assert_close(a.conv_states[0], b.conv_states[0])


def test_verifying_again_without_a_commit_gives_the_same_logits(model, weaver):
    adopted = adopt(prefilled(tiny_random_model(), prompt_ids(9)), 9)
    tree = random_tree(12, "random")
    first = verify(model, adopted, tree)
    verify(model, adopted, random_tree(7, "star", seed=5))
    assert torch.equal(verify(model, adopted, tree), first)


def test_the_buffer_grows_when_a_text_outgrows_what_was_reserved(model, weaver):
    stock = tiny_random_model()
    cache = prefilled(stock, prompt_ids(9))
    adopted = adopt(copy.deepcopy(cache), 9, room=0)
    for round_ in range(5):
        tree = random_tree(11, "chain", seed=round_)
        logits = verify(model, adopted, tree)
        adopted.defer(torch.arange(11)[None], torch.tensor([11]), 11)
        adopted.commit()
        expected, cache = path_logits(stock, cache, tree.token_ids[0].tolist())
        assert (logits[0, -1] - expected).abs().max() < 1e-5 * expected.abs().max()
    assert adopted.length == 9 + 55


def test_rows_with_paths_of_different_lengths_commit_apart(model, weaver):
    """Batches are not offered yet, but every tensor of the cache is laid out for them."""
    stock = tiny_random_model()
    prompts = torch.cat([prompt_ids(9, seed=s) for s in (0, 1)])
    adopted = TreeCache(prefilled(stock, prompts), None, torch.tensor([9, 9]), 40)
    singles = [prefilled(stock, prompts[i : i + 1]) for i in range(2)]
    for round_, leaves in enumerate([(8, 2), (0, 5), (3, 8)]):
        tree = random_tree(9, "random", seed=10 * round_, batch=2)
        logits = verify(model, adopted, tree)
        paths = [tree.path(leaf, row) for row, leaf in enumerate(leaves)]
        path = torch.zeros(2, 9, dtype=torch.long)
        for row, nodes in enumerate(paths):
            path[row, : len(nodes)] = torch.tensor(nodes)
            expected, singles[row] = path_logits(stock, singles[row], tree.token_ids[row, nodes].tolist())
            assert (logits[row, nodes[-1]] - expected).abs().max() < 2e-5 * expected.abs().max()
        lengths = [len(nodes) for nodes in paths]
        adopted.defer(path, torch.tensor(lengths), max(lengths))
        adopted.commit()
    assert adopted.lens.tolist() == [c.get_seq_length() for c in singles]


def test_masked_prompt_slots_and_shifted_positions_are_kept(model, weaver):
    stock = tiny_random_model()
    ids, mask = prompt_ids(9), torch.tensor([[0, 0, 1, 1, 1, 1, 1, 1, 1]])
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    cache = DynamicCache(config=stock.config)
    with torch.no_grad():
        stock(ids, attention_mask=mask, position_ids=positions, use_cache=True, **{CACHE_KEY: cache})
    tree = random_tree(6, "chain")
    logits = verify(model, adopt(copy.deepcopy(cache), 9, mask=mask, offset=-2), tree)
    with torch.no_grad():
        full = stock(
            torch.cat([ids, tree.token_ids], 1),
            attention_mask=torch.cat([mask, torch.ones(1, 6, dtype=torch.long)], 1),
            position_ids=torch.cat([positions, positions[:, -1:] + 1 + torch.arange(6)], 1),
        ).logits[0, 9:]
    assert (logits[0] - full).abs().max() < 2e-5 * full.abs().max()


def test_a_commit_that_was_interrupted_resumes_without_applying_a_layer_twice(model, weaver, monkeypatch):
    stock = tiny_random_model()
    cache = prefilled(stock, prompt_ids(9))
    adopted = adopt(copy.deepcopy(cache), 9)
    tree = random_tree(8, "chain")
    verify(model, adopted, tree)
    adopted.defer(torch.arange(8)[None], torch.tensor([8]), 8)
    victim = adopted.cache.layers[2]
    with monkeypatch.context() as patch:
        patch.setattr(type(victim), "commit", _interrupt_at(victim, type(victim).commit))
        with pytest.raises(KeyboardInterrupt):
            adopted.commit()
    mine = adopted.release()
    _, theirs = path_logits(stock, cache, tree.token_ids[0].tolist())
    for a, b in zip(mine.layers, theirs.layers):
        if isinstance(a, LinearAttentionLayer):
            torch.testing.assert_close(a.recurrent_states[0], b.recurrent_states[0])
        else:
            torch.testing.assert_close(a.keys, b.keys)


def _interrupt_at(victim, commit):
    def interrupted(self, *args):
        if self is victim:
            raise KeyboardInterrupt
        commit(self, *args)

    return interrupted


def test_a_layer_that_ran_another_forward_is_noticed_before_it_corrupts_the_text(model, weaver):
    adopted = adopt(prefilled(tiny_random_model(), prompt_ids(9)), 9)
    tree = random_tree(5, "chain")
    for layer in (1, 3):  # a mixer, an attention
        plan = adopted.plan(tree)
        plan.attended.update({0, 1, 2, 3} - {layer})
        with pytest.raises(UnsupportedModelError, match=rf"layers \[{layer}\] that did not run the tree forward"):
            check_verified(plan, len(adopted.cache.layers))


def test_an_adoption_or_commit_that_fails_gives_the_stock_cache_back(model, weaver, monkeypatch):
    cache = prefilled(tiny_random_model(), prompt_ids(9))
    stock = [type(layer) for layer in cache.layers]
    keys = cache.layers[3].keys.clone()

    def out_of_memory(*args):
        raise MemoryError("no room")

    with monkeypatch.context() as patch:
        patch.setattr(TreeKVLayer, "_larger", out_of_memory)
        with pytest.raises(MemoryError):
            adopt(cache, 9)
    assert [type(layer) for layer in cache.layers] == stock
    assert torch.equal(cache.layers[3].keys, keys)
    adopted = adopt(cache, 9)
    verify(model, adopted, random_tree(4, "chain"))
    adopted.defer(torch.arange(4)[None], torch.tensor([4]), 4)
    monkeypatch.setattr(TreeKVLayer, "commit", out_of_memory)
    with pytest.raises(MemoryError):
        adopted.release()
    assert [type(layer) for layer in cache.layers] == stock


def test_a_plan_moves_with_the_layers_that_read_it(model, weaver):
    adopted = adopt(prefilled(tiny_random_model(), prompt_ids(9)), 9)
    plan = adopted.plan(random_tree(4, "chain"))
    moved = plan.to("meta")
    assert {x.device.type for x in (*moved.topology, moved.lens, moved.position_ids, moved.visible(13))} == {"meta"}
    assert moved.attended is plan.attended


def test_position_ids_with_planes_are_kept_apart(model, weaver):
    cache = prefilled(tiny_random_model(), prompt_ids(9))
    adopted = TreeCache(cache, None, torch.tensor([[9], [4], [4], [4]]), 20)
    tree = random_tree(5, "chain")
    assert adopted.plan(tree).position_ids.tolist() == [[list(range(9, 14))]] + [[list(range(4, 9))]] * 3


def test_refused_caches_are_named():
    config = tiny_random_model().config
    recording = DynamicCache(config=config)
    recording.activate_past_recording()
    offloaded = DynamicCache(config=config)
    offloaded.offloading = True
    for cache, name in [
        (None, "no cache"),
        (StaticCache(config=config, max_cache_len=32), "StaticCache"),
        (recording, "records its past"),
        (offloaded, "offloaded"),
    ]:
        with pytest.raises(UnsupportedCacheError, match=name):
            check_cache(cache)
    check_cache(DynamicCache(config=config))


def test_a_quantized_cache_is_refused():
    cache = object.__new__(QuantizedCache)  # its backends are optional dependencies
    cache.layers = []
    with pytest.raises(UnsupportedCacheError, match="QuantizedCache"):
        check_cache(cache)
