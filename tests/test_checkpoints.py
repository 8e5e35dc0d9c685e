"""Other people's drafter formats: read, written, refused, and the published shapes."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from support import prompt_ids, random_weaver, read_json, tiny_random_model

from weaver_hf import WeaverConfig, WeaverModel
from weaver_hf.checkpoints import FORMATS, zlab
from weaver_hf.errors import CheckpointError

BY_NAME = {format_.name: format_ for format_ in FORMATS}


def same_tensors(a, b):
    assert sorted(a) == sorted(b)
    assert all(torch.equal(a[name], b[name]) and a[name].dtype == b[name].dtype for name in a)


@pytest.fixture(params=sorted(BY_NAME))
def written(request, tmp_path):
    weaver = random_weaver(layer_types=["sliding_attention", "full_attention"], sliding_window=9).bfloat16()
    BY_NAME[request.param].write(weaver, tmp_path / "there")
    return BY_NAME[request.param], weaver, tmp_path


def test_there_and_back_is_bit_identical(written):
    format_, weaver, folder = written
    loaded = WeaverModel.from_pretrained(folder / "there", dtype=torch.bfloat16)
    same_tensors(loaded.state_dict(), weaver.state_dict())
    made_here = {"tree_config", "architectures", "dtype", "transformers_version", "_name_or_path"}
    geometry = set(weaver.config.to_dict()) - made_here
    for name in geometry:
        assert getattr(loaded.config, name) == getattr(weaver.config, name), name
    assert loaded.tree_config.builder == "marginal"
    format_.write(loaded, folder / "back")
    same_tensors(load_file(folder / "back" / "model.safetensors"), load_file(folder / "there" / "model.safetensors"))
    assert read_json(folder / "back" / "config.json") == read_json(folder / "there" / "config.json")


def test_a_loaded_checkpoint_decodes_and_saves_in_our_format(written):
    _, _, folder = written
    weaver, model = WeaverModel.from_pretrained(folder / "there"), tiny_random_model()
    weaver.attach(model)
    stock = tiny_random_model().generate(prompt_ids(), max_new_tokens=16, do_sample=False)
    assert torch.equal(model.generate(prompt_ids(), max_new_tokens=16, do_sample=False, assistant_model=weaver), stock)
    weaver.save_pretrained(folder / "ours")
    assert read_json(folder / "ours" / "config.json")["model_type"] == "weaver"
    same_tensors(WeaverModel.from_pretrained(folder / "ours").state_dict(), weaver.state_dict())


@pytest.mark.parametrize("change", ["missing", "extra", "shape"])
def test_a_checkpoint_with_wrong_tensors_is_refused_by_name(written, change):
    _, _, folder = written
    path = folder / "there" / "model.safetensors"
    tensors = load_file(path)
    if change == "missing":
        del tensors["layers.1.self_attn.q_norm.weight"]
    elif change == "extra":
        tensors["layers.0.self_attn.attention_sink_bias"] = torch.zeros(4)
    else:
        tensors["fc.weight"] = torch.zeros(64, 64)
    save_file(tensors, path, metadata={"format": "pt"})
    name = {"missing": "q_norm", "extra": "attention_sink_bias", "shape": "fc.weight"}[change]
    with pytest.raises(CheckpointError, match=name):
        WeaverModel.from_pretrained(folder / "there")


def test_copies_of_the_targets_embedding_are_left_out_of_a_speculators_folder(tmp_path):
    weaver = random_weaver()
    BY_NAME["speculators"].write(weaver, tmp_path)
    tensors = load_file(tmp_path / "model.safetensors") | {"embed_tokens.weight": torch.zeros(128, 64)}
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    same_tensors(WeaverModel.from_pretrained(tmp_path).state_dict(), weaver.state_dict())


def test_a_plain_qwen3_folder_is_no_drafter(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]}))
    with pytest.raises(CheckpointError, match="model_type 'qwen3'"):
        WeaverModel.from_pretrained(tmp_path)


ZLAB = {
    "architectures": ["DFlashDraftModel"], "model_type": "qwen3", "hidden_size": 64, "intermediate_size": 96,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 128,
    "num_target_layers": 12, "rope_theta": 1000000, "dflash_config": {"mask_token_id": 9, "target_layer_ids": [1, 8]},
}  # fmt: skip


def test_keys_are_read_from_both_places_and_the_rule_fills_in_taps_alone():
    assert zlab.read_config(ZLAB).block_size == 16
    top = {**ZLAB, "block_size": 8}
    inner = {**ZLAB, "dflash_config": {**ZLAB["dflash_config"], "block_size": 8}}
    assert zlab.read_config(top).block_size == zlab.read_config(inner).block_size == 8
    both = {**top, "dflash_config": {**ZLAB["dflash_config"], "block_size": 4}}
    assert zlab.read_config(both).block_size == 4, "dflash_config comes first"
    silent = {**ZLAB, "dflash_config": {"mask_token_id": 9}}
    assert zlab.read_config(silent).target_layer_ids == [1, 9]
    v5 = {
        **{k: v for k, v in ZLAB.items() if k != "rope_theta"},
        "rope_parameters": {"rope_type": "default", "rope_theta": 5.0},
    }
    assert zlab.read_config(v5).rope_theta == 5.0


@pytest.mark.parametrize(
    ("layers", "drafts", "taps"),
    [
        (36, 5, [1, 9, 17, 25, 33]),
        (32, 5, [1, 8, 15, 22, 29]),
        (40, 5, [1, 10, 19, 28, 37]),
        (64, 5, [1, 16, 31, 46, 61]),
        (12, 1, [6]),
    ],
)
def test_the_rule_for_taps_gives_the_published_values(layers, drafts, taps):
    assert zlab.default_taps(layers, drafts) == taps


@pytest.mark.parametrize(
    "extra",
    [
        {"output_multiplier": 2.0},
        {"dflash_config": {"mask_token_id": 9, "selector_rank": 256}},
        {"dflash_config": {"mask_token_id": 9, "projector_type": "domino"}},
        {"rope_scaling": {"rope_type": "yarn"}},
        {"partial_rotary_factor": 0.5},
        {"hidden_act": "gelu"},
        {"dflash_config": {}},
    ],
    ids=lambda e: str(next(iter(e.items()))),
)
def test_unsupported_extras_are_refused_by_name(extra):
    with pytest.raises(CheckpointError):
        zlab.read_config({**ZLAB, **extra})


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"speculators_model_type": "eagle3"}, "eagle3"),
        ({"draft_vocab_size": 64}, "draft vocabulary of 64"),
        ({"sample_from_anchor": True}, "sample_from_anchor"),
    ],
)
def test_other_speculators_are_refused_by_name(tmp_path, change, match):
    BY_NAME["speculators"].write(random_weaver(), tmp_path)
    config = read_json(tmp_path / "config.json") | change
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=match):
        WeaverModel.from_pretrained(tmp_path)


# Target: hidden, intermediate, layers, heads, KV heads, head dim, taps, mask token, tensors, billions of parameters, bias.
# What the published configurations say; where one says no intermediate size, it is any number here.
PUBLISHED = {
    "Qwen3-4B": (2560, 9728, 5, 32, 8, 128, (1, 9, 17, 25, 33), 151669, 58, 0.537, False),
    "Qwen3-8B": (4096, 12288, 5, 32, 8, 128, (1, 9, 17, 25, 33), 151669, 58, 1.049, False),
    "Qwen3.5-4B": (2560, 9728, 5, 32, 8, 128, (1, 8, 15, 22, 29), 248070, 58, 0.537, False),
    "Qwen3.5-9B": (4096, 12288, 5, 32, 8, 128, (1, 8, 15, 22, 29), 248070, 58, 1.049, False),
    "Qwen3.5-35B-A3B": (2048, 6144, 8, 32, 4, 128, (1, 10, 19, 28, 37), 248070, 91, 0.474, False),
    "Qwen3.6-27B": (5120, 17408, 5, 32, 8, 128, (1, 16, 31, 46, 61), 248070, 58, None, False),
    "LFM2.5-1.2B": (2048, 6144, 8, 32, 8, 64, (1, 4, 7, 10, 13), 16, 91, None, False),
    "Qwen2.5-0.5B": (896, 4864, 5, 14, 2, 64, (1, 6, 11, 16, 21), 151669, 58, None, False),
    "gpt-oss-20b": (2880, 2880, 8, 64, 8, 64, (1, 6, 11, 16, 21), 200000, 123, None, True),
}


@pytest.mark.parametrize("target", PUBLISHED)
def test_published_shapes_on_the_meta_device(target):
    hidden, inter, layers, heads, kv, dim, taps, mask, tensors, billions, bias = PUBLISHED[target]
    config = WeaverConfig(
        vocab_size=248320, hidden_size=hidden, intermediate_size=inter, num_hidden_layers=layers, mask_token_id=mask,
        num_attention_heads=heads, num_key_value_heads=kv, head_dim=dim, target_layer_ids=list(taps),
        attention_bias=bias,
    )  # fmt: skip
    with torch.device("meta"):
        state = WeaverModel(config).drafter.state_dict()
    assert len(state) == tensors
    assert state["fc.weight"].shape == (hidden, len(taps) * hidden)
    assert state["layers.0.self_attn.q_proj.weight"].shape == (heads * dim, hidden)
    assert state["layers.0.self_attn.k_proj.weight"].shape == (kv * dim, hidden)
    assert state["layers.0.self_attn.o_proj.weight"].shape == (hidden, heads * dim)
    assert state["layers.0.self_attn.q_norm.weight"].shape == (dim,)
    assert state["layers.0.mlp.down_proj.weight"].shape == (hidden, inter)
    assert ("layers.0.self_attn.o_proj.bias" in state) is bias
    if billions is not None:
        assert sum(t.numel() for t in state.values()) / 1e9 == pytest.approx(billions, abs=5e-4)
