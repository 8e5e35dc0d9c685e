"""A Weaver as a PEFT adapter over a drafter: the doors it loads by, switching, what is refused, training."""

import json
import pickle

import huggingface_hub
import pytest
import torch
from peft import AutoPeftModel, LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from support import adapter_config, prompt_ids, random_weaver, read_json, tiny_random_model
from test_training_drafter import TEXT, Letters, small
from transformers import AutoModel
from typer.testing import CliRunner

from weaver_hf import WeaverModel
from weaver_hf.cli import app
from weaver_hf.errors import CheckpointError, MissingAdapterError, NotAttachedError
from weaver_hf.peft_weaver import ADAPTER_TARGETS, DRAFTER_TARGETS, add_adapter_part, add_lora
from weaver_hf.scoring import DraftRule
from weaver_hf.training.adapter import AdapterTrainConfig
from weaver_hf.training.adapter import train as train_adapter
from weaver_hf.training.cli import cached_commit
from weaver_hf.training.data import load_data, make_data
from weaver_hf.training.drafter import DrafterTrainConfig
from weaver_hf.training.drafter import train as train_drafter

GREEDY = {"max_new_tokens": 12, "do_sample": False}
DOORS = {
    "weaver": lambda base, folder: WeaverModel.from_pretrained(folder),
    "auto": lambda base, folder: AutoModel.from_pretrained(folder),
    "peft": lambda base, folder: PeftModel.from_pretrained(WeaverModel.from_pretrained(base), folder),
    "auto-peft": lambda base, folder: AutoPeftModel.from_pretrained(folder, import_allowlist=["weaver_hf"]),
}


def shaken(weaver, seed):
    """Trained, as it were: every weight of the PEFT adapter is random."""
    torch.manual_seed(seed)
    with torch.no_grad():
        for name, parameter in weaver.named_parameters():
            if ".default" in name:
                parameter.normal_(std=0.2)
    return weaver


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A drafter that declares an adapter, and over it: LoRA (`code`), LoRA and adapter (`both`), an adapter (`part`)."""
    root = tmp_path_factory.mktemp("peft")
    base = random_weaver()
    base.tree_config.budget = 11
    base.declare_adapter(adapter_config()).save_pretrained(root / "base")

    def over(name, seed, lora, part):
        weaver = WeaverModel.from_pretrained(root / "base")
        if lora:
            add_lora(weaver, DRAFTER_TARGETS, 3, 6)
        if part:
            add_adapter_part(weaver)
        weaver.tree_config.budget = seed
        shaken(weaver, seed).save_pretrained(root / name)

    over("code", 7, lora=True, part=False)
    over("both", 9, lora=True, part=True)
    over("part", 13, lora=False, part=True)
    return root


def drafted(weaver, target):
    """What the drafter says of one block: hidden states, and the adapter's scores where there is one."""
    weaver = weaver.get_base_model() if isinstance(weaver, PeftModel) else weaver
    weaver.attach(target)
    sink = weaver.tap_sink(target.device)
    with sink.listening(), torch.no_grad():
        target(prompt_ids())
    taps = sink.take()
    context = weaver.drafter_context(None)
    weaver.read_taps(context, taps)
    rule = DraftRule([1.0] * 7)
    block = weaver.draft(torch.tensor([[5]]), context, rule, 6)
    states = [block.hidden]
    if weaver.has_adapter:
        scorer = weaver.scorer(block, taps, rule)
        ones = torch.ones(1, 1, 1, dtype=torch.bool)
        states.append(scorer(torch.tensor([[5]]), torch.tensor([[0]]), ones, 0))
    weaver.detach()
    return states


# ---- doors -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["code", "both", "part"])
def test_every_door_loads_the_same_weaver(folders, model, name):
    """Drafts, scores and tree settings are equal; they are not the base's."""
    budget = read_json(folders / name / "adapter_config.json")["auto_mapping"]["tree_config"]["budget"]
    expected = drafted(WeaverModel.from_pretrained(folders / name), model)
    assert len(expected) == (1 if name == "code" else 2)
    base = drafted(WeaverModel.from_pretrained(folders / "base"), model)
    assert torch.equal(base[0], expected[0]) == (name == "part")
    for load in DOORS.values():
        loaded = load(folders / "base", folders / name)
        assert loaded.tree_config.budget == budget
        assert loaded.tree_config.builder == ("marginal" if name == "code" else "weaver")
        for got, wanted in zip(drafted(loaded, model), expected, strict=True):
            torch.testing.assert_close(got, wanted)


