"""Seeded noise: uniform, and independent of that of neighbouring seeds, positions and tokens."""

from __future__ import annotations

import pytest
import torch

from baton.common.api.messages import Bootstrap, Generate
from baton.common.api.sampling import SamplingParams
from baton.common.request.seeds import seeded
from baton.common.sampling.gumbel_noise import seeded_exponential
from baton.tests.helpers.chi_square import chi_square_p

NUM_SEEDS, NUM_POSITIONS, VOCAB = 64, 64, 256


def uniform(seeds: torch.Tensor) -> torch.Tensor:
    """Uniform numbers [seed, position, token], which the noise is made of."""
    positions = torch.arange(NUM_POSITIONS)
    noise = seeded_exponential(seeds.repeat_interleave(NUM_POSITIONS), positions.repeat(len(seeds)), VOCAB)
    return noise.neg().exp().view(len(seeds), NUM_POSITIONS, VOCAB).double()


def internal(count: int) -> torch.Tensor:
    """Seeds of requests in consecutive bootstrap rooms."""
    rooms = [Generate("", [1], SamplingParams(), bootstrap=Bootstrap("h", 1, room)) for room in range(count)]
    return torch.tensor([seeded(message, 0).seed for message in rooms])


SEEDS = {"consecutive": torch.arange(NUM_SEEDS), "internal": internal(NUM_SEEDS),
         "negative": torch.arange(NUM_SEEDS) - 2**63}


@pytest.mark.parametrize("kind", SEEDS)
@pytest.mark.parametrize("step", [(1, 0, 0), (0, 1, 0), (0, 0, 1), (1, 1, 0), (1, -1, 0), (0, 1, -1), (1, 0, 1)],
                         ids=lambda step: "seed{:+d},position{:+d},token{:+d}".format(*step))
def test_neighbours_are_independent(kind, step):
    numbers = uniform(SEEDS[kind])
    moved = numbers.roll(step, (0, 1, 2))
    cells = (numbers * 16).long() * 16 + (moved * 16).long()
    seen = torch.bincount(cells.flatten(), minlength=256)
    assert chi_square_p(seen, torch.full((256,), 1 / 256, dtype=torch.float64)) > 1e-3
    assert abs(float(torch.corrcoef(torch.stack((numbers.flatten(), moved.flatten())))[0, 1])) < 5 / seen.sum() ** 0.5


@pytest.mark.parametrize("kind", SEEDS)
def test_numbers_are_uniform(kind):
    seen = torch.bincount((uniform(SEEDS[kind]) * 1000).long().flatten(), minlength=1000)
    assert chi_square_p(seen, torch.full((1000,), 1e-3, dtype=torch.float64)) > 1e-3


def test_a_reduced_vocabulary_has_the_noise_of_its_tokens():
    seeds, positions = torch.tensor([3, -4]), torch.tensor([10, 2**20])
    ids = torch.tensor([5, 0, 255, 17])
    reduced = seeded_exponential(seeds, positions, len(ids), ids)
    assert torch.equal(reduced, seeded_exponential(seeds, positions, 256)[:, ids])
