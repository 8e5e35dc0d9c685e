"""The block drafter against transformers' own DFlash model, cached against uncached, in our loop and in the stock one."""

import copy

import pytest
import torch
from support import (
    drafter_config,
    path_logits,
    prompt_ids,
    random_weaver,
    relative,
    tiny_dense_model,
    tiny_random_model,
)
from transformers import DynamicCache
from transformers.models.muse_glimmer_assistant import MuseGlimmerAssistantConfig, MuseGlimmerAssistantModel

from weaver_hf import WeaverConfig, WeaverModel
from weaver_hf.drafter import DrafterContext
from weaver_hf.errors import CheckpointError, MissingDrafterError
from weaver_hf.target.compat import CACHE_KEY


def stock_drafter(weaver: WeaverModel) -> MuseGlimmerAssistantModel:
    """transformers' DFlash network with the same weights."""
    config = weaver.config
    stock = MuseGlimmerAssistantModel(
        MuseGlimmerAssistantConfig(
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_hidden_layers=config.num_hidden_layers,
            num_attention_heads=config.num_attention_heads,
            num_key_value_heads=config.num_key_value_heads,
            head_dim=config.head_dim,
            rms_norm_eps=config.rms_norm_eps,
            rope_parameters={"rope_type": "default", "rope_theta": config.rope_theta},
            layer_types=["full_attention"] * config.num_hidden_layers,
            target_layer_ids=config.target_layer_ids,
            block_size=config.block_size,
            mask_token_id=config.mask_token_id,
        )
    )
    names = {"fc.": "encoder.fc.", "hidden_norm.": "encoder.output_norm_enc."}
    state = {}
    for name, tensor in weaver.drafter.state_dict().items():
        for ours, theirs in names.items():
            name = name.replace(ours, theirs) if name.startswith(ours) else name
        state[name] = tensor
    stock.load_state_dict(state)
    return stock.eval()


@pytest.mark.parametrize("rows", [1, 2, 19])
def test_a_block_equals_transformers_own_dflash_forward(rows):
    weaver = random_weaver()
    noise, features = torch.randn(1, 8, 64), torch.randn(1, rows, 128)
    with torch.no_grad():
        expected = stock_drafter(weaver)(noise, features).last_hidden_state
        positions = torch.arange(rows + 8)[None]
        assert relative(weaver(noise, features, positions).last_hidden_state, expected) < 1e-5
        kv = weaver.drafter.context_rows(features, positions[:, :rows])
        mine = weaver.drafter(noise[:, None], kv, positions[:, :rows], positions[:, None, rows:])
    assert relative(mine[:, 0], expected) < 1e-5


def test_a_context_read_in_pieces_equals_one_read_at_once():
    weaver = random_weaver()
    features, noise = torch.randn(1, 23, 128), torch.randn(1, 1, 8, 64)
    context = DrafterContext([])
    with torch.no_grad():
        for piece in features.split([9, 1, 1, 5, 7], 1):
            rows = torch.arange(piece.shape[1])[None] + context.next_position
            context.append(weaver.drafter.context_rows(piece, rows))
        places = torch.arange(23)[None]
        whole = weaver.drafter.context_rows(features, places)
        positions = 23 + torch.arange(8)[None, None]
        assert context.length == context.next_position == 23
        cached = weaver.drafter(noise, context.used(), places, positions)
        torch.testing.assert_close(cached, weaver.drafter(noise, whole, places, positions))


def run_blocks(weaver, features, anchors, seed=0):
    """Hidden states of blocks at several anchors of one text, `[1, A, Q, H]`."""
    torch.manual_seed(seed)
    noise = torch.randn(1, len(anchors), 8, 64)
    places = torch.arange(features.shape[1])[None]
    positions = torch.tensor(anchors)[None, :, None] + torch.arange(8)
    with torch.no_grad():
        return weaver.drafter(noise, weaver.drafter.context_rows(features, places), places, positions)


def test_blocks_of_one_pass_do_not_see_each_other():
    weaver, features = random_weaver(), torch.randn(1, 30, 128)
    together = run_blocks(weaver, features, [4, 9, 21])
    torch.manual_seed(0)
    noise = torch.randn(1, 3, 8, 64)
    places = torch.arange(30)[None]
    for i, anchor in enumerate([4, 9, 21]):
        kv = weaver.drafter.context_rows(features, places)
        positions = anchor + torch.arange(8)[None, None]
        with torch.no_grad():
            alone = weaver.drafter(noise[:, i : i + 1], kv, places, positions)
        torch.testing.assert_close(together[:, i], alone[:, 0])


