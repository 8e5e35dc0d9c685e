"""TokenTree: the contract of its tensors, its checks, and its drawings."""

import math
import xml.etree.ElementTree as ElementTree

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support import KINDS, random_parents, random_tree

from weaver_hf import TokenTree
from weaver_hf.errors import InvalidTreeError

SMALL = TokenTree.from_lists(
    [[5, 6, 7, 8, 9, 10]], [[-1, 0, 0, 1, 1, 3]], [[0.0, math.log(0.6), math.log(0.3), math.log(0.48), -3.0, -1.0]]
)

parents_lists = st.integers(1, 33).flatmap(
    lambda n: st.tuples(*[st.integers(0, i - 1) for i in range(1, n)]).map(lambda p: [-1, *p])
)


def tree_of(parents, **kwargs):
    return TokenTree.from_lists([list(range(len(parents)))], [parents], **kwargs)


@given(parents_lists)
def test_ancestors_are_exactly_the_nodes_on_the_path(parents):
    tree = tree_of(parents)
    for node in range(len(parents)):
        path = tree.path(node)
        assert tree.ancestors[0, node].nonzero().flatten().tolist() == path
        assert int(tree.depths[0, node]) == len(path) - 1


@given(parents_lists, st.integers(0, 5))
def test_padding_changes_no_node_and_is_nobodys_ancestor(parents, extra):
    tree = tree_of(parents)
    size = len(parents)
    padded = tree.pad_to(size + extra)
    padded.validate()
    assert padded.num_nodes == size + extra
    assert torch.equal(padded.ancestors[:, :size, :size], tree.ancestors)
    assert not padded.ancestors[0, :size, size:].any()
    assert padded.is_node[0].tolist() == [True] * size + [False] * extra
    assert padded.token_ids[0, size:].tolist() == [0] * extra
    assert torch.equal(padded.token_ids, tree_of(parents, num_nodes=size + extra).token_ids)


def test_rows_of_a_batch_are_independent_trees():
    tree = TokenTree.from_lists([[1, 2, 3], [4]], [[-1, 0, 1], [-1]])
    assert tree.sizes.tolist() == [3, 1]
    assert tree.depths.tolist() == [[0, 1, 2], [0, 1, 1]]
    assert tree.path(2, row=0) == [0, 1, 2]
    tree.validate()


@pytest.mark.parametrize(
    ("tokens", "parents", "scores", "message"),
    [
        ([1, 2], [-1, 1], [0, 0], "parent 1 of node 1"),
        ([1, 2], [-1, -1], [0, 0], "parent -1 of node 1"),
        ([1, 2], [0, 0], [0, 0], "root parent 0"),
        ([], [], [], "root parent None"),
        ([1, 2, 2], [-1, 0, 0], [0, 0, 0], "token 2 twice under node 0"),
        ([1, 2], [-1, 0], [0, 0.5], "path log-probability 0.5"),
        ([1, 2], [-1, 0], [0, math.nan], "path log-probability nan"),
        ([1, 2], [-1], [0, 0], "2 tokens, 1 parents"),
    ],
)
def test_a_list_that_is_no_tree_is_refused_by_name(tokens, parents, scores, message):
    with pytest.raises(InvalidTreeError, match=message):
        TokenTree.from_lists([tokens], [parents], [scores])


def test_a_tree_wider_than_the_static_width_is_refused():
    with pytest.raises(InvalidTreeError, match="at most 3 nodes"):
        tree_of([-1, 0, 0, 0], num_nodes=3)
    with pytest.raises(InvalidTreeError, match="at most 3 nodes"):
        tree_of([-1, 0, 0, 0]).pad_to(3)


@pytest.mark.parametrize(
    "broken",
    [
        {"parents": torch.tensor([[-1, 0, 1, 1]])},
        {"token_ids": torch.tensor([[0, 1, 2, 9]])},
        {"sizes": torch.tensor([5])},
        {"sizes": torch.tensor([0])},
        {"parents": torch.tensor([[-1, 0, 1]])},
    ],
    ids=["padding-parent", "padding-token", "size-too-large", "size-zero", "shape"],
)
def test_validate_finds_what_a_device_built_tree_breaks(broken):
    good = tree_of([-1, 0, 1], num_nodes=4)
    good.validate()
    fields = {name: getattr(good, name) for name in ("token_ids", "parents", "log_probs", "sizes")}
    with pytest.raises(InvalidTreeError):
        TokenTree(**{**fields, **broken}).validate()


def test_best_leaf_follows_the_most_probable_child_and_ties_go_to_the_lower_index():
    assert SMALL.path(SMALL.best_leaf()) == [0, 1, 3, 5]
    assert random_tree(6, "star").best_leaf() == 1


def test_children_map_tokens_of_a_node_to_nodes():
    assert SMALL.children() == {(0, 6): 1, (0, 7): 2, (1, 8): 3, (1, 9): 4, (3, 10): 5}


def test_drawing_indents_forks_and_shows_conditional_probabilities():
    drawn = str(SMALL.annotate(lambda ids: "abcdef"[ids[0] - 5], torch.tensor([[0, 1, 3, -1]])))
    assert drawn.splitlines() == [
        "'a' *",
        "├─ 'b'  0.60 *",
        "│  ├─ 'd'  0.80 *",
        "│  │  'f'  0.77",
        "│  └─ 'e'  0.08",
        "└─ 'c'  0.30",
    ]


def test_drawing_leaves_padding_out_and_separates_rows():
    drawn = str(TokenTree.from_lists([[1, 2], [3]], [[-1, 0], [-1]], num_nodes=4))
    assert drawn.splitlines() == ["row 0", "1", "2  1.00", "row 1", "3"]


@pytest.mark.parametrize("kind", KINDS)
def test_svg_is_well_formed_and_escapes_text(kind):
    tree = random_tree(17, kind).annotate(lambda ids: f"<&{ids[0]}>")
    root = ElementTree.fromstring(f"<div>{tree._repr_html_()}</div>")
    texts = root.findall(".//{http://www.w3.org/2000/svg}text")
    assert len(texts) == 17
    assert len(root.findall(".//{http://www.w3.org/2000/svg}path")) == 16
    places = [(t.get("x"), t.get("y")) for t in texts]
    assert len(set(places)) == 17, "no two nodes may be drawn over each other"


def test_random_parents_make_the_shapes_they_say():
    assert random_parents(4, "chain") == [-1, 0, 1, 2]
    assert random_parents(7, "comb") == [-1, 0, 0, 2, 2, 4, 4]
