"""`doctor`: faults planted in the embedded trio are found by their names; the trio itself is healthy."""

import copy
import json

import pytest
import torch
from safetensors.torch import load_file

from weaver_hf import WeaverConfig, WeaverModel, load_tiny, probe
from weaver_hf.configuration_weaver import AdapterConfig
from weaver_hf.doctor import (
    Case,
    Finding,
    Report,
    check_adapter,
    check_drafter,
    check_path,
    check_setup,
    check_shape,
    check_target,
    check_template,
    check_tokenizer,
    check_weights,
    examine,
    record,
)
from weaver_hf.drafter import BlockDrafter
from weaver_hf.errors import CheckpointError
from weaver_hf.probe import Probe, questions, write_text
from weaver_hf.tiny import WEAVER
from weaver_hf.training.data import Sequences


@pytest.fixture(scope="module")
def shared():
    """Target, tokenizer, the text that all tests share, and the target's passes over it."""
    target, tokenizer, weaver = load_tiny()
    weaver.detach()
    text = write_text(target, questions(tokenizer), max_new_tokens=48)
    longest = (text.lengths - text.prompt_lengths).argsort(descending=True)[:18]
    fields = (text.offsets, text.lengths, text.prompt_lengths, text.temperatures)
    text = Sequences(text.tokens, *(values[longest] for values in fields))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(probe, "BLOCKS", 3)
        passes = Probe(target, weaver, text).passes
    return target, tokenizer, text, passes


@pytest.fixture
def case_of(shared, monkeypatch):
    """The case of a Weaver beside the embedded target, with fewer wrong answers to choose from than in real life; the
    examination of the healthy trio has them all."""
    monkeypatch.setattr(probe, "ROPE_BASES", (1e4,))
    monkeypatch.setattr(probe, "MOST_MASKS", 2)

    def make(weaver, **changes):
        case = Case(
            **{"target": shared[0], "tokenizer": shared[1], "weaver": weaver, "given_text": shared[2], **changes}
        )
        if case.fits and "target" not in changes:
            case.probe.__dict__["passes"] = shared[3]
        return case

    return make


def embedded(**changes) -> WeaverModel:
    """The embedded Weaver's weights under a config that says something else."""
    declared = json.loads((WEAVER / "config.json").read_text())
    weaver = WeaverModel(WeaverConfig(**{**declared, **changes}))
    weaver.load_state_dict(load_file(WEAVER / "model.safetensors"))
    return weaver.eval()


def named(findings, *statuses):
    return {finding.name for finding in findings if finding.status in (statuses or ("warn", "fault"))}


WRONGLY_DECLARED = {
    "taps": {"target_layer_ids": [0, 2, 4, 5]},
    "mask_token": {"mask_token_id": 0},
    "causality": {"is_causal": True},
    "window": {"layer_types": ["sliding_attention"] * 3, "sliding_window": 4},
    "rope": {"rope_theta": 1e7},
}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.slow] * (name in ("window", "rope", "causality")))
        for name in WRONGLY_DECLARED
    ],
)
def test_what_is_declared_wrongly_is_named_with_the_line_that_corrects_it(case_of, name):
    case = case_of(embedded(**WRONGLY_DECLARED[name]))
    faults = [finding for finding in check_setup(case) if finding.status == "fault"]
    assert [finding.name for finding in faults] == [name]
    key = next(iter(WRONGLY_DECLARED[name]))
    right = json.loads((WEAVER / "config.json").read_text())[key]
    assert json.dumps({key: right if right is not None else False})[1:-1].replace("10000.0", "10000") in faults[0].fix
    assert case.probe.scores(case.repaired).mean > case.probe.scores(case.probe.declared).mean


@pytest.mark.parametrize("shift", [pytest.param(-1, marks=pytest.mark.slow), 1])
def test_a_drafter_whose_slots_predict_a_neighbour_is_found(case_of, monkeypatch, shift):
    forward = BlockDrafter.forward
    monkeypatch.setattr(BlockDrafter, "forward", lambda *args: forward(*args).roll(-shift, 2))
    faults = [finding for finding in check_setup(case_of(embedded())) if finding.status == "fault"]
    assert [fault.name for fault in faults] == ["alignment"]
    assert ("next" if shift > 0 else "previous") in faults[0].found


