"""Loose acceptance: drafts are taken as often as the thresholds say, and never with thresholds of 1."""

from __future__ import annotations

import pytest
import torch

from baton.common.api.drafts import Drafts
from baton.common.api.errors import ConfigError
from baton.common.api.sampling import SamplingParams
from baton.common.config.server.speculative import SpeculativeArgs
from baton.common.request.sampling_metadata import SamplingMetadata
from baton.common.sampling.loose_acceptance import LooseSampling, drafts_after
from baton.common.sampling.torch_sampling import TorchSampling
from baton.tests.helpers.chi_square import chi_square_p

VOCAB, DRAWS = 6, 60_000
P = torch.tensor([0.3, 0.1, 0.05, 0.2, 0.25, 0.1], dtype=torch.float64)


def draws(drafts: tuple[int, ...], single: float, acc: float, **sampling) -> torch.Tensor:
    plain = TorchSampling(VOCAB, torch.device("cpu"), 0)
    rows = [SamplingMetadata(SamplingParams(seed=seed, **sampling), 3, drafts=drafts) for seed in range(DRAWS)]
    return LooseSampling(plain, plain, single, acc)(P.log().float().expand(DRAWS, -1), rows)


def share_of(tokens: torch.Tensor, wanted: dict[int, float]) -> float:
    """How well the tokens fit: the wanted probabilities of some, the others' in proportion to P."""
    expected = P.clone()
    expected[list(wanted)] = 0
    expected *= (1 - sum(wanted.values())) / expected.sum()
    for token, probability in wanted.items():
        expected[token] = probability
    return chi_square_p(torch.bincount(tokens, minlength=VOCAB), expected)


def test_drafts_share_a_boosted_probability():
    assert share_of(draws((1,), 1.0, 0.5), {1: 0.2}) > 1e-3
    assert share_of(draws((1, 3), 1.0, 0.4), {1: 0.25, 3: 0.5}) > 1e-3
    assert share_of(draws((0, 4), 1.0, 0.5), {0: 0.3 / 0.55, 4: 0.25 / 0.55}) > 1e-3  # some one always


def test_a_likely_draft_is_always_accepted():
    tokens = draws((2, 4), 0.25, 1.0)
    assert set(tokens.tolist()) == {2, 4} and share_of(tokens, {2: 0.05, 4: 0.95}) > 1e-3
    assert share_of(draws((2,), 0.25, 1.0), {}) > 1e-3  # not likely enough


def test_thresholds_of_one_and_greedy_rows_change_nothing():
    plain = draws((), 0.1, 0.1)
    assert torch.equal(draws((1, 3), 1.0, 1.0), plain)
    assert set(draws((1, 3), 0.01, 0.01, temperature=0.0).tolist()) == {0}
    assert set(draws((1, 0), 0.01, 0.01, top_p=0.5).tolist()) <= {0, 4}  # 1 is truncated


def test_drafts_after_rows():
    metadata = [SamplingMetadata(SamplingParams(), position) for position in range(9)]
    found = drafts_after(metadata, [1, 3, 0, 5], {1: Drafts((7, 8)), 3: Drafts((1, 2, 3, 4), (-1, -1, 0, 0))})
    assert [one.drafts for one in found] == [(), (7,), (8,), (), (1, 2), (3, 4), (), (), ()]
    assert [one.position for one in found] == list(range(9)) and not metadata[1].drafts


@pytest.mark.parametrize("thresholds", [(0.0, 1.0), (1.0, 0.0), (1.1, 1.0)])
def test_thresholds_are_checked(thresholds):
    single, acc = thresholds
    with pytest.raises(ConfigError, match="above 0 and at most 1"):
        SpeculativeArgs(speculative_accept_threshold_single=single, speculative_accept_threshold_acc=acc)