@pytest.mark.parametrize("door", DOORS)
def test_generate_takes_the_weaver_of_every_door(folders, model, door):
    """Also the PeftModel itself as the assistant."""
    loaded = DOORS[door](folders / "base", folders / "both")
    loaded.attach(model)
    text = model.generate(prompt_ids(), assistant_model=loaded, **GREEDY)
    assert torch.equal(text, tiny_random_model().generate(prompt_ids(), **GREEDY))
    weaver = loaded.get_base_model() if isinstance(loaded, PeftModel) else loaded
    assert weaver.stats.drafted_nodes > 0
    weaver.detach()


def test_a_peft_model_that_is_not_attached_is_refused_by_name(folders, model, weaver):
    loaded = DOORS["peft"](folders / "base", folders / "code")
    with pytest.raises(NotAttachedError):
        model.generate(prompt_ids(), assistant_model=loaded, **GREEDY)


def test_auto_peft_asks_for_the_import(folders):
    with pytest.raises(ValueError, match="import_allowlist"):
        AutoPeftModel.from_pretrained(folders / "code")


def test_a_folder_holds_what_peft_writes_and_no_config_of_its_own(folders):
    assert sorted(path.name for path in (folders / "both").iterdir()) == [
        "adapter_config.json",
        "adapter_model.safetensors",
    ]
    names = load_file(folders / "both" / "adapter_model.safetensors")
    assert all(name.startswith("base_model.model.") for name in names)
    assert any("lora_A" in name for name in names)
    assert "base_model.model.adapter.out_norm.weight" in names


def test_what_peft_itself_saves_loads_too(folders, model, tmp_path):
    """Without the tree settings, which PEFT does not write: then the base's hold, and an adapter's builder."""
    DOORS["peft"](folders / "base", folders / "both").save_pretrained(tmp_path)
    loaded = WeaverModel.from_pretrained(tmp_path)
    assert (loaded.tree_config.builder, loaded.tree_config.budget) == ("weaver", 11)
    for got, wanted in zip(drafted(loaded, model), drafted(DOORS["weaver"](None, folders / "both"), model)):
        assert torch.equal(got, wanted)


def test_a_declared_adapter_is_not_one_with_weights(folders, model):
    weaver = WeaverModel.from_pretrained(folders / "base").attach(model)
    assert weaver.adapter is not None
    assert not weaver.has_adapter
    assert weaver.tree_config.builder == "marginal"
    assert read_json(folders / "base" / "config.json")["adapter_initialized"] is False
    assert not any(name.startswith("adapter.") for name in load_file(folders / "base" / "model.safetensors"))
    weaver.tree_config.builder = "weaver"
    with pytest.raises(MissingAdapterError):
        model.generate(prompt_ids(), assistant_model=weaver, **GREEDY)


# ---- several adapters ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["weaver", "peft"])
def test_adapters_are_switched_by_name_with_their_tree_settings(folders, model, way):
    if way == "weaver":
        weaver = switch = WeaverModel.from_pretrained(folders / "code", adapter_name="code")
        weaver.load_adapter(folders / "both", "both")
        assert weaver.peft_adapter == "both", "the one that was loaded last"
    else:
        weaver = WeaverModel.from_pretrained(folders / "base")
        switch = PeftModel.from_pretrained(weaver, folders / "code", adapter_name="code")
        switch.load_adapter(folders / "both", adapter_name="both")
    for name in ("both", "code", "both"):
        switch.set_adapter(name)
        assert weaver.peft_adapter == name
        assert weaver.tree_config.budget == {"both": 9, "code": 7}[name]
        assert weaver.has_adapter == (name == "both")
        for got, wanted in zip(
            drafted(weaver, model), drafted(DOORS["weaver"](None, folders / name), model), strict=True
        ):
            torch.testing.assert_close(got, wanted)
    weaver.tree_config.budget = 3
    weaver.set_adapter("code")
    assert weaver.tree_config.budget == 7
    weaver.set_adapter("both")
    assert weaver.tree_config.budget == 3, "each keeps its own"


def test_disabled_adapters_leave_the_base(folders, model):
    peft_model = DOORS["peft"](folders / "base", folders / "code")
    weaver = peft_model.get_base_model()
    with peft_model.disable_adapter():
        assert weaver.peft_adapter is None
        assert weaver.tree_config.budget == 11
        base = WeaverModel.from_pretrained(folders / "base")
        assert torch.equal(drafted(weaver, model)[0], drafted(base, model)[0])
        with pytest.raises(CheckpointError, match="disabled"):
            weaver.save_pretrained(folders / "nothing")
    assert weaver.peft_adapter == "default"


def test_folded_tables_follow_a_switch(folders, model):
    weaver = WeaverModel.from_pretrained(folders / "both", adapter_name="a")
    weaver.load_adapter(folders / "part", "b")
    weaver.attach(model, fold=True)
    for name in ("a", "b"):
        weaver.set_adapter(name)
        model.generate(prompt_ids(), assistant_model=weaver, **GREEDY)
        assert weaver._tables[0] == name