@pytest.mark.slow
def test_two_faults_are_found_one_after_the_other(case_of):
    case = case_of(embedded(mask_token_id=0, is_causal=True))
    assert {name for name, _, _ in case.repairs} == {"mask_token", "causality"}
    assert (case.repaired.mask, case.repaired.causal) == (3, (False,) * 3)


@pytest.mark.slow
def test_a_drafter_that_overflows_in_the_targets_dtype_is_found(case_of, shared):
    weaver = embedded()
    with torch.no_grad():
        weaver.drafter.fc.weight.mul_(2e4)  # its output is normed: the same drafter in fp32
    target = copy.deepcopy(shared[0]).half()
    case = case_of(weaver.half(), target=target)
    assert [name for name, _, _ in case.repairs] == ["dtype"]
    assert "float16" in check_setup(case)[0].found


def test_a_drafter_of_another_target_is_found(case_of):
    weaver = WeaverModel(embedded().config).eval()
    findings = check_drafter(case_of(weaver))
    assert named(findings, "fault") == {"drafter"}
    assert "right first tokens" in findings[0].found


@pytest.mark.slow
def test_a_fine_tuned_target_is_allowed_with_the_acceptance_that_was_measured(case_of, shared):
    target = copy.deepcopy(shared[0])
    with torch.no_grad():
        for parameter in target.parameters():
            parameter.add_(0.01 * parameter.std() * torch.randn_like(parameter))
    findings = check_target(case_of(embedded(), target=target))
    assert [(finding.name, finding.status) for finding in findings] == [("target", "warn")]
    assert "accepted a step" in findings[0].found


