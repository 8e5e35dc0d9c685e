"""The drafter's training pass: anchors, labels, weights, losses, and that training sees what decoding sees."""

import pytest
import torch
from support import prompt_ids, random_weaver, tiny_random_model

from weaver_hf.drafter import DrafterContext
from weaver_hf.scoring import DraftRule
from weaver_hf.target.taps import TapSink
from weaver_hf.training.blocks import (
    BlockBatch,
    BlockNetwork,
    LossConfig,
    accepted_tokens,
    block_loss,
    make_blocks,
    run_blocks,
    sample_anchors,
    slot_weights,
    target_pass,
)

CPU = torch.device("cpu")


def test_anchors_are_generated_tokens_with_a_token_after_them():
    lengths, prompts = torch.tensor([20, 12, 9]), torch.tensor([5, 10, 9])
    anchors, valid = sample_anchors(lengths, prompts, 500)
    assert anchors[0].unique().tolist() == list(range(5, 19))
    assert anchors[1].unique().tolist() == [10]
    assert valid.all(1).tolist() == [True, True, False], "a text without a completion has no anchor"


def test_slot_k_is_labelled_with_the_token_at_its_own_position():
    ids = torch.arange(100, 120)[None]
    blocks = make_blocks(ids, torch.tensor([20]), torch.tensor([[3, 17]]), torch.ones(1, 2, dtype=torch.bool), depths=4)
    assert blocks.labels[0, 0].tolist() == [104, 105, 106, 107]
    assert blocks.labels[0, 1, :2].tolist() == [118, 119]
    assert blocks.weights.tolist() == [[[1, 1, 1, 1], [1, 1, 0, 0]]]


def test_training_computes_the_hidden_states_that_decoding_computes():
    """One pass over many anchors equals what the drafter drafts at each of them during decoding."""
    model, weaver = tiny_random_model(), random_weaver()
    weaver.attach(model)
    ids = prompt_ids(30)
    sink = TapSink(model.model, [0, 2], CPU)
    features = target_pass(model, sink, ids)[0].features
    anchors = torch.tensor([[4, 11, 22]])
    with torch.no_grad():
        hidden = run_blocks(
            BlockNetwork(weaver.drafter), model.get_input_embeddings(), 125, features, ids, anchors, depths=7
        )
    for i, anchor in enumerate(anchors[0].tolist()):
        context = DrafterContext([])
        context.append(weaver.drafter.context_rows(features[:, :anchor], torch.arange(anchor)[None]))
        block = weaver.draft(ids[:, anchor : anchor + 1], context, DraftRule([1.0] * 7), pool=5)
        torch.testing.assert_close(block.hidden[0], hidden[0, i], atol=1e-4, rtol=1e-4)
        logits = model.get_output_embeddings()(hidden[0, i])
        assert block.token_ids[0, :, 0].tolist() == logits.argmax(-1).tolist()
        torch.testing.assert_close(block.log_probs[0], logits.log_softmax(-1).topk(5).values, atol=1e-4, rtol=1e-4)


def test_draft_temperatures_flatten_each_depths_distribution():
    model, weaver = tiny_random_model(), random_weaver()
    weaver.attach(model)
    context = DrafterContext([])
    context.append(weaver.drafter.context_rows(torch.randn(1, 5, 128), torch.arange(5)[None]))
    anchors = torch.tensor([[3]])
    plain, warm = (weaver.draft(anchors, context, DraftRule([t] * 7), pool=128) for t in (1.0, 2.0))
    assert torch.equal(plain.logits, warm.logits)
    torch.testing.assert_close(warm.log_probs, (plain.logits / 2).log_softmax(-1), atol=1e-5, rtol=1e-5)


def some_blocks(batch=2, anchors=3, depths=4, vocab=11):
    torch.manual_seed(1)
    length = 12
    ids = torch.randint(0, vocab, (batch, length))
    places = torch.randint(0, length - depths - 1, (batch, anchors))
    blocks = make_blocks(
        ids, torch.full((batch,), length), places, torch.ones(batch, anchors, dtype=torch.bool), depths
    )
    return torch.randn(batch, anchors, depths, vocab), torch.randn(batch, length, vocab), blocks


