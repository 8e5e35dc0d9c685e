"""The noise's kernel against the plain torch noise: the same bits for every seed, position and token."""

import pytest
import torch

from weaver_hf import noise
from weaver_kernels.gumbel import gumbel

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize("vocab", [1, 2, 3, 5, 1001, 4099])
def test_the_kernels_noise_is_the_plain_noise(vocab):
    seeds = torch.tensor([0, (1 << 62) + 77], device=DEVICE)
    positions = torch.tensor([[0, 1, 7], [(1 << 33) + 5, 9, (1 << 31) + 1]], device=DEVICE)
    assert torch.equal(gumbel(seeds, positions, vocab), noise.gumbel(seeds, positions, vocab))


def test_strided_positions_and_small_programs_make_no_difference():
    seeds = torch.tensor([[5, 0], [6, 0]], device=DEVICE)[:, 0]
    positions = torch.arange(12, device=DEVICE).view(6, 2).t()[:, ::2]
    drawn = gumbel(seeds, positions, 77, config={"BLOCKS": 4})
    assert torch.equal(drawn, noise.gumbel(seeds, positions, 77))


def test_no_positions_are_no_noise():
    assert gumbel(torch.tensor([5], device=DEVICE), torch.empty(1, 0, device=DEVICE).long(), 9).shape == (1, 0, 9)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU on this machine")
def test_a_whole_vocabulary_is_the_same_on_the_card_and_on_the_cpu():
    seeds, positions = torch.tensor([1 << 40]), torch.arange(2)[None] + 4000
    drawn = gumbel(seeds.cuda(), positions.cuda(), 248_320).cpu()
    expected = noise.gumbel(seeds, positions, 248_320)
    assert (drawn != expected).float().mean() < 1e-5, "only the last bit of a logarithm, and hardly ever"
    torch.testing.assert_close(drawn, expected, rtol=3e-7, atol=3e-7)
