"""The noise: Philox by its known answers, Gumbel by its law, independence along every axis, and no trace of shapes."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support import chi_square_p

from weaver_hf import noise
from weaver_hf.noise import GumbelField, gumbel, philox, row_seeds

LEVEL = 1e-3 / 12  # twelve tests of a law below


def words(*values):
    return tuple(torch.tensor(value) for value in values)


@pytest.mark.parametrize(
    ("counter", "key", "answer"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
    ids=["zeros", "ones", "digits-of-pi"],
)
@pytest.mark.parametrize("copies", [1, 2, 7, 33])
def test_philox_gives_its_authors_known_answers(counter, key, answer, copies):
    """Whatever the length: vectorised loops and their ends multiply by different instructions."""
    got = philox(tuple(w.repeat(copies) for w in words(*counter)), words(*key))
    assert [w.tolist() for w in got] == [[a] * copies for a in answer]


@given(st.integers(0, 2**63 - 1), st.integers(0, 2**40), st.integers(0, 300), st.integers(1, 5))
def test_a_tokens_noise_depends_on_seed_position_and_token_alone(seed, position, token, more):
    alone = gumbel(torch.tensor([seed]), torch.tensor([[position]]), token + 1)[0, 0, token]
    seeds = torch.tensor([3, seed])
    positions = position + torch.arange(-2, more).clamp(min=-position).repeat(2, 1)
    inside = gumbel(seeds, positions, token + 37 * more)
    assert float(inside[1, 2, token]) == float(alone)


def test_chunks_leave_no_trace(monkeypatch):
    args = torch.tensor([5, 6]), torch.arange(6).view(2, 3), 1001
    whole = gumbel(*args)
    monkeypatch.setattr(noise, "_CHUNK_CPU", 100)
    assert torch.equal(gumbel(*args), whole)


def test_seeds_and_positions_beyond_32_bits_count():
    drawn = [
        gumbel(torch.tensor([seed]), torch.tensor([[position]]), 8)
        for seed in (1, 1 + (1 << 32), 1 + (1 << 62))
        for position in (2, 2 + (1 << 32))
    ]
    assert len({tuple(x.flatten().tolist()) for x in drawn}) == 6


@pytest.mark.parametrize("word", [0, 0xFFFFFFFF])
def test_the_extreme_words_give_finite_noise(monkeypatch, word):
    monkeypatch.setattr(noise, "philox", lambda counter, key: (torch.full_like(counter[0] + counter[1], word),) * 4)
    extreme = gumbel(torch.tensor([1]), torch.tensor([[1]]), 4)
    assert extreme.isfinite().all()
    assert (extreme < -3).all() if word == 0 else (extreme > 22).all()


def uniforms(seeds, positions, vocab):
    """Back from the noise to the unit interval."""
    return torch.exp(-torch.exp(-gumbel(torch.tensor(seeds), torch.tensor([positions] * len(seeds)), vocab).double()))


def test_the_noise_is_gumbel():
    """Kolmogorov and Smirnov's largest distance from the law, and its far upper tail."""
    drawn = uniforms([11, 12], list(range(100)), 5000).flatten().sort().values
    n = len(drawn)
    steps = torch.arange(n + 1).double() / n
    distance = max(float((steps[1:] - drawn).max()), float((drawn - steps[:-1]).max()))
    assert distance < 2.27 / n**0.5  # exceeded once in 30,000 times
    tail = int((drawn > 1 - 1e-4).sum())
    assert abs(tail - n * 1e-4) < 4.2 * (n * 1e-4) ** 0.5


CELLS = 16


def pair_p(first, second):
    """Chi-square of 16 x 16 cells against independent uniform pairs."""
    cell = (first * CELLS).long().clamp(max=CELLS - 1) * CELLS + (second * CELLS).long().clamp(max=CELLS - 1)
    law = torch.full((CELLS**2,), 1 / CELLS**2)
    return chi_square_p(torch.bincount(cell.flatten(), minlength=CELLS**2), law)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        pytest.param((0, 0, 0), (0, 0, 1), id="words-of-a-block"),
        pytest.param((0, 0, 0), (0, 0, 3), id="first-and-last-word"),
        pytest.param((0, 0, 0), (0, 0, 4), id="blocks"),
        pytest.param((0, 0, 0), (0, 1, 0), id="positions"),
        pytest.param((0, 0, 0), (0, 64, 0), id="far-positions"),
        pytest.param((0, 0, 0), (0, 1, 1), id="position-and-token"),
        pytest.param((0, 0, 0), (1, 0, 0), id="neighbouring-seeds"),
        pytest.param((0, 0, 0), (2, 0, 0), id="rows-of-a-call"),
    ],
)
def test_noise_is_independent_along_every_axis(first, second):
    seeds = [21, 22, int(row_seeds(21, 2)[1])]
    field = uniforms(seeds, list(range(65 + 64)), 4096 + 4)
    picked = [field[s, p : p + 65, t : t + 4096 : 4] for s, p, t in (first, second)]
    assert pair_p(*picked) > LEVEL


def test_the_test_of_independence_can_fail():
    field = uniforms([21, 22], list(range(65)), 4096)
    copied = torch.where(torch.rand(field[0].shape) < 0.02, field[0], field[1])
    assert pair_p(field[0], copied) < 1e-9


def test_row_seeds_do_not_depend_on_their_number_and_differ():
    seeds = row_seeds(7, 500)
    assert torch.equal(row_seeds(7, 3), seeds[:3])
    assert len(set(seeds.tolist()) | set(row_seeds(8, 500).tolist())) == 1000
    assert (seeds >= 0).all()
    assert (seeds >> 32).bool().all()


def test_the_largest_of_score_and_noise_is_a_draw():
    probabilities = torch.tensor([0.5, 0.25, 0.125, 0.0625, 0.03, 0.03, 0.0025, 0.0])
    drawn = (gumbel(torch.tensor([9]), torch.arange(100_000)[None], 8)[0] + probabilities.log()).argmax(-1)
    assert chi_square_p(torch.bincount(drawn, minlength=8), probabilities) > LEVEL


def test_a_field_computes_each_row_once_and_moves_on(monkeypatch):
    asked = []
    monkeypatch.setattr(noise, "gumbel", lambda s, p, v: asked.append(p.tolist()) or gumbel(s, p, v))
    field = GumbelField(torch.tensor([4]), torch.tensor([10]))
    three = field.rows(3, 50)
    assert torch.equal(field.rows(2, 50), three[:, :2])
    assert torch.equal(field.rows(4, 50)[:, :3], three)
    assert asked == [[[10, 11, 12]], [[13]]]
    assert torch.equal(field.advance(2).rows(1, 50), three[:, 2:])
    assert len(asked) == 2, "rows that were known stay known"
    beyond = field.advance(3)
    assert torch.equal(beyond.rows(3, 50), gumbel(torch.tensor([4]), torch.tensor([[13, 14, 15]]), 50))
    assert asked[2:] == [[[14, 15]]]
    assert torch.equal(field.advance(9).rows(1, 50), gumbel(torch.tensor([4]), torch.tensor([[19]]), 50))
