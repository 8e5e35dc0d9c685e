"""Following the target's choices down a tree."""

import torch
from hypothesis import given
from hypothesis import strategies as st
from support import KINDS, random_tree

from weaver_hf import TokenTree
from weaver_hf.acceptance import choose, follow
from weaver_hf.noise import GumbelField


def walk(tree, choices, row):
    """The same, one node at a time."""
    children, node, path = tree.children(row), 0, [0]
    while (child := children.get((node, choices[row][node]))) is not None:
        node = child
        path.append(node)
    return path, [choices[row][n] for n in path]


@given(st.sampled_from(KINDS), st.integers(1, 33), st.integers(0, 1000), st.integers(0, 4))
def test_follow_equals_a_walk_from_node_to_node(kind, nodes, seed, padding):
    tree = random_tree(nodes, kind, seed=seed, vocab=40, batch=2).pad_to(nodes + padding)
    generator = torch.Generator().manual_seed(seed)
    choices = torch.randint(0, 40, tree.token_ids.shape, generator=generator)
    # Mostly a token that some child carries, so that paths are long.
    for row in range(2):
        for (parent, token), _ in tree.children(row).items():
            if torch.rand((), generator=generator) < 0.8:
                choices[row, parent] = token
    path, tokens, lengths = follow(tree, choices)
    for row in range(2):
        expected_path, expected_tokens = walk(tree, choices.tolist(), row)
        assert path[row, : lengths[row]].tolist() == expected_path
        assert tokens[row, : lengths[row]].tolist() == expected_tokens


def test_padding_is_never_accepted_though_it_carries_the_anchors_token():
    tree = TokenTree.from_lists([[7, 8]], [[-1, 0]], num_nodes=4)
    choices = torch.full((1, 4), 7)  # the target repeats the anchor's token; the padding nodes carry it
    assert follow(tree, choices).lengths.tolist() == [1]


def test_the_root_alone_gives_the_bonus_token():
    path, tokens, lengths = follow(TokenTree.from_lists([[7]], [[-1]]), torch.tensor([[3]]))
    assert (path.tolist(), tokens.tolist(), lengths.tolist()) == ([[0]], [[3]], [1])


def test_a_root_with_nothing_but_padding_below_it_chooses_as_it_does_alone():
    """Padding has depth 1, one more than the deepest node here."""
    alone = TokenTree.from_lists([[7]], [[-1]])
    scores = torch.randn(1, 4, 11, generator=torch.Generator().manual_seed(0))
    field = GumbelField(torch.tensor([3]), torch.tensor([5]))
    padded = choose(alone.pad_to(4), torch.arange(4), scores, field)
    assert padded[0, 0] == choose(alone, torch.arange(1), scores[:, :1], field)[0, 0]
