"""GenerationStats: what counts as a step, what is left out of the means."""

import json
import math

import pytest
from support import random_tree

from weaver_hf import GenerationStats, TokenTree


def stats_of(runs, cut=False):
    stats = GenerationStats(prefilled=True)
    for i, run in enumerate(runs):
        stats.record(random_tree(9, "chain").pad_to(12), list(range(run)), cut=cut and i == len(runs) - 1)
    return stats


def test_means_count_the_bonus_token_or_not():
    stats = stats_of([3, 1, 2])
    assert (stats.steps, stats.new_tokens, stats.drafted_nodes) == (3, 7, 24)
    assert stats.tokens_per_step == 2
    assert stats.accepted_per_step == 1
    assert stats.histogram == {0: 1, 1: 1, 2: 1}


def test_a_step_that_a_length_limit_ended_is_left_out():
    stats = stats_of([5, 1], cut=True)
    assert (stats.steps, stats.new_tokens) == (2, 7)
    assert stats.tokens_per_step == 5
    assert stats.histogram == {4: 1}


@pytest.mark.parametrize("runs", [[], [3]])
def test_without_a_whole_step_the_means_are_nan_and_null_in_json(runs):
    stats = stats_of(runs, cut=True)
    assert math.isnan(stats.accepted_per_step)
    assert json.loads(json.dumps(stats.as_dict()))["tokens_per_step"] is None


def test_the_best_tree_is_the_one_with_the_longest_path_marked():
    stats = stats_of([2, 4, 1])
    assert stats.best_tree.accepted[0].nonzero().flatten().tolist() == [0, 1, 2, 3]


def test_a_tree_expects_the_sum_of_its_path_probabilities():
    stats = GenerationStats(prefilled=True)
    half = TokenTree.from_lists(
        [[1, 2, 3, 4]], [[-1, 0, 0, 1]], [[0.0, math.log(0.5), math.log(0.25), math.log(0.125)]]
    )
    stats.record(half.pad_to(6), [0], cut=False)
    stats.record(random_tree(1, "chain"), [0], cut=False)
    assert stats.expected == pytest.approx([0.875, 0.0])


def test_times_add_up_by_part_also_when_a_part_raises():
    stats = GenerationStats()
    for _ in range(2):
        with pytest.raises(RuntimeError), stats.timed("verify"):
            raise RuntimeError
    assert stats.seconds["verify"] > 0
