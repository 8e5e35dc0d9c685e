"""Scores: processors on all nodes at once against one row at a time, and what a drafter makes of its logits."""

import pytest
import torch
from transformers import (
    EpsilonLogitsWarper,
    EtaLogitsWarper,
    LogitNormalization,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    SuppressTokensLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)
from transformers.generation import InfNanRemoveLogitsProcessor, TopHLogitsWarper
from transformers.generation import logits_process as stock

from weaver_hf.noise import gumbel
from weaver_hf.scoring import (
    _STATELESS,
    DraftRule,
    candidate_log_probs,
    drafter_processors,
    is_stateless,
    known_warpers,
    process_nodes,
)

KNOWN = [
    TemperatureLogitsWarper(0.7),
    TopKLogitsWarper(11),
    TopPLogitsWarper(0.8),
    MinPLogitsWarper(0.05),
    TopHLogitsWarper(0.4),
    TypicalLogitsWarper(0.6),
    EpsilonLogitsWarper(0.01),
    EtaLogitsWarper(0.02),
    SuppressTokensLogitsProcessor([3, 5]),
    InfNanRemoveLogitsProcessor(),
    LogitNormalization(),
]
SEQUENCES = torch.zeros(1, 4, dtype=torch.long)


def logits(nodes=17, vocab=133):
    x = torch.randn(1, nodes, vocab, generator=torch.Generator().manual_seed(2)) * 3
    x[0, 1, :40] = x[0, 1, 0]  # ties
    x[0, 2, 5:] = -float("inf")
    return x


def test_every_known_processor_is_tested_below():
    assert {type(processor) for processor in KNOWN} == set(_STATELESS)


@pytest.mark.parametrize(
    "processors", [[p] for p in KNOWN] + [KNOWN[:4], [KNOWN[0], KNOWN[5], KNOWN[8], KNOWN[10]]], ids=lambda p: "+".join(type(x).__name__ for x in p)
)  # fmt: skip
def test_all_nodes_at_once_equal_one_row_at_a_time_bit_for_bit(processors):
    together = process_nodes(processors, SEQUENCES, logits())
    for node, row in enumerate(logits()[0]):
        alone = row[None]
        for processor in processors:
            alone = processor(SEQUENCES, alone)
        assert torch.equal(together[0, node], alone[0])


def test_logits_are_scored_in_fp32_and_left_alone():
    raw = logits().bfloat16()
    before = raw.clone()
    assert process_nodes(KNOWN[:3], SEQUENCES, raw).dtype == torch.float32
    assert torch.equal(raw, before)


class OwnTopK(TopKLogitsWarper):
    """May read anything."""


@pytest.mark.parametrize("other", [RepetitionPenaltyLogitsProcessor(1.2), OwnTopK(3), lambda ids, scores: scores])
def test_one_unknown_processor_makes_the_list_sequential(other):
    assert is_stateless(KNOWN)
    assert not is_stateless([*KNOWN, other])


def test_a_drafter_takes_the_filters_alone():
    taken = drafter_processors([RepetitionPenaltyLogitsProcessor(1.2), *KNOWN, OwnTopK(3)])
    assert [type(p) for p in taken] == [type(p) for p in KNOWN[1:8]]


def test_without_noise_they_are_the_log_softmax_at_the_draft_temperature():
    temperatures = torch.linspace(0.5, 2, 17)[:, None]
    torch.testing.assert_close(
        candidate_log_probs(logits(), temperatures).exp(), (logits() / temperatures).softmax(-1)
    )  # fmt: skip
    filtered = candidate_log_probs(logits(), temperatures, [TopKLogitsWarper(4)])
    assert (filtered[0, 5].isfinite().sum(), filtered[0, 5].exp().sum()) == (4, pytest.approx(1.0))


@pytest.mark.parametrize("tau", [0.1, 1.0, 3.0])
def test_a_coupled_drafter_with_the_targets_own_law_guesses_every_draw(tau):
    noise = gumbel(torch.tensor([5]), torch.arange(17)[None], 133)
    processors = [TopPLogitsWarper(0.9)]
    draws = (process_nodes([TemperatureLogitsWarper(0.7), *processors], SEQUENCES, logits()) + noise).argmax(-1)
    guesses = candidate_log_probs(logits(), torch.tensor(0.7), processors, noise, torch.tensor(tau))
    assert torch.equal(guesses.argmax(-1), draws)
    assert len(draws.unique()) > 10


def test_a_larger_tau_is_less_sure():
    noise = gumbel(torch.tensor([5]), torch.arange(17)[None], 133)
    best = [
        candidate_log_probs(logits(), torch.tensor(1.0), (), noise, torch.tensor(tau)).amax(-1)
        for tau in (0.3, 1.0, 3.0)
    ]
    assert (best[0] > best[1]).all()
    assert (best[1] > best[2]).all()


def test_a_rule_uploads_its_temperatures_once(monkeypatch):
    """An upload waits for the device; the adapter's rule is asked in every round of a tree's growth."""
    made = []
    upload = torch.tensor
    monkeypatch.setattr(torch, "tensor", lambda *args, **kwargs: made.append(args) or upload(*args, **kwargs))
    rule = DraftRule([0.5] * 17, [2.0] * 17)
    depths = torch.arange(3)[None]
    first = rule.log_probs(logits())
    assert len(made) == 1
    torch.testing.assert_close(rule.log_probs(logits()[:, :3], depths=depths), first[:, :3])
    assert len(made) == 1


def test_the_warpers_that_the_acceptance_kernel_knows_become_its_arguments_and_no_others():
    heat, top_k, top_p, min_p = (
        stock.TemperatureLogitsWarper(0.7),
        stock.TopKLogitsWarper(5),
        stock.TopPLogitsWarper(0.9),
        stock.MinPLogitsWarper(0.1),
    )
    assert known_warpers([]) == {}
    arguments = {"temperature": 0.7, "top_k": 5, "top_p": 0.9, "min_p": 0.1}
    assert known_warpers([heat, top_k, top_p, min_p]) == arguments
    for others in ([top_k, heat], [top_k, top_k], [stock.TopKLogitsWarper(5, min_tokens_to_keep=9)]):
        assert known_warpers(others) is None
    assert known_warpers([heat, stock.TypicalLogitsWarper(0.9)]) is None
