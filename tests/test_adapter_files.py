"""Adapters as artifacts: the released `.pth` layout, our own folders, two halves put together, and what is refused."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support import VOCAB, adapter_config, prompt_ids, random_weaver, read_json, tiny_random_model
from transformers import AutoModel
from typer.testing import CliRunner

from weaver_hf import WeaverModel
from weaver_hf.checkpoints import trymirai, zlab
from weaver_hf.cli import app
from weaver_hf.errors import CheckpointError, WeaverError

HIDDEN, RANK, MLP, DEPTHS = 64, 24, 20, 7
CONFIG = {
    "d_model": HIDDEN, "d_embed": HIDDEN, "d_rank": RANK, "num_layers": 1, "num_heads": 3, "mlp_dim": MLP,
    "K": DEPTHS, "candidate_pool_size": 40,
}  # fmt: skip
# The 24 tensors of the released file, at a small size: names and shapes as its loaders read them.
SHAPES = {
    "output_norm.weight": (HIDDEN,), "output_norm.bias": (HIDDEN,),
    "embed_norm.weight": (HIDDEN,), "embed_norm.bias": (HIDDEN,),
    "proposal_in.weight": (RANK, HIDDEN), "proposal_in.bias": (RANK,),
    "token_in.weight": (RANK, HIDDEN), "token_in.bias": (RANK,),
    "pos_emb": (DEPTHS, RANK),
    "blocks.0.norm_attn.weight": (RANK,), "blocks.0.norm_attn.bias": (RANK,),
    "blocks.0.q_proj.weight": (RANK, RANK), "blocks.0.k_proj.weight": (RANK, RANK),
    "blocks.0.v_proj.weight": (RANK, RANK), "blocks.0.o_proj.weight": (RANK, RANK),
    "blocks.0.norm_mlp.weight": (RANK,), "blocks.0.norm_mlp.bias": (RANK,),
    "blocks.0.fc1.weight": (MLP, RANK), "blocks.0.fc1.bias": (MLP,),
    "blocks.0.fc2.weight": (RANK, MLP), "blocks.0.fc2.bias": (RANK,),
    "out_norm.weight": (RANK,), "out_norm.bias": (RANK,),
    "lm_head_query_in.weight": (HIDDEN, RANK),
}  # fmt: skip
ROPE_SHAPES = {
    **{name: shape for name, shape in SHAPES.items() if not name.startswith(("pos_emb", "blocks.0.fc", "blocks.0.q", "blocks.0.k", "blocks.0.v"))},
    "blocks.0.qkv_proj.weight": (3 * RANK, RANK),
    "blocks.0.gate_up_proj.weight": (2 * MLP, RANK), "blocks.0.gate_up_proj.bias": (2 * MLP,),
    "blocks.0.down_proj.weight": (RANK, MLP), "blocks.0.down_proj.bias": (RANK,),
}  # fmt: skip


def payload(generation="learned", dtype=torch.float32, **changes):
    torch.manual_seed(3)
    shapes = SHAPES if generation == "learned" else ROPE_SHAPES
    options = {"encoder_mode": 3, "score_head": 4}
    if generation == "rope":
        options |= {"activation": "swiglu", "rope_base": 10000.0}
    return {
        "config": {**CONFIG, **options},
        "state_dict": {name: (torch.randn(shape) / 8).to(dtype) for name, shape in shapes.items()},
        "metadata": {"speculator_kind": "dflash_tfm_weaver"},
        **changes,
    }


@pytest.fixture
def saved(tmp_path):
    """Writes a payload to a file."""

    def save(content, name="weaver.pth"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save(content, path)
        return path

    return save


@pytest.fixture
def drafter(tmp_path):
    """A folder with a drafter in z-lab's layout, in bf16 as published ones are."""
    zlab.write(random_weaver().bfloat16(), tmp_path / "drafter")
    return tmp_path / "drafter"


def same(a, b):
    assert sorted(a) == sorted(b)
    for name in a:
        assert a[name].dtype == b[name].dtype, name
        assert torch.equal(a[name], b[name]), name


