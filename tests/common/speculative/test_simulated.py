"""Acceptance that is drawn, not computed."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from baton.common.api.drafts import Drafts
from baton.common.api.errors import ConfigError
from baton.common.config.server.speculative import SpeculativeArgs
from baton.common.speculative.simulated import SimulatedAcceptance, SimulatedChains, first_path
from baton.kernels.arguments import ChainPages, ChainState, PlacedChains
from baton.kernels.speculative.accept_chains import accept_chains
from baton.kernels.speculative.place_chains import place_rows

GOLDEN = (0.83, 0.60, 0.45, 0.36)


def draw(survival, num_drafts, seed=0, steps=20_000):
    simulated = SimulatedAcceptance(survival, seed)
    return np.concatenate([simulated.count([rid] * steps, np.arange(steps), np.full(steps, num_drafts))
                           for rid in ("a", "b", "request-17")])


def test_the_share_at_each_position_is_the_given_one():
    counts = draw(GOLDEN, 4)
    for position, share in enumerate(GOLDEN, 1):
        assert (counts >= position).mean() == pytest.approx(share, abs=0.01)
    assert draw(GOLDEN, 2).max() == 2
    assert draw(GOLDEN, 2).mean() == pytest.approx(0.83 + 0.60, abs=0.02)


def test_draws_can_be_repeated_and_depend_on_seed_request_and_position():
    simulated = SimulatedAcceptance(GOLDEN, 3)
    one = simulated.count(["a"] * 1000, np.arange(1000), np.full(1000, 4))
    assert (one == SimulatedAcceptance(GOLDEN, 3).count(["a"] * 1000, np.arange(1000), np.full(1000, 4))).all()
    for other in (simulated.count(["b"] * 1000, np.arange(1000), np.full(1000, 4)),
                  simulated.count(["a"] * 1000, np.arange(1000) + 1, np.full(1000, 4)),
                  SimulatedAcceptance(GOLDEN, 4).count(["a"] * 1000, np.arange(1000), np.full(1000, 4))):
        assert abs(np.corrcoef(one, other)[0, 1]) < 0.1


@pytest.mark.parametrize(("given", "steps", "mean"),
                         [("2.88", 3, 2.88), ("1", 3, 1.0), ("4", 3, 4.0), ("3.71", 7, 3.71),
                                                      ("0.83,0.6,0.45", 3, 2.88), ("0.5", 3, 1.5),
                                                      ("0.9, 0.5, 0.2", 2, 2.4)])
def test_the_mean_length_is_the_given_one(given, steps, mean):
    args = SpeculativeArgs(speculative_algorithm="NGRAM", speculative_num_steps=steps,
                           speculative_simulate_acceptance=given)
    assert 1 + sum(args.simulated_acceptance) == pytest.approx(mean)
    assert len(args.simulated_acceptance) <= steps
    assert 1 + draw(args.simulated_acceptance, steps).mean() == pytest.approx(mean, abs=0.03)


def test_without_the_flag_nothing_is_simulated():
    assert SpeculativeArgs(speculative_algorithm="NGRAM").simulated_acceptance is None


@pytest.mark.parametrize(("given", "message"), [
    ("much", "takes a mean length, 2.88, or shares by position, 0.83,0.6,0.45; not much"),
    ("4.1", "cannot be 4.1: a step with 3 drafts yields 1 to 4 tokens"),
    ("-0.5", "shares must be between 0 and 1, and none above the one before"),
    ("0.5,0.6", "shares must be between 0 and 1, and none above the one before"),
    ("nan", "takes a mean length, 2.88, or shares by position, 0.83,0.6,0.45; not nan"),
])
def test_what_cannot_be_simulated_is_refused(given, message):
    with pytest.raises(ConfigError, match=message):
        SpeculativeArgs(speculative_algorithm="NGRAM", speculative_num_steps=3, speculative_simulate_acceptance=given)


def test_paths_of_chains_and_trees():
    assert first_path(Drafts((5, 6, 7)), 2) == [0, 1]
    assert first_path(Drafts((5, 6, 7)), 9) == [0, 1, 2]
    tree = Drafts((1, 2, 3, 4, 5), (-1, -1, 0, 1, 2))
    assert first_path(tree, 0) == [] and first_path(tree, 2) == [0, 2] and first_path(tree, 5) == [0, 2, 4]


def test_the_device_draws_what_the_host_draws():
    """For the requests of the last update, whichever were there before."""
    simulated, rids = SimulatedAcceptance(GOLDEN, 5), [f"request {i}" for i in range(50)]
    chains = SimulatedChains(simulated, 64, torch.device("cpu"))
    width, starts = 4, np.arange(len(rids)) * 3
    pages = ChainPages(torch.arange(51, dtype=torch.int32), torch.arange(50, dtype=torch.int32), 256, 99, 256)
    ids = torch.randint(2, (50, width), generator=torch.Generator().manual_seed(0))
    rows = place_rows(torch.from_numpy(starts), ids, pages)
    valid = torch.arange(50) % (width + 1)
    for chosen in (rids[::-1], rids[:7], rids, list(rids)):
        chains.update(chosen)
    found = accept_chains(torch.zeros(50 * width, dtype=torch.int64), PlacedChains(rows, valid, rows.positions + 1),
                          ChainState.empty(50, 3, torch.device("cpu")), pages, 3, chains.counts)
    drafts = np.maximum(valid.numpy() - 1, 0)
    assert found.counts.tolist() == (simulated.count(rids, starts, drafts) + (valid.numpy() > 0)).tolist()
    assert len(set(found.counts.tolist())) == width + 1
