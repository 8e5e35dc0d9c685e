"""`certify`: a text written with trees is replayed in stock code; every planted fault of a commit is found."""

import json
from dataclasses import replace

import pytest
import torch

from weaver_hf.bench import load_prompts
from weaver_hf.certify import Text, TextError, certify, read_texts, replay, write_texts
from weaver_hf.errors import EmptyPromptError
from weaver_kernels import reference

TOKENS = 16


@pytest.fixture(scope="module")
def prompts(trio):
    tokenizer = trio[1]
    return [tokenizer(prompt.prompt).input_ids for prompt in load_prompts(["gsm8k"], 1)]


@pytest.fixture(scope="module")
def texts(trio, prompts):
    model, _, weaver = trio
    return write_texts(model, weaver, prompts, TOKENS)


def test_the_embedded_trio_writes_stocks_own_text(trio, texts):
    certificate = certify(trio[0], texts)
    assert certificate.identical
    assert certificate.sound
    assert all(0 < entry.drift < 1e-4 for entry in certificate.replays)
    assert 0 < certificate.as_dict()["stock_drift"] < 1e-4
    assert certificate.as_dict()["stock_differences"] == 0


def wrong_length(path, lengths):
    return path, lengths - 1


def wrong_node(path, lengths):
    return path.roll(1, -1), lengths


FAULTS = {
    "path-too-short": (("gated_delta_commit", "causal_conv_commit"), wrong_length),
    "state-too-short": (("gated_delta_commit",), wrong_length),
    "window-too-short": (("causal_conv_commit",), wrong_length),
    "state-along-another-path": (("gated_delta_commit",), wrong_node),
    "window-along-another-path": (("causal_conv_commit",), wrong_node),
}


def plant(monkeypatch, name, fault):
    right = getattr(reference, name)
    monkeypatch.setattr(reference, name, lambda *args: fault(right, *args))


@pytest.mark.parametrize("name", FAULTS)
def test_a_commit_along_another_path_is_found(trio, prompts, monkeypatch, name):
    functions, change = FAULTS[name]
    for function in functions:
        plant(monkeypatch, function, lambda right, old, stash, *path: right(old, stash, *change(*path)))
    assert found(trio, prompts)


def test_a_layer_that_is_not_committed_is_found(trio, prompts, monkeypatch):
    calls = [0]

    def fault(right, state, *args):
        calls[0] += 1
        return state.clone() if calls[0] % 6 == 2 else right(state, *args)  # one of the six layers

    plant(monkeypatch, "gated_delta_commit", fault)
    assert found(trio, prompts)


def test_a_window_that_does_not_move_is_found(trio, prompts, monkeypatch):
    plant(monkeypatch, "causal_conv_commit", lambda right, window, *args: window.clone())
    assert found(trio, prompts)


def test_an_ignored_decay_is_found(trio, prompts, monkeypatch):
    def fault(right, state, stash, *args):
        return right(state, stash._replace(decay=torch.zeros_like(stash.decay)), *args)

    plant(monkeypatch, "gated_delta_commit", fault)
    assert found(trio, prompts)


def test_a_state_rounded_to_bf16_is_found(trio, prompts, monkeypatch):
    plant(monkeypatch, "gated_delta_commit", lambda right, *args: right(*args).bfloat16().float())
    assert found(trio, prompts)


def test_kv_rows_from_a_wrong_slot_are_found(trio, prompts, monkeypatch):
    kv_heads = trio[0].config.num_key_value_heads

    def fault(right, x, path):
        return right(x, (path + 1) % x.shape[2] if x.shape[1] == kv_heads else path)

    plant(monkeypatch, "gather_nodes", fault)
    assert found(trio, prompts)


def test_a_fault_of_the_last_commit_alone_is_found(trio, texts):
    """No token depends on it: the cache that the call returned does."""
    assert replay(trio[0], texts[0]).sound
    stale = replace(texts[0], after=texts[0].logits[-1])
    entry = replay(trio[0], stale)
    assert not entry.sound
    assert entry.drift_at == len(texts[0].output_ids)


def found(trio, prompts):
    """Whether one of the prompts shows it, in its tokens or its logits, as far as rounding cannot explain."""
    model, _, weaver = trio
    tree_config = weaver.tree_config
    try:
        return not certify(model, write_texts(model, weaver, prompts, TOKENS)).sound
    finally:
        weaver.tree_config = tree_config


def test_a_saved_text_with_another_token_is_found_at_its_place(trio, texts, tmp_path):
    model = trio[0]
    saved = tmp_path / "texts.json"
    saved.write_text(json.dumps(certify(model, texts[:1]).as_dict()))
    (text,) = read_texts(saved)
    assert text.logits is None
    assert replay(model, text).identical
    changed = replace(text, output_ids=[*text.output_ids[:7], 300, *text.output_ids[8:]])
    entry = replay(model, changed)
    assert (entry.first, entry.sound) == (7, False)
    assert entry.gap > entry.allowed_gap


@pytest.mark.parametrize("written", ["no json", "[]", '{"texts": [{"prompt_ids": [1]}]}', '{"texts": []}'])
def test_a_file_of_another_form_is_refused(tmp_path, written):
    path = tmp_path / "texts.json"
    path.write_text(written)
    with pytest.raises(TextError, match="texts"):
        read_texts(path)


def test_empty_prompts_and_texts_are_refused(trio):
    model, _, weaver = trio
    with pytest.raises(EmptyPromptError):
        write_texts(model, weaver, [[]], 4)
    with pytest.raises(EmptyPromptError):
        replay(model, Text([1], []))
