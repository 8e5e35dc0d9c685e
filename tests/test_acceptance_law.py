"""The law of what acceptance emits: exactly, by enumeration, and of draws; and that the tests of it can fail.

A step emits the choices down the accepted path. Whatever the tree, that text, continued by the target, must have the
target's law; and the accepted tokens must be the longest prefix of the text in the tree, more than which no rule that
emits the target's law can accept.
"""

import itertools
from dataclasses import replace

import pytest
import torch
from support import chi_square_p
from transformers import (
    LogitsProcessorList,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopPLogitsWarper,
)

from weaver_hf import TokenTree
from weaver_hf.acceptance import choose, follow
from weaver_hf.noise import GumbelField

ROWS = 200_000
LEVEL = 1e-3 / 4  # four tests of a law below


# ---- by enumeration ----


def shapes(nodes, width):
    """Parents of every tree of that many nodes in which no node has more than `width` children."""
    grown = [[-1]]
    for i in range(1, nodes):
        # Each new node hangs at its predecessor's ancestors or beside it: every unordered shape appears at least once.
        grown = [[*p, parent] for p in grown for parent in range(i) if p.count(parent) < width and parent >= p[-1]]
    return grown


def labelled(parents, width):
    """Children carry the tokens after their parent's, so that tokens repeat along paths and siblings differ."""
    tokens = [0]
    for i, parent in enumerate(parents[1:], 1):
        tokens.append((tokens[parent] + 1 + parents[1:i].count(parent)) % width)
    return TokenTree.from_lists([tokens], [parents])


def law_after(prefix, width):
    """The target: a law that depends on the whole prefix, without a random number in it."""
    weights = [1 + (3 * token + 5 * sum(prefix) + 7 * len(prefix)) % 11 for token in range(width)]
    return torch.tensor(weights).double() / sum(weights)


def prefix_of(tree, node):
    return tuple(tree.token_ids[0, n].item() for n in tree.path(node)[1:])


def text_law(width, length):
    """Probability of every text of that length under the target."""
    law = {(): 1.0}
    for _ in range(length):
        law = {
            (*text, token): p * float(law_after(text, width)[token])
            for text, p in law.items()
            for token in range(width)
        }
    return law


def all_choices(tree, width):
    """Every choice at every node, `[width ** N, N]`, with its probability where nodes choose independently."""
    nodes = tree.num_nodes
    choices = torch.tensor(list(itertools.product(range(width), repeat=nodes)))
    laws = torch.stack([law_after(prefix_of(tree, node), width) for node in range(nodes)])
    return choices, laws[torch.arange(nodes), choices].prod(-1)


def shared_choices(tree, width):
    """Choices where all nodes of a depth are driven by one number, as by the noise, which a depth shares.

    The unit interval is cut wherever any node of the depth changes its choice.
    """
    depths = tree.depths[0].tolist()
    ladders = [law_after(prefix_of(tree, node), width).cumsum(0) for node in range(tree.num_nodes)]
    pieces = []
    for depth in range(max(depths) + 1):
        cuts = sorted({0.0, *(float(c) for d, ladder in zip(depths, ladders) if d == depth for c in ladder[:-1]), 1.0})
        pieces.append([((low + high) / 2, high - low) for low, high in itertools.pairwise(cuts)])
    rows, weights = [], []
    for combination in itertools.product(*pieces):
        rows.append([int((ladders[n] < combination[d][0]).sum()) for n, d in enumerate(depths)])
        weights.append(torch.tensor([weight for _, weight in combination], dtype=torch.double).prod())
    return torch.tensor(rows), torch.stack(weights)


def longest_prefix(tree, text):
    children, node, found = tree.children(), 0, 0
    while found < len(text) and (child := children.get((node, text[found]))) is not None:
        node, found = child, found + 1
    return found


def repeated(tree, rows):
    expanded = {name: getattr(tree, name).expand(rows, -1) for name in ("token_ids", "parents")}
    return replace(tree, **expanded, sizes=tree.sizes.expand(rows))


def check_exactly(tree, width, choices, weights):
    accepted = follow(repeated(tree, len(choices)), choices)
    # Whole texts: what was emitted, continued by the target.
    length = int(tree.depths.max()) + 1
    emitted: dict[tuple[int, ...], float] = {}
    for tokens, count, weight in zip(accepted.tokens.tolist(), accepted.lengths.tolist(), weights.tolist()):
        text = tuple(tokens[:count])
        emitted[text] = emitted.get(text, 0.0) + weight
        assert longest_prefix(tree, text) == count - 1
    mine = dict.fromkeys(text_law(width, length), 0.0)
    for text, p in emitted.items():
        for rest in itertools.product(range(width), repeat=length - len(text)):
            whole, q = text, p
            for token in rest:
                q *= float(law_after(whole, width)[token])
                whole = (*whole, token)
            mine[whole] += q
    law = text_law(width, length)
    assert max(abs(mine[text] - law[text]) for text in law) < 1e-12
    best = sum(p * longest_prefix(tree, text) for text, p in law.items())
    assert abs(float((weights * (accepted.lengths - 1)).sum()) - best) < 1e-12, "no lossless rule accepts more"