# ---- the released layout ----


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("generation", ["learned", "rope"])
def test_file_to_folder_to_file_is_bit_identical(saved, drafter, tmp_path, generation, dtype):
    content = payload(generation, dtype)
    weaver = WeaverModel.from_pretrained(drafter, adapter=saved(content))
    assert weaver.tree_config.builder == "weaver"
    assert weaver.adapter.config.generation == generation
    weaver.save_pretrained(tmp_path / "ours")
    loaded = WeaverModel.from_pretrained(tmp_path / "ours")
    same(loaded.state_dict(), weaver.state_dict())
    assert loaded.drafter.fc.weight.dtype == torch.bfloat16
    assert loaded.tree_config.builder == "weaver"
    trymirai.write(loaded, tmp_path / "back.pth")
    back = torch.load(tmp_path / "back.pth", weights_only=True)
    same(back["state_dict"], content["state_dict"])
    assert back["config"] == content["config"]
    assert back["metadata"] == content["metadata"]


def test_the_written_file_is_no_larger_than_its_tensors(saved, drafter, tmp_path):
    path = saved(payload())
    trymirai.write(WeaverModel.from_pretrained(drafter, adapter=path), tmp_path / "back")
    assert (tmp_path / "back" / "weaver.pth").stat().st_size < path.stat().st_size + 2000


def test_fused_and_separate_attention_are_the_same_adapter(saved, drafter):
    separate, fused = payload(), payload()
    parts = [fused["state_dict"].pop(f"blocks.0.{part}_proj.weight") for part in "qkv"]
    fused["state_dict"]["blocks.0.qkv_proj.weight"] = torch.cat(parts)
    assert (len(separate["state_dict"]), len(fused["state_dict"])) == (24, 22)
    one, two = (trymirai.read(saved(content)) for content in (separate, fused))
    same(one.tensors, two.tensors)
    both = payload()
    both["state_dict"]["blocks.0.qkv_proj.weight"] = torch.zeros(3 * RANK, RANK)
    assert not trymirai.read(saved(both)).tensors["blocks.0.qkv_proj.weight"].any(), "the fused one wins"


def test_what_is_optional_may_be_absent_and_other_top_level_keys_are_ignored(saved):
    content = payload(step=7)
    del content["metadata"]
    content["config"] = dict(CONFIG)
    hidden_size, config, _ = trymirai.read(saved(content))
    assert hidden_size == HIDDEN
    assert config == adapter_config()
    rope = payload("rope")
    rope["config"] = dict(CONFIG)
    assert trymirai.read(saved(rope)).config == adapter_config("rope")
    rope["config"]["rope_base"] = 500.0
    assert trymirai.read(saved(rope)).config.rope_base == 500.0


def edited(generation="learned", config=None, drop=(), add=None, **top):
    content = payload(generation, **top)
    content["config"].update(config or {})
    for name in drop:
        content["config"].pop(name, None)
        content["state_dict"].pop(name, None)
    content["state_dict"].update(add or {})
    return content


FAULTS = {
    "no-state-dict": ([1, 2], "dicts `config` and `state_dict`"),
    "bare-state-dict": (payload()["state_dict"], "dicts `config` and `state_dict`"),
    "other-kind": (edited(metadata={"speculator_kind": "eagle"}), "speculator of kind 'eagle'"),
    "unknown-key": (edited(config={"eps": 1e-5}), r"unknown: \['eps'\]"),
    "missing-key": (edited(drop=["mlp_dim"]), r"keys missing: \['mlp_dim'\]"),
    "float-count": (edited(config={"d_rank": 24.0}), "d_rank 24.0"),
    "bool-count": (edited(config={"num_layers": True}), "num_layers True"),
    "heads": (edited(config={"num_heads": 5}), "rank 24 and 5 heads"),
    "encoder-mode": (edited(config={"encoder_mode": 2}), "encoder_mode 2"),
    "score-head": (edited(config={"score_head": 1}), "score_head 1"),
    "activation": (edited("rope", config={"activation": "gelu"}), "activation 'gelu'"),
    "rope-base": (edited("rope", config={"rope_base": -1.0}), "rope_base -1.0"),
    "widths": (edited(config={"d_embed": 32}), "d_model 64 and d_embed 32"),
    "rope-config-beside-learned-tensors": (edited(config={"rope_base": 1e4}), "generation 'rope'.*pos_emb, a tensor of generation 'learned'"),
    "both-generations": (edited(add={"blocks.0.gate_up_proj.weight": torch.zeros(2 * MLP, RANK)}), "pos_emb.*gate_up_proj.*of one generation"),
    "neither-generation": (edited(drop=["pos_emb"]), "blocks.0.fc1.weight"),
    "missing-tensor": (edited(drop=["out_norm.bias"]), r"missing: \['out_norm.bias'\]"),
    "missing-part-of-qkv": (edited(drop=["blocks.0.k_proj.weight"]), r"missing: \['blocks.0.qkv_proj.weight'\]"),
    "extra-tensor": (edited(add={"lm_head_query_in.bias": torch.zeros(HIDDEN)}), r"unknown: \['lm_head_query_in.bias'\]"),
    "more-layers": (edited(config={"num_layers": 2}), "missing:.*blocks.1.fc1.weight"),
    "shape": (edited(add={"pos_emb": torch.zeros(15, RANK)}), r"pos_emb \(15, 24\) for \(7, 24\)"),
    "integers": (edited(add={"pos_emb": torch.zeros(DEPTHS, RANK, dtype=torch.int8)}), r"entries \['pos_emb'\]"),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_a_file_that_is_not_exactly_right_is_refused_by_name(saved, fault):
    content, match = FAULTS[fault]
    with pytest.raises(CheckpointError, match=f"(?s){match}"):
        trymirai.read(saved(content))


class Payload:
    def __reduce__(self):
        return (print, ("code in a pickle ran",))


def test_a_pickle_with_code_is_refused_and_not_run(saved, capsys):
    with pytest.raises(CheckpointError, match="cannot be read as weights"):
        trymirai.read(saved({"config": CONFIG, "state_dict": Payload()}))
    assert "code in a pickle ran" not in capsys.readouterr().out


@pytest.mark.parametrize("content", [b"", b"not a pickle", b"PK\x03\x04 half a zip"])
def test_a_damaged_file_is_refused(tmp_path, content):
    path = tmp_path / "weaver.pth"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match="cannot be read as weights"):
        trymirai.read(path)


