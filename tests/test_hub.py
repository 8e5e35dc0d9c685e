"""Publishing: the card's facts, what is refused, and uploads by the real client to a stand-in of the Hub."""

import json
import os
import subprocess
import sys
from pathlib import Path

import huggingface_hub
import pytest
import torch
from hub_server import Hub
from huggingface_hub import ModelCard
from safetensors.torch import load_file
from support import adapter_config, random_weaver, read_json, tiny_random_model
from transformers import AutoTokenizer
from typer.testing import CliRunner

from weaver_hf import WeaverConfig, WeaverModel
from weaver_hf.bench import load_prompts, run_bench
from weaver_hf.bench.harness import report
from weaver_hf.cli import app
from weaver_hf.errors import PublishError
from weaver_hf.hub import card_facts, make_card, read_acceptance, training_files
from weaver_hf.peft_weaver import DRAFTER_TARGETS, add_lora
from weaver_hf.tiny import TARGET, WEAVER

CARDS = Path(__file__).parents[1] / "model_cards"
REVISION = "89abcdef0123456789abcdef0123456789abcdef"
ACCEPTANCE = read_json(CARDS / "tiny-weaver.acceptance.json")


@pytest.fixture
def hub(monkeypatch, tmp_path):
    hub = Hub()
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", hub.url)
    monkeypatch.setattr(
        huggingface_hub.constants, "HUGGINGFACE_CO_URL_TEMPLATE", hub.url + "/{repo_id}/resolve/{revision}/{filename}"
    )
    monkeypatch.setattr(huggingface_hub.hf_api.api, "endpoint", hub.url)  # of `file_exists`, which PEFT calls
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    yield hub
    hub.close()


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(TARGET)


@pytest.fixture
def options(tokenizer):
    return {"licence": "mit", "acceptance": ACCEPTANCE, "tokenizer": tokenizer, "token": "hf_x"}


def publishable(**overrides) -> WeaverModel:
    fields = {"vocab_size": 8192, "base_model_name_or_path": "org/target", "base_model_revision": REVISION}
    return random_weaver(**{**fields, **overrides})


# ---- uploads ---------------------------------------------------------------------------------------------------------


@pytest.mark.once  # the newest hub client asks a host that is not there, and waits
@pytest.mark.parametrize("way", ["push_to_hub", "save_pretrained"])
def test_an_upload_holds_the_artifact_byte_for_byte_and_loads_back(hub, options, tmp_path, way):
    weaver = publishable()
    weaver.tree_config.budget = 21
    weaver.save_pretrained(tmp_path / "saved")
    if way == "push_to_hub":
        weaver.push_to_hub("org/weaver", private=True, commit_message="first", **options)
    else:
        weaver.save_pretrained(
            tmp_path / "x", push_to_hub=True, repo_id="org/weaver", private=True, commit_message="first", **options
        )
    for name in ("config.json", "model.safetensors"):
        assert hub.files["org/weaver", name] == (tmp_path / "saved" / name).read_bytes()
    names = {path for _, path in hub.files}
    assert names >= {"README.md", "acceptance.json", "tokenizer.json", "tokenizer_config.json"}
    assert not any(name.startswith("custom_generate") for name in names)
    assert hub.created[0]["visibility"] == "private"
    assert [(c["summary"], c["branch"]) for c in hub.commits] == [("first", "main")], (
        "one commit: never half a repository"
    )
    loaded = WeaverModel.from_pretrained("org/weaver", cache_dir=tmp_path / "cache")
    assert loaded.tree_config.budget == 21
    assert all(torch.equal(p, q) for p, q in zip(loaded.parameters(), weaver.parameters(), strict=True))
    again = AutoTokenizer.from_pretrained("org/weaver", cache_dir=tmp_path / "cache")
    assert again.get_vocab() == options["tokenizer"].get_vocab()


def test_the_door_a_branch_and_tags_are_uploaded_where_asked(hub, options):
    publishable().push_to_hub("org/weaver", custom_generate=True, revision="next", tags=["mine"], **options)
    assert b"weaver_hf.custom_generate" in hub.files["org/weaver", "custom_generate/generate.py"]
    assert hub.commits[0]["branch"] == "next"
    assert any("/branch/next" in request for request in hub.requests)
    card = ModelCard(hub.files["org/weaver", "README.md"].decode())
    assert {"weaver", "custom_generate", "mine"} <= set(card.data.tags)
    assert 'custom_generate="org/weaver"' in card.text


@pytest.mark.once  # the newest hub client asks a host that is not there, and waits
def test_the_targets_tokenizer_comes_from_the_hub_at_its_revision(hub, options, tokenizer, tmp_path):
    tokenizer.save_pretrained(tmp_path / "t")
    hub.files |= {("org/target", path.name): path.read_bytes() for path in (tmp_path / "t").iterdir()}
    publishable().push_to_hub("org/weaver", **{**options, "tokenizer": None})
    assert ("org/weaver", "tokenizer.json") in hub.files
    assert any(f"/org/target/resolve/{REVISION}/tokenizer" in request for request in hub.requests)


