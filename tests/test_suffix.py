"""The suffix builder: matches, merging, weights, growth."""

import math

import torch
from hypothesis import given
from hypothesis import strategies as st

from weaver_hf.proposal import DraftContext, SuffixBuilder

CPU = torch.device("cpu")


def grow(*history, budget=15):
    return SuffixBuilder(budget)(DraftContext([list(h) for h in history], None, CPU))


def chains(tree, row=0):
    """All root-to-leaf token paths without the root."""
    size = int(tree.sizes[row])
    parents = tree.parents[row, :size].tolist()
    leaves = [n for n in range(size) if n not in parents]
    return sorted(tree.token_ids[row, tree.path(leaf, row)[1:]].tolist() for leaf in leaves)


def test_text_without_a_repeated_token_gives_the_root_alone():
    tree = grow([1, 2, 3, 4])
    assert tree.num_nodes == 1
    assert tree.token_ids.tolist() == [[4]]


def test_a_repeated_suffix_drafts_what_followed_it():
    assert chains(grow([1, 2, 3, 4, 5, 9, 1, 2, 3], budget=3)) == [[4, 5, 9]]


def test_continuations_of_several_occurrences_merge_into_one_tree():
    tree = grow([7, 1, 2, 8, 9, 7, 1, 3, 8, 9, 6, 7, 1], budget=4)
    assert chains(tree) == [[2, 8], [3, 8]]


def test_a_longer_match_outweighs_a_more_recent_short_one():
    text = [1, 2, 3, 50, 9, 3, 60, 9, 1, 2, 3]
    tree = grow(text, budget=1)
    assert tree.token_ids[0, 1] == 50


def test_of_equal_matches_the_more_frequent_continuation_is_first():
    tree = grow([1, 5, 60, 2, 5, 50, 3, 5, 60, 4, 5], budget=2)
    assert tree.token_ids[0, 1] == 60
    assert tree.log_probs[0, 1] > tree.log_probs[0, 2]


def test_a_continuation_that_reaches_the_end_goes_on_with_itself():
    assert chains(grow([9, 1, 2, 1, 2], budget=7)) == [[1, 2, 1, 2, 1, 2, 1]]


def test_probabilities_leave_room_for_an_unseen_token():
    tree = grow([7, 1, 2, 8, 7, 1, 3, 8, 7, 1], budget=30)
    for parent in range(int(tree.sizes[0])):
        shares = [
            math.exp(tree.log_probs[0, child] - tree.log_probs[0, parent])
            for (p, _), child in tree.children().items()
            if p == parent
        ]
        assert sum(shares) < 1 + 1e-6
    assert tree.log_probs[0, 1].exp() < 1


def test_the_index_follows_the_text_from_call_to_call():
    builder, text = SuffixBuilder(7), [1, 2, 3, 1, 2]
    for token in [3, 9, 1, 2]:
        tree = builder(DraftContext([text], None, CPU))
        fresh = SuffixBuilder(7)(DraftContext([text], None, CPU))
        assert torch.equal(tree.token_ids, fresh.token_ids)
        text.append(token)


def test_each_row_of_a_batch_drafts_from_its_own_text():
    tree = grow([1, 2, 1], [3, 4, 3], budget=1)
    assert tree.token_ids[:, 1].tolist() == [2, 4]


@given(st.lists(st.integers(0, 3), min_size=1, max_size=60), st.integers(1, 40))
def test_trees_are_valid_and_within_budget_on_any_text(text, budget):
    tree = grow(text, budget=budget).validate()
    assert tree.num_nodes <= budget + 1
    assert tree.token_ids[0, 0] == text[-1]
    scores = tree.log_probs[0]
    assert (scores[1:-1] >= scores[2:] - 1e-6).all(), "best first: nodes come in order of their score"