# ---- two halves ----


@pytest.mark.parametrize("where", ["weaver.pth", "repo/any.pth", "repo/weaver/qwen36_27b_weaver.pth"])
def test_a_file_a_folder_and_a_folder_with_weaver_in_it_are_taken(saved, drafter, where):
    path = saved(payload(), where)
    source = path if where == "weaver.pth" else Path(str(path).split("/repo/")[0]) / "repo"
    weaver = WeaverModel.from_pretrained(drafter, adapter=source)
    same({k: v for k, v in weaver.adapter.state_dict().items() if "qkv" not in k}, {k: v for k, v in payload()["state_dict"].items() if k.split(".")[-2:-1] not in (["q_proj"], ["k_proj"], ["v_proj"])})  # fmt: skip


def test_two_published_halves_decode_together_from_the_hubs_cache_without_a_network(saved, drafter, tmp_path):
    """The cache's own layout: refs, and a snapshot of each repository."""
    commit = "0123456789abcdef0123456789abcdef01234567"
    adapter = saved(payload(), "hub/weaver/qwen36_27b_weaver.pth").parents[1]
    for repo, folder in (("org--drafter", drafter), ("org--weaver", adapter)):
        place = tmp_path / "cache" / f"models--{repo}"
        shutil.copytree(folder, place / "snapshots" / commit)
        (place / "refs").mkdir()
        (place / "refs" / "main").write_text(commit)
    weaver = WeaverModel.from_pretrained(
        "org/drafter", adapter="org/weaver", cache_dir=tmp_path / "cache", local_files_only=True
    )
    model = tiny_random_model()
    weaver.attach(model)
    assert weaver.adapter.pos_emb.dtype == torch.float32
    stock = tiny_random_model().generate(prompt_ids(), max_new_tokens=12, do_sample=False)
    assert torch.equal(model.generate(prompt_ids(), max_new_tokens=12, do_sample=False, assistant_model=weaver), stock)


def test_an_artifact_of_ours_lends_its_adapter(drafter, tmp_path):
    whole = random_weaver(adapter=adapter_config("rope"))
    whole.save_pretrained(tmp_path / "whole")
    weaver = WeaverModel.from_pretrained(drafter, adapter=tmp_path / "whole")
    same(weaver.adapter.state_dict(), whole.adapter.state_dict())
    assert weaver.tree_config.builder == "weaver"