def test_the_hard_loss_is_the_decayed_cross_entropy_of_the_drawn_tokens():
    logits, target, blocks = some_blocks()
    loss = block_loss(logits, target, blocks, torch.ones(2), LossConfig(soft=0.0, gamma=3.0))
    weights = torch.exp(-torch.arange(4) / 3.0).expand(2, 3, 4)
    ce = torch.nn.functional.cross_entropy(logits.flatten(0, 2), blocks.labels.flatten(), reduction="none").view(
        2, 3, 4
    )
    torch.testing.assert_close(loss, (weights * ce).sum() / weights.sum())


def test_the_soft_loss_is_least_where_the_drafter_equals_the_target():
    _, target, blocks = some_blocks()
    temperatures = torch.tensor([1.0, 0.5])
    rows = torch.arange(2)[:, None, None]
    before = blocks.anchors[..., None] + torch.arange(4)
    perfect = target[rows, before] / temperatures[:, None, None, None]
    config = LossConfig()
    best = block_loss(perfect, target, blocks, temperatures, config)
    assert best < block_loss(perfect + 0.3 * torch.randn_like(perfect), target, blocks, temperatures, config)
    p = perfect.softmax(-1)
    weights = slot_weights(torch.zeros(2, 3, 4), blocks.weights, config)
    entropy = -(p * p.log()).sum(-1)
    torch.testing.assert_close(best, (weights * entropy).sum() / weights.sum())


def test_greedy_text_is_trained_towards_its_tokens_whatever_the_share():
    logits, target, blocks = some_blocks()
    losses = [block_loss(logits, target, blocks, torch.zeros(2), LossConfig(soft=s)) for s in (0.0, 1.0)]
    torch.testing.assert_close(*losses)


def test_slots_past_the_end_have_no_weight():
    logits, target, blocks = some_blocks()
    cut = blocks._replace(weights=blocks.weights.clone())
    cut.weights[:, :, 2:] = 0
    changed = logits.clone()
    changed[:, :, 2:] += 5 * torch.randn_like(changed[:, :, 2:])
    for weighting in ("decay", "dpace"):
        config = LossConfig(weighting=weighting)
        assert torch.equal(
            block_loss(logits, target, cut, torch.ones(2), config),
            block_loss(changed, target, cut, torch.ones(2), config),
        )


def test_dpace_weighs_a_slot_by_the_chance_that_it_and_later_ones_are_reached():
    negative_log_q = -torch.tensor([0.5, 0.1, 0.9]).log()
    valid = torch.tensor([1.0, 1.0, 1.0])
    q = [0.5 * p + 0.5 for p in (0.5, 0.1, 0.9)]
    reach = [q[0], q[0] * q[1], q[0] * q[1] * q[2]]
    expected = torch.tensor([sum(reach), sum(reach[1:]), reach[2]])
    torch.testing.assert_close(slot_weights(negative_log_q, valid, LossConfig(weighting="dpace")), expected)
    with pytest.raises(ValueError, match="'decay' or 'dpace'"):
        slot_weights(negative_log_q, valid, LossConfig(weighting="flat"))


def test_accepted_tokens_are_the_prefix_of_the_text_that_a_tree_holds():
    labels = torch.tensor([[[1, 2, 3], [4, 5, 6]]])
    blocks = BlockBatch(torch.zeros(1, 2, dtype=torch.long), labels, torch.ones(1, 2, 3))
    logits = torch.zeros(1, 2, 3, 9)
    logits[0, 0, 0, 1] = logits[0, 0, 1, 2] = logits[0, 0, 2, 8] = 9.0  # right, right, wrong
    logits[0, 1, 0, 7] = 9.0  # wrong at once, the right one second
    logits[0, 1, 0, 4] = 8.0
    logits[0, 1, 1, 5] = 9.0
    chain, _ = accepted_tokens(logits, blocks, None)
    assert chain.tolist() == [2, 0]
    tree, expected = accepted_tokens(logits, blocks, 6)
    assert tree[1] >= 2, "a tree holds the second choice too"
    assert (expected > 0).all()
