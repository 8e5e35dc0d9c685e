"""`weaver-hf convert --to sglang | vllm`: what the engines load, and the command that starts them."""

import json
import shlex

import pytest
import torch
from support import adapter_config, random_weaver, read_json, tiny_random_model
from transformers import Qwen3Config
from typer.testing import CliRunner

from weaver_hf import WeaverModel
from weaver_hf.cli import app
from weaver_hf.errors import CheckpointError


def convert(*arguments):
    return CliRunner().invoke(app, ["convert", *map(str, arguments)])


def options_of(result):
    """The printed command, as a shell would split it."""
    assert result.exit_code == 0, result.exception
    words = shlex.split(
        result.output[result.output.index("\n", result.output.index("written to")) :].replace("\\\n", "")
    )
    first = next(i for i, word in enumerate(words) if word.startswith("--"))
    switches, values = words[first:], {}
    for i, word in enumerate(switches):
        if word.startswith("--"):
            follows = switches[i + 1] if i + 1 < len(switches) else "--"
            values[word] = None if follows.startswith("--") else follows
    return " ".join(words[:first]), values


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    folder = tmp_path_factory.mktemp("a target")  # a name that a shell must have quoted
    model = tiny_random_model()
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(folder)
    return folder


@pytest.fixture
def source(tmp_path):
    def save(adapter=True, **overrides):
        weaver = random_weaver(**overrides)
        if adapter:
            weaver.init_adapter(adapter_config())
        weaver.save_pretrained(tmp_path / "source")
        return weaver, tmp_path / "source"

    return save


def test_sglang_gets_drafter_adapter_and_the_forks_command(source, target, tmp_path):
    weaver, folder = source()
    program, options = options_of(convert(folder, tmp_path / "out", "--to", "sglang", "--target", target))
    assert program == "python3 -m sglang.launch_server"
    assert options["--model-path"] == str(target)
    assert options["--speculative-algorithm"] == "DFLASH_TFM"
    assert options["--disable-overlap-schedule"] is None
    paths = options["--speculative-draft-model-path"], options["--speculative-dflash-tfm-path"]
    loaded = WeaverModel.from_pretrained(paths[0], adapter=paths[1])
    ours, theirs = weaver.state_dict(), loaded.state_dict()
    assert sorted(ours) == sorted(theirs)
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    limit = read_json(target / "config.json")["max_position_embeddings"]
    assert read_json(tmp_path / "out" / "drafter" / "config.json")["max_position_embeddings"] == limit


def test_sglang_gets_a_chain_command_for_a_drafter_alone(source, target, tmp_path):
    weaver, folder = source(adapter=False)
    _, options = options_of(convert(folder, tmp_path / "out", "--to", "sglang", "--target", target))
    assert options["--speculative-algorithm"] == "DFLASH"
    assert options["--speculative-num-draft-tokens"] == str(weaver.config.block_size)
    assert options["--mamba-scheduler-strategy"] == "extra_buffer", "the target is a hybrid"
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["drafter"]


SLIDING = {"layer_types": ["sliding_attention"] * 2, "sliding_window": 9}
MIXED = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 9}


@pytest.mark.parametrize(
    ("overrides", "non_causal"),
    [
        ({}, True),
        (SLIDING, False),
        ({**SLIDING, "is_causal": False}, True),
        ({**MIXED, "is_causal": False}, True),
        (MIXED, None),
        ({"is_causal": True}, None),
    ],
    ids=["full", "sliding", "sliding-both-ways", "mixed-both-ways", "mixed", "causal"],
)
def test_vllm_gets_the_layout_from_which_it_runs_each_layer_as_trained(source, target, tmp_path, overrides, non_causal):
    # vLLM: `dflash_config.causal = not sliding_window_non_causal` for every layer of a speculators folder; of a z-lab
    # folder `is_causal`, or else the layer's type.
    weaver, folder = source(**overrides)
    result = convert(folder, tmp_path / "out", "--to", "vllm", "--target", target)
    program, options = options_of(result)
    assert program == f"vllm serve {target}"
    settings = json.loads(options["--speculative-config"])
    assert settings == {
        "method": "dflash", "model": str(tmp_path / "out"), "num_speculative_tokens": weaver.config.block_size - 1,
    }  # fmt: skip
    assert "The adapter is no part" in result.output
    described = read_json(tmp_path / "out" / "config.json")
    if non_causal is None:
        assert "speculators_model_type" not in described
        assert described.get("is_causal") == overrides.get("is_causal")
    else:
        assert described["sliding_window_non_causal"] is non_causal
        verifier = described["speculators_config"]["verifier"]
        assert verifier == {"name_or_path": str(target), "architectures": ["Qwen3_5ForCausalLM"]}
    inputs = {
        "noise_embeds": torch.randn(1, weaver.config.block_size, weaver.config.hidden_size),
        "context_hidden_states": torch.randn(1, 21, weaver.config.hidden_size * len(weaver.config.target_layer_ids)),
        "position_ids": torch.arange(21 + weaver.config.block_size)[None],
    }
    with torch.no_grad():
        again = WeaverModel.from_pretrained(tmp_path / "out")
        assert torch.equal(again(**inputs).last_hidden_state, weaver(**inputs).last_hidden_state)


def test_the_target_that_the_artifact_names_is_the_default(source, target, tmp_path):
    _, folder = source(base_model_name_or_path=str(target))
    program, _ = options_of(convert(folder, tmp_path / "out", "--to", "vllm"))
    assert program == f"vllm serve {target}"


def test_engines_need_a_target_that_fits(source, target, tmp_path):
    _, folder = source()
    result = convert(folder, tmp_path / "out", "--to", "vllm")
    assert isinstance(result.exception, CheckpointError)
    assert "--target" in str(result.exception)
    Qwen3Config(vocab_size=128, hidden_size=32).save_pretrained(tmp_path / "other")
    result = convert(folder, tmp_path / "out", "--to", "sglang", "--target", tmp_path / "other")
    assert isinstance(result.exception, CheckpointError)
    assert "hidden_size" in str(result.exception)
    (tmp_path / "strange").mkdir()
    (tmp_path / "strange" / "config.json").write_text('{"model_type": "abacus"}')
    result = convert(folder, tmp_path / "out", "--to", "vllm", "--target", tmp_path / "strange")
    assert "abacus" in str(result.exception)
    assert not (tmp_path / "out").exists()
    result = convert(folder, tmp_path / "out", "--to", "zlab", "--target", target)
    assert result.exit_code == 2
    assert "names no target" in " ".join(result.output.replace("│", " ").split())