def test_the_temperatures_fitted_to_an_adapter_come_and_go_with_it(saved, drafter, tmp_path):
    whole = random_weaver(adapter=adapter_config("rope"))
    whole.tree_config.adapter_temperature = {"1.0": [1.3] * 7}
    whole.tree_config.adapter_coupling_temperature = {"1.0": [0.9] * 7}
    whole.tree_config.draft_temperature = {"1.0": [1.1] * 7}
    whole.save_pretrained(tmp_path / "whole")
    lent = WeaverModel.from_pretrained(drafter, adapter=tmp_path / "whole").tree_config
    assert (lent.adapter_temperature, lent.adapter_coupling_temperature) == ({"1.0": [1.3] * 7}, {"1.0": [0.9] * 7})
    assert lent.draft_temperature == {}, "those are of the other drafter"
    other = WeaverModel.from_pretrained(tmp_path / "whole", adapter=saved(payload())).tree_config
    assert (other.adapter_temperature, other.adapter_coupling_temperature) == ({}, {})
    assert other.draft_temperature == {"1.0": [1.1] * 7}


def test_an_attached_bf16_weaver_keeps_one_dtype(saved, drafter):
    weaver = WeaverModel.from_pretrained(drafter, adapter=saved(payload()))
    weaver.attach(tiny_random_model().bfloat16())
    assert {p.dtype for p in weaver.parameters()} == {torch.bfloat16}


@pytest.mark.parametrize("asked", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_a_dtype_that_is_asked_for_holds_for_the_adapter_too(saved, drafter, tmp_path, asked):
    WeaverModel.from_pretrained(drafter, adapter=saved(payload())).save_pretrained(tmp_path / "ours")
    loaded = WeaverModel.from_pretrained(tmp_path / "ours", dtype=asked)
    assert {p.dtype for p in loaded.parameters()} == {asked}
    beside = WeaverModel.from_pretrained(drafter, adapter=saved(payload()), dtype=asked)
    assert {p.dtype for p in beside.parameters()} == {asked}


@pytest.mark.parametrize(
    ("content", "match"),
    [
        (edited(config={"d_model": 32, "d_embed": 32}, add={
            **{f"{n}_norm.{p}": torch.ones(32) for n in ("output", "embed") for p in ("weight", "bias")},
            **{f"{n}.weight": torch.ones(RANK, 32) for n in ("proposal_in", "token_in")},
            "lm_head_query_in.weight": torch.ones(32, RANK),
        }), "made for hidden_size 32.*expected hidden_size 64, the drafter's"),
        (edited(config={"K": 15}, add={"pos_emb": torch.zeros(15, RANK)}), "15 depths beside a drafter of block_size 8"),
        (edited(config={"candidate_pool_size": VOCAB + 1}), "pool_size 129 beside a vocabulary of 128"),
        (edited(add={"out_norm.bias": torch.full((RANK,), torch.nan)}), "NaN or infinite values in the adapter's out_norm.bias"),
    ],
    ids=["hidden-size", "depths", "pool", "nan"],
)  # fmt: skip
def test_an_adapter_for_something_else_is_refused_with_both_values(saved, drafter, content, match):
    with pytest.raises(CheckpointError, match=match):
        WeaverModel.from_pretrained(drafter, adapter=saved(content))


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"vocab_size": 256, "mask_token_id": 9}, "vocab_size 256"),
        ({"num_target_layers": 9}, None),
        ({"target_layer_ids": [0, 1]}, r"target_layer_ids \[0, 1\].*expected target_layer_ids \[0, 2\]"),
        ({"num_hidden_layers": 1}, "num_hidden_layers 1"),
        ({"mask_token_id": 9}, "mask_token_id 9"),
    ],
    ids=str,
)
def test_an_artifacts_adapter_for_another_drafter_is_refused_with_both_values(drafter, tmp_path, change, match):
    random_weaver(adapter=adapter_config(), **change).save_pretrained(tmp_path / "other")
    if match is None:  # the drafter does not say, so nothing disagrees
        WeaverModel.from_pretrained(drafter, adapter=tmp_path / "other")
        return
    with pytest.raises(CheckpointError, match=match):
        WeaverModel.from_pretrained(drafter, adapter=tmp_path / "other")


def test_sources_without_an_adapter_are_refused(saved, drafter, tmp_path):
    random_weaver().save_pretrained(tmp_path / "plain")
    with pytest.raises(CheckpointError, match="a Weaver without an adapter"):
        WeaverModel.from_pretrained(drafter, adapter=tmp_path / "plain")
    with pytest.raises(OSError, match=r"no file .*absent.pth"):
        WeaverModel.from_pretrained(drafter, adapter=tmp_path / "absent.pth")
    with pytest.raises(OSError, match="org/absent"):
        WeaverModel.from_pretrained(drafter, adapter="org/absent", cache_dir=tmp_path, local_files_only=True)
    with pytest.raises(CheckpointError, match="an adapter alone"):
        WeaverModel.from_pretrained(saved(payload()))
    with pytest.raises(CheckpointError, match="geometry as a dict"):
        AutoModel.from_pretrained(tmp_path / "plain", adapter="org/weaver")
    saved(payload(), "two/a.pth")
    with pytest.raises(CheckpointError, match=r"2 adapters in .*two: a.pth, weaver/b.pth"):
        WeaverModel.from_pretrained(drafter, adapter=saved(payload(), "two/weaver/b.pth").parents[1])


