"""Losses over the pool, and the adapter's trainer end to end on small models."""

import json

import pytest
import torch
from support import adapter_config, random_weaver, tiny_random_model
from test_training_drafter import TEXT, Letters, small
from transformers import AutoTokenizer
from typer.testing import CliRunner

from weaver_hf import WeaverModel
from weaver_hf.cli import app
from weaver_hf.errors import CheckpointError
from weaver_hf.tiny import TARGET
from weaver_hf.training.adapter import (
    AdapterTrainConfig,
    PoolLossConfig,
    candidate_probabilities,
    pool_loss,
    train,
)
from weaver_hf.training.blocks import BlockBatch, make_blocks, states_before, target_probabilities
from weaver_hf.training.data import TrainingDataError, load_data, make_data

torch.manual_seed(0)


def blocks_of(batch=2, anchors=3, depths=5, vocab=11, length=23, seed=0):
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(vocab, (batch, length), generator=generator)
    places = torch.randint(1, length - depths - 1, (batch, anchors), generator=generator)
    valid = torch.ones(batch, anchors, dtype=torch.bool)
    return ids, make_blocks(ids, torch.tensor([length] * batch), places, valid, depths)


def pool_of(blocks, vocab, pool, seed=0):
    """Distinct candidates for every slot; the label is in most of them."""
    scores = torch.rand(*blocks.labels.shape, vocab, generator=torch.Generator().manual_seed(seed))
    scores.scatter_(-1, blocks.labels[..., None], 1.5)
    scores[0, 0, 1].scatter_(0, blocks.labels[0, 0, 1, None], -1.0)
    return scores.topk(pool, -1).indices


def test_the_targets_probabilities_of_candidates_are_those_of_its_whole_vocabulary():
    _, blocks = blocks_of()
    logits = torch.randn(2, 23, 11) * 3
    temperatures = torch.tensor([0.0, 0.7])
    token_ids = pool_of(blocks, 11, 4)
    whole = target_probabilities(logits, blocks, temperatures).gather(-1, token_ids)
    assert torch.allclose(candidate_probabilities(logits, blocks, token_ids, temperatures), whole, atol=1e-6)
    assert (whole.sum(-1) <= 1 + 1e-6).all()
    assert (whole.sum(-1) < 0.99).any(), "not renormalised to the pool"


@pytest.mark.parametrize("kind", ["lk", "alpha", "kl"])
def test_every_distribution_loss_is_least_where_the_adapter_says_what_the_target_does(kind):
    _, blocks = blocks_of()
    token_ids = pool_of(blocks, 11, 11)  # the pool is the vocabulary: the target's law can be met
    p = torch.randn(*token_ids.shape).softmax(-1)
    config = PoolLossConfig(kind)
    least = pool_loss(p.log(), p, token_ids, blocks, config)
    assert least.abs() < 1e-5
    for seed in range(5):
        other = p.log() + 0.5 * torch.randn(p.shape, generator=torch.Generator().manual_seed(seed))
        assert pool_loss(other, p, token_ids, blocks, config) > least + 1e-3


def test_cross_entropy_skips_what_the_pool_does_not_have():
    _, blocks = blocks_of()
    token_ids = pool_of(blocks, 11, 4)
    gold = token_ids == blocks.labels[..., None]
    assert not gold[0, 0, 1].any()
    p = torch.full(token_ids.shape, 0.2)
    logits = torch.zeros(token_ids.shape, requires_grad=True)
    pool_loss(logits, p, token_ids, blocks, PoolLossConfig("ce")).backward()
    assert (logits.grad[0, 0, 1] == 0).all()
    assert (logits.grad[0, 0, 0] != 0).all()


def test_a_slot_whose_pool_misses_the_target_teaches_nothing():
    _, blocks = blocks_of()
    token_ids = pool_of(blocks, 11, 4)
    p = torch.full(token_ids.shape, 0.2)
    p[1, 2, 3] = 0
    logits = torch.randn(token_ids.shape, requires_grad=True)
    for kind in ("lk", "alpha", "kl", "ce"):
        logits.grad = None
        pool_loss(logits, p, token_ids, blocks, PoolLossConfig(kind)).backward()
        assert (logits.grad[1, 2, 3] == 0).all(), kind
        assert logits.grad.isfinite().all(), kind


def test_later_slots_weigh_less_where_the_path_to_them_is_unlikely():
    _, blocks = blocks_of(batch=1, anchors=1)
    token_ids = pool_of(blocks, 11, 11)
    place = (token_ids == blocks.labels[..., None]).float()
    p = torch.full(token_ids.shape, 1 / 11)

    def share(middle):
        """How much the last slot weighs beside the first, where the label between them has this logit."""
        logits = torch.zeros(token_ids.shape)
        logits[0, 0, 2] = middle * place[0, 0, 2]
        logits.requires_grad_()
        pool_loss(logits, p, token_ids, blocks, PoolLossConfig("ce")).backward()
        return logits.grad[0, 0, 4].abs().sum() / logits.grad[0, 0, 0].abs().sum()

    assert share(-8.0) < 0.8 * share(8.0)


