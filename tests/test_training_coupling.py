"""Fitting the temperatures of coupled drafts."""

from dataclasses import replace

import pytest
import torch
from support import adapter_config, random_weaver, tiny_random_model

from weaver_hf.target.families import family_of
from weaver_hf.target.taps import TapSink
from weaver_hf.training import coupling
from weaver_hf.training.coupling import fit_adapter_coupling, fit_coupling
from weaver_hf.training.data import Sequences
from weaver_hf.training.held_out import HeldOut
from weaver_hf.training.loop import TrainConfig


@pytest.fixture
def fit(monkeypatch):
    """`fit(drafted)`: with `drafted(target logits of the slots) -> drafter logits` in the drafter's place."""
    target = tiny_random_model()
    weaver = random_weaver().attach(target)
    tokens = torch.randint(0, 120, (12 * 24,), generator=torch.Generator().manual_seed(1))
    full = lambda value: torch.full((12,), value)  # noqa: E731
    data = Sequences(tokens, torch.arange(12) * 24, full(24), full(6), torch.tensor([0.0, 0.7, 1.0] * 4))
    sink = TapSink(family_of(target).decoder_of(target), weaver.config.target_layer_ids, target.device)

    def run(drafted=None, greedy=False, **kwargs):
        if drafted is not None:
            real = coupling.held_out_slots

            def slots(*args):
                for slot in real(*args):
                    yield slot._replace(logits=drafted(slot.law * slot.temperature))

            monkeypatch.setattr(coupling, "held_out_slots", slots)
        config = TrainConfig(held_out=12, batch_size=5, width=24)
        text = replace(data, temperatures=torch.zeros(12)) if greedy else data
        result = fit_coupling(HeldOut(target, weaver, sink, text, config, 126), **kwargs)
        monkeypatch.undo()
        return result

    return run


def test_a_value_for_each_depth_and_temperature(fit):
    fitted = fit()
    assert list(fitted) == ["0.7", "1.0"]
    assert [len(row) for row in fitted.values()] == [7, 7]
    assert fitted == fit()


def test_a_drafter_that_knows_the_target_is_trusted_and_one_that_knows_nothing_is_not(fit):
    assert set(fit(lambda logits: logits)["1.0"]) == {round(float(coupling.GRID[0]), 4)}
    noisy = lambda scale: lambda logits: logits + scale * torch.randn(logits.shape, generator=torch.Generator().manual_seed(3))  # noqa: E731  # fmt: skip
    close, far = (fit(noisy(scale), temperatures=[1.0])["1.0"] for scale in (0.3, 3.0))
    assert all(a < b for a, b in zip(close, far))


def test_greedy_text_alone_fits_nothing(fit):
    """It is found out at the end of a training run, which must not fail by it."""
    assert fit(greedy=True) == {}


def test_an_untrained_adapter_is_trusted_as_the_drafter_inside_its_pool_is():
    target = tiny_random_model()
    weaver = random_weaver().init_adapter(adapter_config(pool_size=128)).attach(target)
    tokens = torch.randint(0, 120, (12 * 24,), generator=torch.Generator().manual_seed(1))
    full = lambda value: torch.full((12,), value)  # noqa: E731
    data = Sequences(tokens, torch.arange(12) * 24, full(24), full(6), torch.tensor([0.0, 0.7, 1.0] * 4))
    sink = TapSink(family_of(target).decoder_of(target), weaver.config.target_layer_ids, target.device)
    given = HeldOut(target, weaver, sink, data, TrainConfig(held_out=12, batch_size=5, width=24), 126)
    assert fit_adapter_coupling(given) == fit_coupling(given), "the pool is the vocabulary"
    with torch.no_grad():
        weaver.adapter.lm_head_query_in.weight.normal_(std=2.0)
    assert fit_adapter_coupling(given) != fit_coupling(given)
