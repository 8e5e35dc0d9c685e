"""WeaverModel as an artifact: saving, strict loading, the Hub's cache layout."""

import json
import pickle
import shutil

import pytest
import torch
from safetensors.torch import save_file
from support import read_json
from transformers import AutoModel

from weaver_hf import WeaverConfig, WeaverModel, load_tiny
from weaver_hf.errors import CheckpointError, MissingDrafterError
from weaver_hf.tiny import TARGET, WEAVER


@pytest.fixture
def saved(tmp_path):
    weaver = WeaverModel(WeaverConfig(vocab_size=128, target_layer_ids=[0]))
    weaver.tree_config.budget = 7
    weaver.save_pretrained(tmp_path / "weaver")
    return tmp_path / "weaver"


@pytest.mark.parametrize("load", [WeaverModel.from_pretrained, AutoModel.from_pretrained], ids=["weaver", "auto"])
def test_save_and_load_keep_config_and_tree_settings(saved, load):
    assert sorted(path.name for path in saved.iterdir()) == ["config.json", "model.safetensors"]
    loaded = load(saved)
    assert type(loaded) is WeaverModel
    assert loaded.tree_config.budget == 7
    assert loaded.config.target_layer_ids == [0]


def test_an_attached_weaver_saves_and_pickles_as_a_free_one(saved, model):
    weaver = WeaverModel.from_pretrained(saved).attach(model)
    weaver.tree_config.budget = 9
    weaver.save_pretrained(saved)
    assert read_json(saved / "config.json")["tree_config"]["budget"] == 9
    copied = pickle.loads(pickle.dumps(weaver))
    assert copied.target is None
    assert copied.tree_config.budget == 9
    assert weaver.target is model


def test_a_weightless_weaver_follows_the_targets_device_and_dtype(model):
    weaver = WeaverModel(WeaverConfig())
    assert (weaver.dtype, weaver.device.type) == (torch.float32, "cpu")
    assert weaver.attach(model.bfloat16()).dtype == torch.bfloat16


def test_a_weaver_without_a_drafter_says_so_when_called():
    with pytest.raises(MissingDrafterError, match="without a learned drafter"):
        WeaverModel(WeaverConfig())(noise_embeds=None)


def test_a_damaged_safetensors_file_is_refused(saved):
    (saved / "model.safetensors").write_bytes(b"\x10\x00\x00\x00\x00\x00\x00\x00not json at all.")
    with pytest.raises(CheckpointError, match=r"damaged safetensors file in .*weaver"):
        WeaverModel.from_pretrained(saved)


@pytest.mark.parametrize("size", [0, 5])
def test_a_truncated_safetensors_file_is_refused(saved, size):
    (saved / "model.safetensors").write_bytes(b"\x01" * size)
    with pytest.raises(CheckpointError, match="damaged"):
        WeaverModel.from_pretrained(saved)


def test_a_foreign_safetensors_file_is_refused_with_the_names_of_its_tensors(saved):
    save_file({"model.embed_tokens.weight": torch.zeros(2, 2)}, saved / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"unknown: \['model.embed_tokens.weight'\]"):
        WeaverModel.from_pretrained(saved)


def test_missing_and_misshapen_tensors_are_named(saved):
    """Strictness for weights that later Weavers have: here a subclass with one."""

    class Weighted(WeaverModel):
        def __init__(self, config):
            super().__init__(config)
            self.fc = torch.nn.Linear(3, 2, bias=False)

        def _init_weights(self, module):
            pass

    with pytest.raises(CheckpointError, match=r"missing: \['fc.weight'\]"):
        Weighted.from_pretrained(saved)
    save_file({"fc.weight": torch.zeros(5, 3)}, saved / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"of another shape: .*fc.weight"):
        Weighted.from_pretrained(saved)
    save_file({"fc.weight": torch.ones(2, 3)}, saved / "model.safetensors", metadata={"format": "pt"})
    assert torch.equal(Weighted.from_pretrained(saved).fc.weight, torch.ones(2, 3))


def test_a_targets_folder_is_no_weaver():
    with pytest.raises(CheckpointError, match="model_type 'qwen3_5_text'"):
        WeaverModel.from_pretrained(TARGET)


def test_a_missing_folder_is_an_os_error(tmp_path):
    with pytest.raises(OSError, match="nothing"):
        WeaverModel.from_pretrained(tmp_path / "nothing", local_files_only=True)


def test_an_artifact_loads_from_the_hubs_cache_without_a_network(saved, tmp_path):
    repo, commit = tmp_path / "cache" / "models--org--weaver", "0123456789abcdef0123456789abcdef01234567"
    shutil.copytree(saved, repo / "snapshots" / commit)
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text(commit)
    loaded = WeaverModel.from_pretrained("org/weaver", cache_dir=tmp_path / "cache", local_files_only=True)
    assert loaded.tree_config.budget == 7


def test_the_embedded_weaver_is_what_saving_writes(tmp_path):
    weaver = WeaverModel.from_pretrained(WEAVER)
    weaver.save_pretrained(tmp_path)
    mine, theirs = (json.loads((folder / "config.json").read_text()) for folder in (tmp_path, WEAVER))
    for config in (mine, theirs):
        config.pop("transformers_version")
    assert mine == theirs
    assert (tmp_path / "model.safetensors").read_bytes() == (WEAVER / "model.safetensors").read_bytes()
    assert weaver.config.vocab_size == read_json(TARGET / "config.json")["vocab_size"]


def test_load_tiny_is_fp32_unless_asked_otherwise(trio):
    model, tokenizer, weaver = trio
    assert model.dtype == torch.float32
    assert weaver.target is model
    assert tokenizer("hello").input_ids
    half, _, drafter = load_tiny(torch.bfloat16)
    assert half.dtype == drafter.dtype == torch.bfloat16