def test_a_context_of_another_adapter_is_not_gone_on_with(folders, model):
    """Keys and values that the drafter kept on a cache are those of the LoRA that made them."""
    weaver = WeaverModel.from_pretrained(folders / "code", adapter_name="a")
    weaver.load_adapter(folders / "both", "b")
    weaver.attach(model)
    out = model.generate(prompt_ids(), assistant_model=weaver, return_dict_in_generate=True, **GREEDY)
    cache = out.past_key_values
    assert weaver.drafter_context(cache).length > 0
    weaver.set_adapter("a")
    assert weaver.drafter_context(cache).length == 0


@pytest.mark.parametrize("call", ["set_adapter", "load_adapter"])
def test_a_name_that_is_unknown_or_taken_is_refused(folders, call):
    weaver = WeaverModel.from_pretrained(folders / "code")
    with pytest.raises(CheckpointError, match="'other'|'default'"):
        weaver.set_adapter("other") if call == "set_adapter" else weaver.load_adapter(folders / "both")


def test_a_deleted_adapter_is_gone_with_its_settings(folders):
    weaver = WeaverModel.from_pretrained(folders / "code")
    weaver.delete_adapter("default")
    assert weaver.peft_adapter is None
    assert weaver.tree_config.budget == 11


@pytest.mark.parametrize("name", ["code", "both", "part"])
def test_a_merged_weaver_is_a_plain_artifact_that_drafts_the_same(folders, model, tmp_path, name):
    expected = drafted(WeaverModel.from_pretrained(folders / name), model)
    WeaverModel.from_pretrained(folders / name).merge_adapter().save_pretrained(tmp_path)
    merged = WeaverModel.from_pretrained(tmp_path)
    assert merged.tree_config == WeaverModel.from_pretrained(folders / name).tree_config
    for got, wanted in zip(drafted(merged, model), expected, strict=True):
        torch.testing.assert_close(got, wanted, atol=2e-4, rtol=2e-4)


def test_a_weaver_with_adapters_pickles(folders, model):
    weaver = WeaverModel.from_pretrained(folders / "both")
    copied = pickle.loads(pickle.dumps(weaver))
    for got, wanted in zip(drafted(copied, model), drafted(weaver, model), strict=True):
        assert torch.equal(got, wanted)


# ---- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("door", ["load_adapter", "peft"])
def test_a_base_without_the_module_is_refused(folders, door):
    """PEFT alone drops its tensors without a word."""
    bare = random_weaver()
    with pytest.raises(CheckpointError, match=r"adapter\b"):
        if door == "peft":
            PeftModel.from_pretrained(bare, folders / "both")
        else:
            bare.load_adapter(folders / "both")


@pytest.mark.parametrize(("change", "message"), [("drop", "missing"), ("add", "unknown"), ("cut", "of another shape")])
def test_tensors_that_do_not_fit_are_named(folders, tmp_path, change, message):
    (tmp_path / "adapter_config.json").write_text((folders / "both" / "adapter_config.json").read_text())
    tensors = load_file(folders / "both" / "adapter_model.safetensors")
    name = "base_model.model.drafter.fc.lora_A.weight"
    if change == "drop":
        tensors.pop(name)
    elif change == "add":
        name = "base_model.model.drafter.extra.weight"
        tensors[name] = torch.ones(2)
    else:
        tensors[name] = tensors[name][:, :-1].contiguous()
    save_file(tensors, tmp_path / "adapter_model.safetensors")
    short = name.removeprefix("base_model.model.")
    with pytest.raises(CheckpointError, match=f"{message}: .*{short}"):
        WeaverModel.from_pretrained(tmp_path)
    weaver = WeaverModel.from_pretrained(folders / "base")
    with pytest.raises(CheckpointError):
        weaver.load_adapter(tmp_path)
    assert weaver.peft_adapter is None, "nothing of it stays"
    if change != "cut":  # PEFT refuses that one itself
        short = short.replace(".weight", ".default.weight") if change == "drop" else short
        with pytest.raises(CheckpointError, match=f"{message}: .*{short}"):
            DOORS["peft"](folders / "base", tmp_path)


def test_a_folder_that_names_no_base_is_refused(folders, tmp_path):
    described = read_json(folders / "code" / "adapter_config.json")
    (tmp_path / "adapter_config.json").write_text(json.dumps({**described, "base_model_name_or_path": None}))
    with pytest.raises(CheckpointError, match="names no base"):
        WeaverModel.from_pretrained(tmp_path)