def test_the_target_that_the_artifact_names_is_compared_where_it_records_no_weights(case_of):
    weaver = embedded(probe=None, base_model_name_or_path="Qwen/Qwen3.5-4B")
    weaver.drafter = None
    (finding,) = check_target(case_of(weaver))
    assert finding.status == "warn"
    assert "Qwen/Qwen3.5-4B" in finding.expected


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("vocabulary", {"vocab_size": 8193}),
        ("mask_token", {"mask_token_id": 8192}),
        ("taps", {"target_layer_ids": [2, 4, 6, 7]}),
        ("target", {"num_target_layers": 9}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_sizes_that_do_not_fit_are_named(case_of, name, changes):
    weaver = WeaverModel(WeaverConfig(**{**embedded().config.to_dict(), **changes}))
    assert named(check_shape(case_of(weaver)), "fault") == {name}


def test_weights_that_are_no_numbers_are_named_and_not_run(case_of):
    weaver = embedded()
    with torch.no_grad():
        weaver.drafter.layers[1].mlp.up_proj.weight[3, 5] = torch.nan
    case = case_of(weaver)
    (finding,) = check_weights(case)
    assert finding.status == "fault"
    assert "drafter.layers.1.mlp.up_proj.weight" in finding.found
    assert check_setup(case) == check_drafter(case) == []


def other_vocabulary(tokenizer):
    """Two tokens change their ids: the size stays."""
    state = json.loads(tokenizer.backend_tokenizer.to_str())
    vocabulary = state["model"]["vocab"]
    first, second = [token for token, index in vocabulary.items() if index in (4000, 4001)]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    other = copy.deepcopy(tokenizer)
    other._tokenizer = type(tokenizer.backend_tokenizer).from_str(json.dumps(state))
    return other


def test_a_tokenizer_with_another_mapping_is_found(case_of, shared):
    assert not named(check_tokenizer(case_of(embedded())))
    other = other_vocabulary(shared[1])
    assert len(other) == len(shared[1])
    assert named(check_tokenizer(case_of(embedded(), tokenizer=other)), "fault") == {"tokenizer"}


def with_template(tokenizer, template):
    other = copy.deepcopy(tokenizer)
    other.chat_template = template
    return other


def test_another_chat_template_is_found(case_of, shared):
    assert not named(check_template(case_of(embedded())))
    other = with_template(shared[1], shared[1].chat_template.replace("<|im_start|>", "### "))
    assert named(check_template(case_of(embedded(), tokenizer=other)), "fault") == {"template"}


def test_another_thinking_mode_is_found_by_the_record(case_of, shared):
    template = shared[1].chat_template
    thinks = "{% if enable_thinking is not defined or enable_thinking %}<think>{% endif %}"
    other = with_template(shared[1], template.rstrip().removesuffix("{% endif %}") + thinks + "{% endif %}")
    findings = check_template(case_of(embedded(), tokenizer=other))
    assert [(finding.name, finding.status) for finding in findings] == [("thinking", "warn")]
    assert "enable_thinking=False" in findings[0].fix


def test_adapters_that_cannot_help_are_named(case_of):
    declared = embedded()
    declared.config.adapter_initialized = False
    untrained = embedded().init_adapter(AdapterConfig(**declared.config.adapter))
    foreign = embedded()
    with torch.no_grad():
        foreign.adapter.lm_head_query_in.weight.normal_(std=0.5)
    for weaver, word in ((declared, "only declared"), (untrained, "changes no score"), (foreign, "by the drafter's")):
        findings = check_adapter(case_of(weaver))
        assert named(findings, "fault") == {"adapter"}
        assert word in findings[0].found


@pytest.mark.parametrize("pool", [1, 300])
def test_a_pool_that_is_too_small_or_larger_than_trained_is_found(case_of, pool):
    weaver = embedded()
    weaver.tree_config.pool = pool
    assert named(check_adapter(case_of(weaver)), "fault") == {"pool"}


def test_a_forward_of_another_library_is_found_and_named(case_of, shared, monkeypatch):
    def forward(*args, **kwargs):
        raise AssertionError("never run")

    forward.__module__ = "fastlib.patches"
    mixer = shared[0].model.layers[1].linear_attn
    monkeypatch.setitem(mixer.__dict__, "forward", forward)
    (finding,) = check_path(case_of(embedded()))
    assert (finding.name, finding.status) == ("path", "fault")
    assert "Qwen3_5GatedDeltaNet" in finding.found
    assert "fastlib.patches" in finding.found


def test_the_trio_is_healthy_and_is_left_as_it_was(trio, shared, monkeypatch):
    monkeypatch.setattr(probe, "BLOCKS", 3)
    target, tokenizer, weaver = trio
    monkeypatch.setitem(weaver.config.probe, "accepted", None)  # is of the whole probe: `test_cli` runs that
    before = (weaver.stats, weaver.tree_config, weaver.training)
    report = examine(target, tokenizer, weaver, text=shared[2])
    assert report.healthy, report.findings
    assert named(report.findings) == set()
    assert {finding.name for finding in report.findings} >= {
        "weights", "vocabulary", "tokenizer", "dtype", "taps", "alignment", "mask_token", "causality", "rope", "drafter",
        "target", "template", "adapter", "pool", "path",
    }  # fmt: skip
    assert report.repaired == report.accepted
    assert weaver.target is target
    assert (weaver.stats, weaver.tree_config, weaver.training) == before


def test_what_was_measured_is_recorded_for_later_examinations(tmp_path, case_of):
    weaver = embedded(probe=None)
    weaver.save_pretrained(tmp_path)
    report = Report(accepted=1.25, identity={"weights": "a", "vocabulary": "b", "turn": "c"})
    record(report, tmp_path)
    assert WeaverModel.from_pretrained(tmp_path).config.probe == {"accepted": 1.25, **report.identity}
    case = case_of(embedded(probe={"accepted": 9.0}))
    assert named(check_drafter(case)) == {"drafter"}
    assert "9.00" in check_drafter(case)[0].expected


def test_only_a_healthy_weaver_of_our_layout_is_recorded(tmp_path):
    with pytest.raises(CheckpointError, match=r"no config\.json of a Weaver"):
        record(Report(accepted=1.0), tmp_path)
    embedded().save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match="not healthy"):
        record(Report([Finding("taps", "fault", "a")], accepted=1.0), tmp_path)