# ---- our own folder ----


@pytest.fixture
def ours(tmp_path):
    random_weaver(adapter=adapter_config()).save_pretrained(tmp_path / "ours")
    return tmp_path / "ours"


@pytest.mark.parametrize("fault", ["other-generation", "missing", "nan"])
def test_a_folder_with_a_wrong_adapter_is_refused_by_name(ours, fault):
    path = ours / "model.safetensors"
    tensors = load_file(path)
    if fault == "other-generation":
        config = read_json(ours / "config.json")
        config["adapter"]["generation"] = "rope"
        (ours / "config.json").write_text(json.dumps(config))
        match = "(?s)gate_up_proj.*adapter.pos_emb.*an adapter of generation 'rope'"
    elif fault == "missing":
        tensors = {k: v for k, v in tensors.items() if not k.startswith("adapter.")}
        match = "missing: .*adapter.pos_emb"
    else:
        tensors["adapter.pos_emb"][2, 3] = torch.nan
        match = "NaN or infinite values in the adapter's pos_emb"
    save_file(tensors, path, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=match):
        WeaverModel.from_pretrained(ours)


def test_a_drafter_only_artifact_declares_an_adapters_shape(tmp_path):
    weaver = random_weaver(adapter=adapter_config(), adapter_initialized=False)
    weaver.save_pretrained(tmp_path)
    assert not any(name.startswith("adapter.") for name in load_file(tmp_path / "model.safetensors"))
    loaded = WeaverModel.from_pretrained(tmp_path)
    assert loaded.adapter is not None, "PEFT needs a module to put weights into"
    assert all(p.isfinite().all() for p in loaded.parameters())
    assert not loaded.has_adapter
    assert loaded.tree_config.builder == "marginal"
    loaded.init_adapter(adapter_config())
    assert loaded.has_adapter
    loaded.save_pretrained(tmp_path / "trained")
    assert WeaverModel.from_pretrained(tmp_path / "trained").has_adapter


# ---- weaver-hf convert ----


def convert(*arguments):
    return CliRunner().invoke(app, ["convert", *map(str, arguments)])


def test_every_layout_goes_there_and_back_bit_identical(saved, drafter, tmp_path):
    adapter = saved(payload())
    assert convert(drafter, tmp_path / "both", "--adapter", adapter).exit_code == 0
    for layout in ("zlab", "speculators"):
        result = convert(tmp_path / "both", tmp_path / layout, "--to", layout)
        assert result.exit_code == 0
        assert "--to trymirai" in result.output, "it says that the adapter stays behind"
        convert(tmp_path / layout, tmp_path / f"{layout}-back")
        assert convert(tmp_path / f"{layout}-back", tmp_path / f"{layout}-again", "--to", "zlab").exit_code == 0
        assert (tmp_path / f"{layout}-again" / "model.safetensors").read_bytes() == (
            drafter / "model.safetensors"
        ).read_bytes()
    assert read_json(tmp_path / "zlab-again" / "config.json") == read_json(drafter / "config.json")
    assert convert(tmp_path / "both", tmp_path / "back.pth", "--to", "trymirai").exit_code == 0
    back = torch.load(tmp_path / "back.pth", weights_only=True)
    same(back["state_dict"], payload()["state_dict"])
    convert(drafter, tmp_path / "again", "--adapter", tmp_path / "back.pth")
    for name in ("config.json", "model.safetensors"):
        assert (tmp_path / "again" / name).read_bytes() == (tmp_path / "both" / name).read_bytes()


def test_what_convert_cannot_do_is_an_error_with_words(drafter, tmp_path):
    result = convert(drafter, tmp_path / "x.pth", "--to", "trymirai")
    assert isinstance(result.exception, WeaverError)
    assert "without an adapter" in str(result.exception)
    result = convert(drafter, drafter)
    assert result.exit_code == 2
    assert "is there already" in " ".join(result.output.replace("│", " ").split())
    assert convert(drafter, tmp_path / "x", "--to", "gguf").exit_code == 2
