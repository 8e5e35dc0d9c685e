"""Tap states: the right layers, the right rows, chunked prefill, and that a wrong tap is seen."""

import pytest
import torch
from support import OracleBuilder, prompt_ids, stock_output, tiny_random_model

from weaver_hf import WeaverConfig, WeaverModel
from weaver_hf.errors import CheckpointError
from weaver_hf.proposal import BUILDERS
from weaver_hf.target.taps import TapSink

TAPS = [0, 2]


def generate_with_taps(monkeypatch, taps, **kwargs):
    """Tokens, and the tap states a builder was given over one call, as `[rows, n * H]` and `[rows, H]`."""
    model, ids = tiny_random_model(), prompt_ids(11)
    text = model.generate(ids, max_new_tokens=24, do_sample=False)[0].tolist()
    builder = OracleBuilder(text, nodes=9, hit=0.7)
    monkeypatch.setitem(BUILDERS, "oracle", lambda budget: builder)
    weaver = WeaverModel(WeaverConfig(target_layer_ids=taps, tree_config={"builder": "oracle"})).attach(model)
    out = model.generate(ids, max_new_tokens=24, do_sample=False, assistant_model=weaver, **kwargs)
    assert out[0].tolist() == text
    assert weaver.stats.tokens_per_step > 1.3, "accepted branches must be among what is checked"
    taken = [context.taps for context in builder.contexts]
    return out, torch.cat([t.features[0] for t in taken]), torch.cat([t.final_hidden[0] for t in taken])


def stock_states(ids, taps):
    """The same from a full capture of stock transformers: tap `t` is `hidden_states[t + 1]`, the last is post-norm."""
    with torch.no_grad():
        states = tiny_random_model()(ids, output_hidden_states=True).hidden_states
    return torch.cat([states[t + 1][0] for t in taps], -1), states[-1][0]


@pytest.mark.parametrize("kwargs", [{}, {"prefill_chunk_size": 4}], ids=["whole-prefill", "chunked-prefill"])
def test_a_drafter_sees_each_committed_row_once_with_the_states_of_a_stock_forward(monkeypatch, kwargs):
    out, features, final = generate_with_taps(monkeypatch, TAPS, **kwargs)
    expected_features, expected_final = stock_states(out, TAPS)
    rows = len(features)
    assert 11 < rows < out.shape[1], "the last step's rows have no draft after them"
    torch.testing.assert_close(features, expected_features[:rows], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(final, expected_final[:rows], atol=1e-4, rtol=1e-4)


def test_a_tap_off_by_one_is_seen_although_the_output_stays_lossless(monkeypatch):
    out, features, _ = generate_with_taps(monkeypatch, [tap + 1 for tap in TAPS][:1] + TAPS[1:])
    expected, _ = stock_states(out, TAPS)
    wrong, right = features.chunk(2, -1)
    expected_wrong, expected_right = (e[: len(features)] for e in expected.chunk(2, -1))
    torch.testing.assert_close(right, expected_right, atol=1e-4, rtol=1e-4)
    assert (wrong - expected_wrong).norm() > 0.1 * expected_wrong.norm()


def test_a_forward_of_someone_else_is_not_taken():
    model = tiny_random_model()
    sink = TapSink(model.model, TAPS, torch.device("cpu"))
    with torch.no_grad():
        with sink.listening():
            model(prompt_ids(3))
        model(prompt_ids(5))
    states = sink.take()
    assert states.features.shape == (1, 3, 128)
    assert states.final_hidden.shape == (1, 3, 64)


def test_selected_rows_follow_the_path():
    model = tiny_random_model()
    sink = TapSink(model.model, TAPS, torch.device("cpu"))
    with torch.no_grad(), sink.listening():
        model(prompt_ids(6))
    states = sink.take()
    chosen = states.select(torch.tensor([[0, 4]]))
    assert torch.equal(chosen.features, states.features[:, [0, 4]])
    assert torch.equal(chosen.final_hidden, states.final_hidden[:, [0, 4]])


@pytest.mark.parametrize("taps", [[-1], [3], [0, 99]])
def test_taps_outside_the_target_or_at_its_last_layer_are_refused(taps):
    with pytest.raises(CheckpointError, match="ids from 0 to 2"):
        WeaverModel(WeaverConfig(target_layer_ids=taps)).attach(tiny_random_model())


def test_taps_of_the_embedded_target_equal_a_stock_forward(trio, monkeypatch):
    model, _, _ = trio
    text, _ = stock_output(0, 64)
    prompt = len(text) - 40
    builder = OracleBuilder(text, nodes=6, hit=0.8, vocab=8192)
    monkeypatch.setitem(BUILDERS, "oracle", lambda budget: builder)
    weaver = WeaverModel(WeaverConfig(target_layer_ids=[1, 3, 5, 6], tree_config={"builder": "oracle"})).attach(model)
    try:
        ids = torch.tensor([text[:prompt]])
        out = model.generate(ids, max_new_tokens=30, do_sample=False, assistant_model=weaver)
    finally:
        weaver.detach()
    features = torch.cat([context.taps.features[0] for context in builder.contexts])
    with torch.no_grad():
        states = model(out, output_hidden_states=True).hidden_states
    expected = torch.cat([states[t + 1][0] for t in [1, 3, 5, 6]], -1)[: len(features)]
    assert (features - expected).norm() < 1e-4 * expected.norm()