def test_two_sources_of_an_adapter_are_refused(folders):
    with pytest.raises(CheckpointError, match="brings its own adapter"):
        WeaverModel.from_pretrained(folders / "both", adapter="elsewhere.pth")


def test_an_adapter_with_weights_cannot_be_declared():
    weaver = random_weaver()
    weaver.init_adapter(adapter_config())
    with pytest.raises(CheckpointError, match="has an adapter"):
        weaver.declare_adapter(adapter_config())


def test_default_targets_are_all_linear_layers_but_the_adapters_projections():
    weaver = random_weaver()
    weaver.init_adapter(adapter_config("rope", num_heads=3))
    peft_model = get_peft_model(weaver, LoraConfig(r=2, target_modules=f"{DRAFTER_TARGETS}|{ADAPTER_TARGETS}"))
    changed = {name.split(".lora_A")[0] for name, _ in weaver.named_parameters() if ".lora_A" in name}
    linear = {n.removesuffix(".base_layer") for n, m in weaver.named_modules() if type(m) is torch.nn.Linear}
    linear = {name for name in linear if ".lora_" not in name}
    assert len(peft_model.peft_config) == 1
    assert changed == {name for name in linear if name.startswith(("drafter.", "adapter.blocks."))}
    assert len(changed) == 1 + 2 * 7 + 4


# ---- training --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    config = small(sequences=12, max_new_tokens=16, batch_size=12, own_share=0.0)
    make_data(tiny_random_model(), Letters(), TEXT, folder, config)
    return load_data([folder], Letters(), 8)


SETTINGS = {"anchors": 256, "batch_size": 4, "anchors_per_sequence": 8, "held_out": 1, "optimizer": "adamw"}


def test_training_a_lora_leaves_the_base_and_writes_a_folder_that_drafts_better(folders, tmp_path, data):
    weaver = WeaverModel.from_pretrained(folders / "base")
    add_lora(weaver, DRAFTER_TARGETS, 4, 8)
    before = {n: p.clone() for n, p in weaver.named_parameters() if "lora_" not in n}
    config = DrafterTrainConfig(**SETTINGS, learning_rate=3e-2, evaluate_every=0.0)
    train_drafter(tiny_random_model(), weaver, data, tmp_path / "out", config, pad=126)
    rows = [json.loads(line) for line in (tmp_path / "out" / "log.jsonl").read_text().splitlines()]
    assert rows[-1]["loss"] < rows[0]["loss"] - 0.1
    assert all(torch.equal(p, before[n]) for n, p in weaver.named_parameters() if n in before)
    loaded = WeaverModel.from_pretrained(tmp_path / "out")
    assert loaded.peft_adapter == "default"
    assert loaded.tree_config.draft_temperature
    assert not WeaverModel.from_pretrained(folders / "base").tree_config.draft_temperature


def test_an_adapter_is_trained_into_the_folder_of_a_lora(folders, tmp_path, data):
    weaver = WeaverModel.from_pretrained(folders / "code")
    lora = weaver.drafter.fc.lora_A.default.weight.clone()
    add_adapter_part(weaver)
    config = AdapterTrainConfig(**SETTINGS, learning_rate=3e-3)
    train_adapter(tiny_random_model(), weaver.float(), data, tmp_path / "out", config, pad=126)
    loaded = WeaverModel.from_pretrained(tmp_path / "out")
    assert torch.equal(loaded.drafter.fc.lora_A.default.weight, lora), "the drafter is frozen"
    assert loaded.has_adapter
    assert loaded.tree_config.builder == "weaver"
    assert loaded.tree_config.adapter_temperature
    assert loaded.adapter.lm_head_query_in.weight.abs().sum() > 0, "it was zero before"


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (["drafter", "--lora"], "needs a trained drafter"),
        (["drafter", "--lora-rank", "4"], "setting of --lora"),
        (["adapter", "--drafter", "x", "--lora-alpha", "4"], "setting of --lora"),
    ],
)
def test_lora_options_that_say_nothing_are_refused(command, message):
    result = CliRunner().invoke(app, ["train", *command, "--data", "x", "--out", "x"], env={"COLUMNS": "200"})
    assert result.exit_code == 2
    assert message in result.output


def test_the_commit_of_a_target_is_the_one_in_the_cache(tmp_path, monkeypatch):
    repo, commit = tmp_path / "models--org--target", "0123456789abcdef0123456789abcdef01234567"
    (repo / "snapshots" / commit).mkdir(parents=True)
    (repo / "snapshots" / commit / "config.json").write_text("{}")
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text(commit)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    assert cached_commit("org/target") == commit
    assert cached_commit("org/other") is None
    assert cached_commit(str(tmp_path)) is None