def test_a_block_sees_nothing_at_or_after_its_anchor():
    weaver, features = random_weaver(), torch.randn(1, 30, 128)
    before = run_blocks(weaver, features, [12])
    changed = features.clone()
    changed[:, 12:] += 1
    assert torch.equal(run_blocks(weaver, changed, [12]), before)
    changed[:, 11] += 1
    assert not torch.allclose(run_blocks(weaver, changed, [12]), before)


@pytest.mark.parametrize("window", [3, 5, 100])
def test_sliding_layers_are_windowed_and_causal_inside_the_block(window):
    weaver = random_weaver(num_hidden_layers=1, layer_types=["sliding_attention"], sliding_window=window)
    features = torch.randn(1, 30, 128)
    before = run_blocks(weaver, features, [20])[0, 0]
    far = features.clone()
    far[:, : max(20 - window + 1, 0)] += 1
    after = run_blocks(weaver, far, [20])[0, 0]
    assert torch.allclose(after[0], before[0]) == (window < 100 or bool(torch.equal(far, features)))
    torch.manual_seed(0)
    noise = torch.randn(1, 1, 8, 64)
    later = noise.clone()
    later[:, :, 5:] += 1
    places, positions = torch.arange(30)[None], 20 + torch.arange(8)[None, None]
    with torch.no_grad():
        kv = weaver.drafter.context_rows(features, places)
        one, two = (weaver.drafter(x, kv, places, positions)[0, 0] for x in (noise, later))
    torch.testing.assert_close(one[:5], two[:5])
    assert not torch.allclose(one[5:], two[5:])


@pytest.mark.parametrize("is_causal", [True, False])
def test_causality_of_the_config_overrides_the_layer_type(is_causal):
    kinds = ["sliding_attention", "full_attention"]
    weaver = random_weaver(layer_types=kinds, sliding_window=64, is_causal=is_causal)
    assert {layer.self_attn.causal for layer in weaver.drafter.layers} == {is_causal}


@pytest.mark.parametrize("builder", ["chain", "marginal", "suffix"])
@pytest.mark.parametrize(
    "options", [{}, {"repetition_penalty": 1.2}, {"prefill_chunk_size": 4}], ids=["plain", "penalty", "chunks"]
)
def test_greedy_text_equals_stock_with_a_random_drafter(builder, options):
    model, weaver = tiny_random_model(), random_weaver()
    weaver.attach(model).tree_config.builder = builder
    options = {"max_new_tokens": 24, "do_sample": False, **options}
    stock = tiny_random_model().generate(prompt_ids(), **options)
    assert torch.equal(model.generate(prompt_ids(), assistant_model=weaver, **options), stock)


def test_the_drafter_reads_the_states_of_exactly_the_committed_text():
    """After a call its context equals one made from a stock forward of the whole text."""
    model, weaver = tiny_random_model(), random_weaver()
    weaver.attach(model)
    out = model.generate(
        prompt_ids(), max_new_tokens=24, do_sample=False, assistant_model=weaver, return_dict_in_generate=True
    )
    _, context = getattr(out, CACHE_KEY)._weaver_context
    assert context.length == context.next_position == out.sequences.shape[1] - 1
    with torch.no_grad():
        states = tiny_random_model()(out.sequences[:, :-1], output_hidden_states=True).hidden_states
        features = torch.cat([states[1], states[3]], -1)
        expected = weaver.drafter.context_rows(features, torch.arange(context.length)[None])
    for (k, v), (ek, ev) in zip(context.used(), expected):
        assert relative(k, ek) < 1e-4
        assert relative(v, ev) < 1e-4


