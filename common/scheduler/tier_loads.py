"""Requests whose pages a KV tier is loading: found at admission, and computed or sent on once all ranks have them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ..kvcache.manager import KVCacheManager, PageTable
from ..request.req import Req

if TYPE_CHECKING:
    from ..kvcache.tiers.base import KVTier, TierTask

Then = Callable[[Req], None]


@dataclass(eq=False)
class _Load:
    """``abandoned``: the page table of a request that left meanwhile; its pages are freed when no copy writes them."""

    req: Req
    task: TierTask
    then: Then
    abandoned: PageTable | None = None


class TierLoads:
    """Loads of one rank. ``min_reduce`` takes the minimum of each number over the ranks of the group, whose tiers may
    have different pages and speeds; they make the same calls, so they go on with the same number of pages at once."""

    def __init__(self, cache: KVCacheManager, tier: KVTier, min_reduce: Callable[[np.ndarray], np.ndarray]):
        self._cache = cache
        self._tier = tier
        self._min_reduce = min_reduce
        self._loads: list[_Load] = []
        self.num_loaded = 0  # pages

    def __len__(self) -> int:
        return len(self._loads)

    def start(self, req: Req, limit: int, then: Then) -> bool:
        """Load what the tier has of the first ``limit`` tokens of ``req``, whose page table covers them, and the prefix
        cache has not. True where the request has to wait: ``finished`` names it later, with ``then``."""
        table = req.page_table
        assert table is not None
        keys = [] if req.swapped_out is not None else self._cache.tier_keys(table, req.tokens.view(), limit)
        if not keys:
            return False
        (count,) = self._min_reduce(np.array([self._tier.lookup(keys)], np.int64)).tolist()
        if not count:
            return False
        first = table.num_cached_pages
        load = _Load(req, self._tier.load(keys[:count], table.ids[first:first + count].copy()), then)
        if not self._publish_done([load]):
            self._loads.append(load)
            return True
        return False

    def finished(self) -> list[tuple[Req, Then]]:
        """The requests whose pages have been loaded since the last call, in the order in which they began."""
        if not self._loads:
            return []
        self._tier.poll()
        done = self._publish_done(self._loads)
        self._loads = [load for load in self._loads if load not in done]
        return [(load.req, load.then) for load in done if load.abandoned is None]

    def abandon(self, reqs: Sequence[Req]) -> None:
        """Forget requests, and keep their pages until the copies into them have ended."""
        leaving = set(reqs)
        for load in self._loads:
            if load.req in leaving and load.abandoned is None:
                load.abandoned, load.req.page_table = load.req.page_table, None

    def _publish_done(self, loads: list[_Load]) -> list[_Load]:
        """The loads that are done on all ranks, whose pages are the prefix cache's now, or free."""
        counts = self._min_reduce(np.array([load.task.num_pages if load.task.done else -1 for load in loads], np.int64))
        done = [(load, count) for load, count in zip(loads, counts.tolist()) if count >= 0]
        for load, count in done:
            if load.abandoned is not None:
                load.task.wait()
                self._cache.release(load.abandoned)
            else:
                assert load.req.page_table is not None
                self._cache.add_loaded(load.req.page_table, load.req.tokens.view(), count)
                self.num_loaded += count
        return [load for load, _ in done]
