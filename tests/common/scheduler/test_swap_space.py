"""Swapping of pages in all cache groups: each comes back with its content, and no more than later tokens read."""

from __future__ import annotations

import pytest

from baton.common.api.messages import Generate
from baton.common.api.sampling import SamplingParams
from baton.common.distributed.tp import TPGroup
from baton.common.kvcache.cache_group import CacheGroup, SlidingWindow
from baton.common.kvcache.layout import KVLayout
from baton.common.kvcache.manager import KVCacheManager
from baton.common.kvcache.pool import KVPool
from baton.common.kvcache.tiers.base import TierContext
from baton.common.kvcache.tiers.host import HostTier
from baton.common.request.req import Req
from baton.common.scheduler.preemption.copy_rates import AgreedRates
from baton.common.scheduler.preemption.swap_space import SwapSpace

PAGE, WINDOW = 2, 5
LAYOUT = KVLayout(groups=(1,), num_kv_heads=1, head_dim=2, page_size=PAGE, dtype="float32")


class Engine:
    """A cache of two groups, the pages of each of its pools, and swap space for ``num_pages`` pages of each."""

    def __init__(self, num_pages: int):
        self.cache = KVCacheManager(24, PAGE, groups=[CacheGroup(SlidingWindow(WINDOW), 12, PAGE)])
        self.pools = [KVPool(LAYOUT, count, "cpu") for count in (24, 12)]
        tiers = [HostTier(TierContext(pool, num_pages * pool.groups[0][0].nbytes, "-")) for pool in self.pools]
        self.swap = SwapSpace(tiers, self.cache, AgreedRates(1e18, TPGroup()), shared=True)

    def fill(self, req: Req, sign: int) -> None:
        """Write each page's number in the prompt into it, a further group's with the other ``sign``."""
        for pool, span, each in zip(self.pools, self.swap._spans(req), (1, sign)):
            for i, page in enumerate(span[1].tolist()):
                pool.groups[0][page] = each * (span[0] + i + 1)

    def content(self, req: Req) -> list[list[float]]:
        return [pool.groups[0][span[1], 0, 0, 0, 0, 0].tolist()
                for pool, span in zip(self.pools, self.swap._spans(req))]

    def compute(self, req: Req) -> None:
        table = req.page_table = self.cache.match_prefix(req.prompt, len(req.prompt) - 1)
        assert self.cache.reserve(table, 24) and self.cache.allocate_slots(table, len(req.prompt))
        while (start := req.num_computed_tokens) < len(req.prompt):
            req.num_computed_tokens = self.cache.allocate_chunk(table, start, min(start + 3, len(req.prompt)))

    def retract(self, req: Req, keep: bool) -> None:
        req.swapped_out = self.swap.swap_out(req)
        self.cache.release(req.page_table, req.computed() if keep else None)
        req.page_table, req.num_computed_tokens = None, 0

    def resume(self, req: Req) -> None:
        table = req.page_table = self.cache.match_prefix(req.prompt, len(req.prompt) - 1)
        assert self.cache.reserve(table, 24)
        req.num_computed_tokens = table.num_cached_pages * PAGE
        if req.swapped_out.num_tokens > req.num_computed_tokens:
            assert self.cache.allocate_incoming(table, req.swapped_out.num_tokens)
        assert self.cache.allocate_slots(table, len(req.prompt))
        self.swap.swap_in(req)


def request(length: int, first: int = 0) -> Req:
    prompt = list(range(first, first + length))
    return Req.from_message(Generate(f"r{first}", prompt, SamplingParams()), eos_ids=frozenset(), now=0.0, timeout=1.0)


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("length", [1, 4, 5, 9, 14, 15])
def test_pages_of_all_groups_come_back(length, keep):
    engine, req = Engine(12), request(length)
    engine.compute(req)
    engine.fill(req, -1)
    before = engine.content(req)
    assert len(before[0]) == -(-length // PAGE) and len(before[1]) <= -(-WINDOW // PAGE) + 1
    engine.retract(req, keep)
    assert engine.swap.num_pages == sum(map(len, before)) and engine.swap.num_swapped_out == 1
    others = request(8, first=50)
    engine.compute(others)  # takes pages that were freed
    for pool, span in zip(engine.pools, engine.swap._spans(others)):
        pool.groups[0][span[1]] = 99.0
    engine.resume(req)
    assert req.num_computed_tokens == length and engine.content(req) == before
    assert engine.swap.num_pages == 0 and req.swapped_out is None
    engine.cache.release_all([(req.page_table, None), (others.page_table, None)])
    engine.cache.check_integrity()


def test_nothing_is_swapped_out_where_one_group_has_no_room():
    engine, req = Engine(4), request(9)
    engine.compute(req)
    engine.retract(req, keep=False)
    assert req.swapped_out is None and engine.swap.num_pages == 0