@pytest.mark.parametrize(
    "nodes", [*range(1, 8), *(pytest.param(n, marks=[pytest.mark.slow, pytest.mark.once]) for n in (8, 9))]
)
def test_every_small_tree_emits_exactly_the_targets_law(nodes):
    for parents in shapes(nodes, width=2):
        tree = labelled(parents, width=2)
        check_exactly(tree, 2, *all_choices(tree, 2))
        check_exactly(tree, 2, *shared_choices(tree, 2))


@pytest.mark.parametrize(
    ("parents", "width"),
    [
        ([-1, 0, 1, 2, 3, 4, 5, 6, 7], 2),
        ([-1, 0, 0, 0, 1, 1, 2, 2, 3], 3),
        ([-1, 0, 0, 1, 1, 2, 2, 3, 3], 3),
        ([-1, 0, 0, 1, 2, 3, 3, 5, 6], 3),
        ([-1, 0, 0, 0, 3, 3, 5, 5, 7], 3),
    ],
    ids=["chain", "wide", "binary", "mixed", "late"],
)
def test_trees_of_nine_nodes_emit_exactly_the_targets_law(parents, width):
    tree = labelled(parents, width)
    check_exactly(tree, width, *all_choices(tree, width))


def test_the_enumeration_can_fail():
    """A rule that takes a child with 2p - p^2 (an older published one) is off by far more than 1e-12."""
    tree = labelled([-1, 0], width=3)
    choices, weights = all_choices(tree, 3)
    child = int(tree.token_ids[0, 1])
    again = law_after((), 3)
    biased_choices = torch.cat([choices[choices[:, 0] == child], *[choices[choices[:, 0] != child]] * 3])
    redrawn = torch.arange(3).repeat_interleave(int((choices[:, 0] != child).sum()))
    kept = weights[choices[:, 0] == child]
    biased_choices[len(kept) :, 0] = redrawn
    biased_weights = torch.cat([kept, weights[choices[:, 0] != child].repeat(3) * again[redrawn]])
    assert float(biased_weights.sum()) == pytest.approx(1.0)
    with pytest.raises(AssertionError):
        check_exactly(tree, 3, biased_choices, biased_weights)


# ---- by draws ----

TOKENS, PARENTS = [3, 1, 5, 2, 1, 7, 0], [-1, 0, 0, 1, 1, 2, 3]  # depths 0, 1, 1, 2, 2, 2, 3
PROMPT = [4, 3]
TREE = TokenTree.from_lists([TOKENS], [PARENTS])


def raw_logits():
    """Logits after every node, `[N, 8]`."""
    node, token = torch.arange(7.0)[:, None], torch.arange(8.0)
    return 1.3 * torch.sin(1.7 * node + 2.3 * token + 0.4 * node * token)


def processed_logits():
    """The same under repetition penalty (each node's own history), temperature and top-p."""
    processors = LogitsProcessorList(
        [RepetitionPenaltyLogitsProcessor(1.4), TemperatureLogitsWarper(0.8), TopPLogitsWarper(0.85)]
    )
    histories = [torch.tensor([PROMPT + list(prefix_of(TREE, node))]) for node in range(7)]
    return torch.cat([processors(history, row[None]) for history, row in zip(histories, raw_logits())])


def draws(scores, seed=1, biased=False, margin=None):
    """What `ROWS` identical rows emit, as cell numbers `node of the bonus token * 8 + bonus token`."""
    many, nodes, scores = repeated(TREE, ROWS), torch.arange(7), scores.expand(ROWS, -1, -1)
    seeds = torch.arange(ROWS) + seed * 10 * ROWS
    choices = choose(many, nodes, scores, GumbelField(seeds, torch.full((ROWS,), 17)), margin)
    if (
        biased
    ):  # a child that was not drawn gets no second chance; a bonus token that is drawn from the whole law is one
        again = choose(many, nodes, scores, GumbelField(seeds + 5 * ROWS, torch.full((ROWS,), 17)))
        is_child = torch.zeros(7, 8, dtype=torch.bool)
        is_child[torch.tensor(PARENTS[1:]), torch.tensor(TOKENS[1:])] = True
        choices = torch.where(is_child[nodes, choices], choices, again)
    path, tokens, lengths = follow(many, choices)
    last = lengths[:, None] - 1
    return (path.gather(1, last) * 8 + tokens.gather(1, last))[:, 0]