def test_a_peft_folder_is_uploaded_and_loads_back_over_its_base(hub, options, tmp_path):
    base = publishable(adapter=adapter_config(), adapter_initialized=False)
    base.push_to_hub("org/drafter", **options)
    weaver = WeaverModel.from_pretrained("org/drafter", cache_dir=tmp_path / "cache")
    add_lora(weaver, DRAFTER_TARGETS, 3, 6)
    with torch.no_grad():
        weaver.drafter.fc.lora_B.default.weight.normal_()
    weaver.push_to_hub("org/code", **options)
    assert ("org/code", "adapter_model.safetensors") in hub.files
    assert ("org/code", "model.safetensors") not in hub.files
    card = ModelCard(hub.files["org/code", "README.md"].decode())
    assert (card.data.base_model, card.data.library_name) == ("org/drafter", "peft")
    assert "LoRA of rank 3, alpha 6" in card.text
    loaded = WeaverModel.from_pretrained("org/code", cache_dir=tmp_path / "cache")
    assert torch.equal(loaded.drafter.fc.lora_B.default.weight, weaver.drafter.fc.lora_B.default.weight)


def test_the_training_record_is_uploaded_and_told(hub, options, tmp_path):
    (tmp_path / "train_command.txt").write_text("weaver-hf train drafter --data mine\n")
    (tmp_path / "log.jsonl").write_text("{}\n")
    (tmp_path / "train_data.json").write_text(
        json.dumps([{"folder": "mine", "sequences": 77, "tokens": 990, "settings": {"seed": 5}}])
    )
    (tmp_path / "acceptance.json").write_text(json.dumps(ACCEPTANCE))
    publishable().push_to_hub("org/weaver", history=tmp_path, **{**options, "acceptance": None})
    assert hub.files["org/weaver", "training/log.jsonl"] == b"{}\n"
    text = hub.files["org/weaver", "README.md"].decode()
    for part in ("weaver-hf train drafter --data mine", "mine: 77 sequences, 990 tokens; seed 5", "training/log.jsonl"):
        assert part in text


@pytest.mark.slow
def test_the_command_pushes_a_folder(hub, tmp_path):
    publishable().save_pretrained(tmp_path / "weaver")
    (tmp_path / "bench.json").write_text(json.dumps(ACCEPTANCE))
    done = subprocess.run(
        [
            sys.executable, "-m", "weaver_hf", "push", str(tmp_path / "weaver"), "org/weaver", "--licence", "mit",
            "--acceptance", str(tmp_path / "bench.json"), "--tokenizer", str(TARGET), "--json",
        ],
        env={**os.environ, "HF_ENDPOINT": hub.url, "HF_HUB_DISABLE_XET": "1", "HF_TOKEN": "hf_x", "HF_HUB_OFFLINE": "0"},
        capture_output=True,
        text=True,
        timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["url"].startswith(f"{hub.url}/org/weaver/commit/")
    assert hub.files["org/weaver", "model.safetensors"] == (tmp_path / "weaver" / "model.safetensors").read_bytes()


# ---- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "given", "message"),
    [
        ({"base_model_name_or_path": None}, {}, "target's Hub id"),
        ({"base_model_revision": None}, {}, "target's revision"),
        ({}, {"licence": None}, "a licence"),
        ({}, {"acceptance": None}, "an acceptance table"),
        ({"base_model_name_or_path": str(TARGET)}, {}, "a local folder .* as the target"),
        ({}, {"acceptance": {"summary": []}}, "no acceptance table"),
        ({}, {"acceptance": {**ACCEPTANCE, "settings": {"target": "org/another"}}}, "measured on org/another"),
        ({"vocab_size": 130}, {}, "a tokenizer of"),
    ],
    ids=["target", "revision", "licence", "acceptance", "local-target", "empty", "another-target", "tokenizer"],
)
def test_a_push_that_lacks_a_fact_is_refused_before_anything_is_uploaded(hub, options, config, given, message):
    with pytest.raises(PublishError, match=message):
        publishable(**config).push_to_hub("org/weaver", **{**options, **given})
    assert hub.requests == []


def test_all_that_is_missing_is_named_at_once(hub):
    with pytest.raises(PublishError, match=r"(?s)Hub id.*revision.*licence.*acceptance table"):
        WeaverModel(WeaverConfig()).push_to_hub("org/weaver")


def test_a_peft_adapter_over_a_local_drafter_is_refused(hub, options, tmp_path):
    publishable().save_pretrained(tmp_path)
    weaver = WeaverModel.from_pretrained(tmp_path)
    add_lora(weaver, DRAFTER_TARGETS, 3, 6)
    with pytest.raises(PublishError, match="a local folder .* as the drafter"):
        weaver.push_to_hub("org/weaver", **options)
    assert hub.requests == []