def test_a_second_turn_continues_the_drafters_context_and_a_foreign_cache_starts_it_anew():
    model, weaver, stock = tiny_random_model(), random_weaver(), tiny_random_model()
    weaver.attach(model)
    cache = DynamicCache(config=model.config)
    options = {"max_new_tokens": 8, "do_sample": False, "assistant_model": weaver, CACHE_KEY: cache}
    first = model.generate(prompt_ids(), **options)
    second = model.generate(torch.cat([first, prompt_ids(4, seed=3)], 1), **options)
    context = cache._weaver_context[1]
    assert context.length == context.next_position == second.shape[1] - 1
    _, moved = path_logits(stock, cache, second[0, -1:].tolist())  # stock code takes the cache on by one token
    third = torch.cat([second, prompt_ids(4, seed=5)], 1)
    out = model.generate(third, **{**options, CACHE_KEY: moved})
    context = moved._weaver_context[1]
    assert context.next_position == out.shape[1] - 1
    assert context.length == out.shape[1] - 1 - second.shape[1], "it knows the new suffix alone, at its true positions"
    assert torch.equal(out, stock.generate(third, max_new_tokens=8, do_sample=False))


def test_left_padding_is_no_context():
    model, weaver = tiny_random_model(), random_weaver()
    weaver.attach(model)
    ids = torch.cat([torch.full((1, 3), 126), prompt_ids()], 1)
    mask = torch.tensor([[0] * 3 + [1] * 9])
    out = model.generate(
        ids,
        attention_mask=mask,
        max_new_tokens=8,
        do_sample=False,
        assistant_model=weaver,
        return_dict_in_generate=True,
    )
    context = getattr(out, CACHE_KEY)._weaver_context[1]
    assert context.length == context.next_position == 9 + 7


def test_a_builder_that_needs_a_drafter_is_refused_without_one(model, weaver):
    weaver.tree_config.builder = "chain"
    with pytest.raises(MissingDrafterError, match="builder 'chain'"):
        model.generate(prompt_ids(), max_new_tokens=4, do_sample=False, assistant_model=weaver)


def test_on_a_dense_target_the_stock_dflash_loop_runs_our_drafter():
    dense = tiny_dense_model(hidden_size=64, intermediate_size=96, num_hidden_layers=4, head_dim=16)
    weaver = random_weaver()
    ids = prompt_ids(11)
    stock = dense.generate(ids, max_new_tokens=20, do_sample=False)
    mine = dense.generate(ids, max_new_tokens=20, do_sample=False, assistant_model=weaver, speculation_type="dflash")
    theirs = dense.generate(
        ids, max_new_tokens=20, do_sample=False, assistant_model=stock_drafter(weaver), speculation_type="dflash"
    )
    assert torch.equal(mine, stock)
    assert torch.equal(theirs, stock)


@pytest.mark.parametrize(
    ("overrides", "match"),
    [
        ({"vocab_size": 130}, "vocab_size 130; expected vocab_size 128"),
        ({"hidden_size": 32}, "hidden_size 32; expected hidden_size 64"),
        ({"num_target_layers": 9}, "9 target layers; expected 4"),
        ({"target_layer_ids": [0, 3]}, "ids from 0 to 2"),
        ({"mask_token_id": 128}, "mask_token_id 128"),
    ],
)
def test_a_drafter_for_another_target_is_refused_with_both_values(overrides, match):
    with pytest.raises(CheckpointError, match=match):
        WeaverModel(drafter_config(**overrides)).attach(tiny_random_model())


@pytest.mark.parametrize(
    ("overrides", "match"),
    [
        ({"mask_token_id": None}, "without mask_token_id"),
        ({"target_layer_ids": []}, "without target_layer_ids"),
        ({"layer_types": ["full_attention"]}, "layer_types"),
        ({"layer_types": ["sliding_attention"] * 2}, "without sliding_window"),
        ({"block_size": 1}, "block_size 1"),
    ],
)
def test_a_drafter_config_that_says_too_little_is_refused(overrides, match):
    with pytest.raises(CheckpointError, match=match):
        drafter_config(**overrides)


def test_an_artifact_with_a_drafter_round_trips(tmp_path):
    weaver = random_weaver()
    weaver.tree_config.draft_temperature = {"0.0": [1.5] * 7}
    weaver.save_pretrained(tmp_path)
    loaded = WeaverModel.from_pretrained(tmp_path)
    assert loaded.tree_config == weaver.tree_config
    assert isinstance(loaded.config, WeaverConfig)
    for (name, a), (other, b) in zip(weaver.state_dict().items(), loaded.state_dict().items(), strict=True):
        assert name == other
        assert torch.equal(a, b)
    assert copy.deepcopy(loaded).target is None