def test_an_unknown_loss_is_refused():
    _, blocks = blocks_of()
    token_ids = pool_of(blocks, 11, 4)
    with pytest.raises(ValueError, match="expected one of"):
        pool_loss(torch.zeros(token_ids.shape), torch.zeros(token_ids.shape), token_ids, blocks, PoolLossConfig("mse"))


def test_the_state_before_an_anchor_is_the_one_whose_logits_chose_it():
    final = torch.arange(2 * 9 * 3.0).view(2, 9, 3)
    taps = type("Taps", (), {"final_hidden": final})()
    states = states_before(taps, torch.tensor([[4, 8], [1, 5]]))
    assert torch.equal(states[0, 0], final[0, 3])
    assert torch.equal(states[1, 1], final[1, 4])


@pytest.fixture
def data(tmp_path):
    make_data(tiny_random_model(), Letters(), TEXT, tmp_path / "data", small(sequences=20, max_new_tokens=30))
    return load_data([tmp_path / "data"], Letters(), 8)


def test_training_moves_the_adapter_alone_and_leaves_an_artifact_that_loads(tmp_path, data):
    target, weaver = tiny_random_model(), random_weaver()
    weaver.init_adapter(adapter_config(max_depth=7, pool_size=16))
    drafter = {name: p.clone() for name, p in weaver.drafter.named_parameters()}
    config = AdapterTrainConfig(
        anchors=900,
        batch_size=6,
        anchors_per_sequence=10,
        held_out=4,
        learning_rate=3e-3,
        evaluate_every=0.0,
        loss=PoolLossConfig("kl"),
    )
    train(target, weaver, data, tmp_path / "out", config, pad=126)
    rows = [json.loads(line) for line in (tmp_path / "out" / "log.jsonl").read_text().splitlines()]
    assert rows[-1]["loss"] < rows[0]["loss"] - 0.02
    assert 0 < rows[-1]["coverage"] < 1
    assert any(name.startswith("weaver T=") for name in rows[-1])
    assert all(torch.equal(p, drafter[name]) for name, p in weaver.drafter.named_parameters()), "the drafter is frozen"
    loaded = WeaverModel.from_pretrained(tmp_path / "out")
    assert loaded.has_adapter
    assert loaded.tree_config.builder == "weaver"
    assert all(len(row) == 7 for row in loaded.tree_config.adapter_temperature.values())
    assert loaded.adapter.lm_head_query_in.weight.abs().sum() > 0


def test_a_drafter_of_another_target_is_refused_before_any_work(tmp_path, data):
    weaver = random_weaver(hidden_size=32).init_adapter(adapter_config(max_depth=7, pool_size=16))
    with pytest.raises(CheckpointError, match="hidden_size 32"):
        train(tiny_random_model(), weaver, data, tmp_path / "out", AdapterTrainConfig(), pad=126)
    assert not (tmp_path / "out").exists()


def test_blocks_without_labels_weigh_nothing():
    _, blocks = blocks_of()
    empty = BlockBatch(blocks.anchors, blocks.labels, torch.zeros_like(blocks.weights))
    token_ids = pool_of(blocks, 11, 4)
    logits = torch.randn(token_ids.shape, requires_grad=True)
    loss = pool_loss(logits, torch.full(token_ids.shape, 0.2), token_ids, empty, PoolLossConfig())
    loss.backward()
    assert loss == 0
    assert (logits.grad == 0).all()


@pytest.mark.parametrize("asked", [("--rank", "32"), ("--pool-size", "9"), ("--generation", "rope")], ids=str)
def test_a_geometry_that_is_not_that_of_the_adapter_trained_on_is_refused(tmp_path, asked):
    tiny_random_model().save_pretrained(tmp_path / "target")
    AutoTokenizer.from_pretrained(TARGET).save_pretrained(tmp_path / "target")
    random_weaver(adapter=adapter_config("learned")).save_pretrained(tmp_path / "drafter")
    command = ["train", "adapter", "--drafter", "drafter", "--data", "data", "--out", "out", "--target", "target"]
    paths = [str(tmp_path / x) if x in ("drafter", "data", "out", "target") and before.startswith("--") else x
             for before, x in zip(["", *command], command)]  # fmt: skip
    result = CliRunner().invoke(app, [*paths, *asked], env={"COLUMNS": "200"})
    assert result.exit_code == 2
    name = asked[0].removeprefix("--").replace("-", "_")
    assert f"{name} {asked[1]} beside the adapter of" in result.output
    without = CliRunner().invoke(app, paths)
    assert isinstance(without.exception, TrainingDataError), "it came past the geometry, to the data that is not there"