@pytest.mark.parametrize("text", ["", "{", "[]", '{"summary": [{"builder": "weaver"}]}', "\x00"])
def test_a_file_that_is_no_bench_report_is_refused(tmp_path, text):
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(PublishError, match="no acceptance table in .*a.json"):
        read_acceptance(tmp_path / "a.json")


def test_the_command_names_what_is_missing(tmp_path):
    publishable().save_pretrained(tmp_path)
    result = CliRunner().invoke(app, ["push", str(tmp_path), "org/weaver", "--licence", "mit"])
    assert isinstance(result.exception, PublishError)
    assert "--acceptance" in str(result.exception)
    assert "licence=" not in str(result.exception)
    result = CliRunner().invoke(app, ["push", str(tmp_path / "none"), "org/weaver"])
    assert result.exit_code == 2


def test_the_commands_help_has_an_example():
    result = CliRunner().invoke(app, ["push", "--help"], env={"COLUMNS": "200"})
    assert result.exit_code == 0
    assert "Example:" in result.output


# ---- the card --------------------------------------------------------------------------------------------------------


def test_a_card_says_what_it_does_not_know():
    text = make_card(card_facts(WeaverModel(WeaverConfig()), "nameless")).text
    lines = text.splitlines()
    assert "| model | not recorded |" in lines
    assert "| revision | not recorded |" in lines
    assert lines[lines.index("## Licence") + 2] == "not recorded"
    assert "Not recorded." in text[text.index("## Acceptance") : text.index("## Training")]
    assert "Command: not recorded." in text
    assert "Data: not recorded." in text
    assert "| adapter | none |" in lines


def test_a_card_tells_geometry_and_fits(tokenizer):
    weaver = publishable()
    weaver.init_adapter(adapter_config("rope", rank=24, num_heads=3))
    weaver.tree_config.adapter_temperature = {"1.0": [1.0], "0.0": [1.0]}
    facts = card_facts(weaver, "org/weaver", "mit", read_acceptance(ACCEPTANCE), tokenizer)
    text = make_card(facts).text
    for part in (
        "| model | org/target |",
        f"| revision | {REVISION} |",
        facts["tokenizer_sha256"],
        f"2 layers, {sum(p.numel() for p in weaver.drafter.parameters()):,} parameters",
        "| block, so depth | 8, 7 |",
        "| pool, depth | 40, 7 |",
        "adapter_temperature (at 0.0, 1.0)",
        "builder `weaver`",
    ):
        assert part in text


def test_a_bench_report_becomes_the_table(trio):
    model, tokenizer, weaver = trio
    results = run_bench(
        model, tokenizer, weaver, load_prompts(["math"], 1), builders=["chain"], budgets=[5], max_new_tokens=8
    )
    whole = report(results, model, {"max_new_tokens": 8, "seed": 0}, 0)
    kept = read_acceptance(whole)
    assert "results" not in kept
    text = make_card(card_facts(weaver, "x", None, kept)).text
    row = next(line for line in text.splitlines() if line.startswith("| 0.0 | chain | 5 | greedy | math | 1 |"))
    assert f"| {kept['summary'][0]['accepted_per_step']['mean']:.2f} [" in row


def test_the_embedded_weavers_card_is_what_the_facts_say(tokenizer):
    """It fails where config, record or table changed and the card did not: then write what is compared here."""
    weaver = WeaverModel.from_pretrained(WEAVER)
    facts = card_facts(weaver, "weaver_hf/tiny/weaver", "apache-2.0", ACCEPTANCE, tokenizer, WEAVER)
    facts["use"] = "from weaver_hf import load_tiny\n\nmodel, tokenizer, weaver = load_tiny()"
    assert (CARDS / "tiny-weaver.md").read_text() == str(make_card(facts))
    assert len(training_files(WEAVER)) == len(list((WEAVER / "training").iterdir()))


def test_a_trained_artifacts_folder_holds_what_the_card_reads(tmp_path):
    from test_training_drafter import TEXT, Letters, small

    from weaver_hf.training.cli import read_data
    from weaver_hf.training.data import make_data

    make_data(tiny_random_model(), Letters(), TEXT, tmp_path / "data", small(sequences=4, max_new_tokens=8))
    read = read_data([tmp_path / "data"], Letters(), random_weaver(), tmp_path / "out")
    (facts,) = read_json(tmp_path / "out" / "train_data.json")
    shards = [load_file(path) for path in sorted((tmp_path / "data").glob("*.safetensors"))]
    assert (facts["folder"], facts["sequences"]) == ("data", len(read))
    assert facts["tokens"] == sum(len(shard["tokens"]) for shard in shards)
    assert facts["settings"]["max_new_tokens"] == 8
