"""Random requests, aborts, retractions, pauses and new weights over all tiers: no page is lost or owned twice, and each
has the content of its tokens."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from baton.common.distributed.tick_agreement import TickAgreement
from baton.common.distributed.tp import TPGroup
from baton.tests.common.distributed.test_tick_agreement import World
from baton.tests.helpers.tier_simulation import SimulatedRank, Traffic, shares

STEPS = 8_000  # of each case; 100,000 were run, too
CASES = [("timeout", "write_through", False), ("best_effort", "write_back", False),
         ("wait_complete", "write_through_selective", True), ("timeout", "write_back", True)]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_no_page_is_lost_in_random_steps(case):
    prefetch_policy, write_policy, shared = case
    rank = SimulatedRank(TPGroup(), 1, shared=shared, prefetch_policy=prefetch_policy, write_policy=write_policy)
    traffic = Traffic([rank], seed=CASES.index(case))
    for step in range(1, STEPS + 1):
        traffic.step()
        if step % 1000 == 0:
            rank.check()
        if step % 4000 == 0:
            traffic.end()
    loads, counters = rank.loads, rank.loads.counters
    assert traffic.num_ended > 800 and rank.num_checked > 10_000 and rank.batcher.retraction.num_retracted > 10
    assert loads.num_loaded > 500 and loads.num_loaded_stored > 0 and counters["tier_pages_evicted"] > 100
    assert rank.prefetches.num_held == 0


@pytest.mark.parametrize("sharing", [False, True], ids=["own memory", "shared memory"])
@pytest.mark.parametrize("case", [CASES[0], CASES[3]], ids=str)
def test_ranks_decide_alike_over_storages_and_links_of_other_speeds(case, sharing):
    """Two ranks that agree by ticks; their copies and storages take other times and fail elsewhere. Of shared memory
    each writes every second slot, and the first one has the storage."""
    prefetch_policy, write_policy, shared = case
    said: list[bytes] = []
    groups = [TickAgreement(SimpleNamespace(world=World(rank, said), dp_rank=0,
                                            attn_tp=SimpleNamespace(rank=rank, size=2))) for rank in (0, 1)]
    ranks = [SimulatedRank(group, seed, alone=False, shared=shared, prefetch_policy=prefetch_policy,
                           write_policy=write_policy, share=share)
             for seed, (group, share) in enumerate(zip(groups, shares(2) if sharing else (None, None)))]

    def tick():
        groups[1].report()
        minima = groups[0].minima()
        for group in groups:
            group.apply(minima)

    traffic = Traffic(ranks, seed=5)
    for _ in range(2000):
        traffic.step(tick)
    traffic.end(tick)
    for rank in ranks:
        assert rank.loads.num_loaded_stored > 5 and rank.num_checked > 4000
    assert traffic.num_ended > 200
    for group in groups:
        group.close()