def cell_law(scores):
    """Probability of every cell: down to the node, and a token that is no child's there."""
    p = scores.double().softmax(-1)
    reach, law = [1.0] + [0.0] * 6, p.clone()
    for node in range(1, 7):
        reach[node] = reach[PARENTS[node]] * float(p[PARENTS[node], TOKENS[node]])
    law *= torch.tensor(reach).double()[:, None]
    law[torch.tensor(PARENTS[1:]), torch.tensor(TOKENS[1:])] = 0
    return law


@pytest.mark.parametrize("scores", [raw_logits, processed_logits], ids=["raw", "processed"])
def test_two_hundred_thousand_rows_draw_the_targets_law(scores):
    counts = torch.bincount(draws(scores()), minlength=56)
    assert chi_square_p(counts, cell_law(scores())) > LEVEL


def test_a_filter_excludes_what_it_excludes():
    law = processed_logits().softmax(-1)
    assert (law == 0).any()
    assert (law > 0).sum(-1).min() > 1


def shifted(scores, amount):
    """The scores whose law after the root has `amount` more for the likeliest token that is no child's, taken from others."""
    p = scores[0].double().softmax(-1)
    token = int((p * torch.tensor([t not in (1, 5) for t in range(8)])).argmax())
    moved = p * (1 - amount / (1 - p[token]))
    moved[token] = p[token] + amount
    return torch.cat([moved.log().float()[None], scores[1:]])


def test_a_bias_of_one_percent_total_variation_is_rejected():
    scores = raw_logits()
    biased = shifted(scores, 0.01)
    assert float((biased[0].softmax(-1) - scores[0].softmax(-1)).abs().sum() / 2) == pytest.approx(0.01, abs=1e-5)
    counts = torch.bincount(draws(biased), minlength=56)
    assert chi_square_p(counts, cell_law(biased)) > LEVEL
    assert chi_square_p(counts, cell_law(scores)) < 1e-9


def test_the_biased_rule_of_the_published_code_is_rejected_at_one_percent():
    """2p - p^2 for a drafted child, with children rare enough that the law is off by about 1 % in all."""
    scores = raw_logits()
    p = scores[0].double().softmax(-1)
    rare = p.clone()
    rare[[1, 5]] = 0.005
    rare[[t for t in range(8) if t not in (1, 5)]] *= 0.99 / float(p.sum() - p[1] - p[5])
    scores = torch.cat([rare.log().float()[None], scores[1:]])
    honest, biased = cell_law(scores), torch.bincount(draws(scores, biased=True), minlength=56)
    distance = float((biased / ROWS - honest.flatten()).abs().sum() / 2)
    assert 0.008 < distance < 0.015
    assert chi_square_p(torch.bincount(draws(scores), minlength=56), honest) > LEVEL
    assert chi_square_p(biased, honest) < 1e-9


# ---- margin ----


def test_lossy_margin_takes_a_drafted_child_that_is_nearly_as_good():
    tree = TokenTree.from_lists([[0, 4, 6, 2]], [[-1, 0, 0, 1]])
    scores = torch.zeros(1, 4, 8)
    scores[0, 0, 5], scores[0, 0, 4], scores[0, 0, 6] = 3.0, 2.5, 2.6  # the choice, and two children behind it
    nodes = torch.arange(4)
    chosen = [int(choose(tree, nodes, scores, margin=margin)[0, 0]) for margin in (0.0, 0.3, 0.45, 0.6)]
    assert chosen == [5, 5, 6, 6]
    alone = choose(tree, torch.tensor([0]), scores[:, :1], margin=0.45)
    assert alone.tolist() == [[6]], "one node at a time gives the same"


def test_lossy_margin_never_takes_what_a_filter_excludes_nor_padding():
    tree = TokenTree.from_lists([[0, 4]], [[-1, 0]], num_nodes=3)
    scores = torch.full((1, 3, 8), 1.0)
    scores[0, 0, 4], scores[0, 0, 7] = float("-inf"), 1.5
    assert choose(tree, torch.arange(3), scores, margin=100.0)[0].tolist() == [7, 0, 0]


def test_lossy_margin_is_lossy():
    """The test of the law sees it."""
    counts = torch.bincount(draws(raw_logits(), margin=0.3), minlength=56)
    assert chi_square_p(counts, cell_law(raw_logits())) < 1e-9
