"""Requests and the KV tier: what is prefetched for them, loaded at their admission, and kept while they are retracted.

The tier's index is the same on all ranks, and so are the rates by which loading is weighed against computing. When a
load has ended, the ranks agree on by RankAgreement; nothing here blocks.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..api.messages import LoadedTokens
from ..kvcache.manager import KVCacheManager, PageTable
from ..kvcache.page_keys import PageKey
from ..request.req import Req

if TYPE_CHECKING:
    from ..distributed.agreement import RankAgreement
    from ..kvcache.tiers.base import GrowingTier, KVTier, TierTask
    from .preemption.copy_rates import AgreedRates
    from .tier_prefetch import Prefetches

Then = Callable[[Req], None]

_MOST_OF_HOST = 0.5
"""Share of host memory that pages of retracted requests may keep."""
_PROBED_PAGES = 4
"""Pages whose keys are computed before all: of most prompts the tier has none."""


@dataclass(eq=False)
class _Load:
    """``abandoned``: the page table of a request that left meanwhile; its pages are freed when no copy writes them.
    ``num_stored``: how many of the pages had come from the storage."""

    req: Req
    task: TierTask
    then: Then
    number: int
    num_pages: int
    num_stored: int
    abandoned: PageTable | None = None


class TierLoads:
    """The part of one rank; all ranks of ``group`` make the same calls in the same order."""

    def __init__(self, cache: KVCacheManager, tier: KVTier, group: RankAgreement, rates: AgreedRates,
                 prefetches: Prefetches | None = None, *, alone: bool = True, shared: bool = False):
        """``alone``: the group has one rank, so that a load may be over when it was begun. ``shared``: peers write into
        free pages of the pool, so that a load has to be complete for everyone."""
        self._cache, self._tier = cache, tier
        self._group, self._rates = group, rates
        self.prefetches = prefetches
        self._alone, self._shared = alone, shared
        self._numbers = itertools.count()
        self._loads: list[_Load] = []
        self._kept: dict[Req, list[PageKey]] = {}  # of retracted requests, pinned
        self._now = 0.0
        self.num_loaded = 0  # pages
        self.num_computed = 0  # pages that the tier had, and that were cheaper to compute
        self.num_loaded_stored = 0  # of the loaded pages those that had come from the storage
        if (listeners := getattr(tier, "listeners", None)) is not None:
            listeners.append(self)
        self._grows = hasattr(tier, "num_allocated")

    def __len__(self) -> int:
        return len(self._loads) + (self.prefetches is not None and self.prefetches.busy)

    # -- before admission --------------------------------------------------------------------------------------------

    def prefetch(self, req: Req, limit: int) -> None:
        """Begin to fetch what the storage has of the first ``limit`` tokens of a request that has arrived."""
        if self.prefetches is not None:
            self.prefetches.start(req, limit)

    def is_ready(self, req: Req) -> bool:
        """False while ``req`` should wait for its prefetch, and others be admitted before it."""
        return self.prefetches is None or self.prefetches.is_ready(req, self._now)

    def waited(self, req: Req) -> None:
        """``req`` waits for its prefetch no longer."""
        if self.prefetches is not None:
            self.prefetches.count_wait(req, self._now)

    # -- at admission ------------------------------------------------------------------------------------------------

    def start(self, req: Req, limit: int, then: Then) -> bool:
        """Load what the tier has of the first ``limit`` tokens of ``req``, whose page table covers them, and the prefix
        cache has not, where that is cheaper. True where the request has to wait: ``finished`` names it later, with
        ``then``."""
        kept, stored = self.prefetches.take(req) if self.prefetches is not None else ([], set())
        self._count_loaded(req, 0, 0)
        load = self._begin(req, limit, then, stored)
        self.forget([req])
        if self.prefetches is not None:
            self.prefetches.release(kept)
        if load is None:
            return False
        self._loads.append(load)
        if self._alone and load.task.done:
            self._end(load, load.task.num_pages)
            self._loads.pop()
            return False
        return True

    def _begin(self, req: Req, limit: int, then: Then, stored: set[PageKey]) -> _Load | None:
        table = req.page_table
        assert table is not None
        if req.swapped_out is not None or not (keys := self._found(table, req, limit)):
            return None
        count = len(keys)
        queued = sum(load.num_pages for load in self._loads)
        page_size, page_bytes = self._cache.page_size, self._tier.page_bytes
        if not self._rates.should_load((queued + count) * page_bytes, count * page_size):
            self.num_computed += count
            return None
        self._tier.pin(keys)  # pages of further groups that are evicted for these are stored
        page_ids = self._cache.allocate_loaded(table, count)
        if page_ids is None:
            self._tier.unpin(keys)
            self.num_computed += count
            return None
        rest = req.length - (table.num_cached_pages + count) * page_size
        task = self._tier.load(keys, page_ids if len(page_ids) > 1 else page_ids[0],
                               0.0 if self._shared else self._rates.compute_seconds(rest))
        self._tier.unpin(keys)
        return _Load(req, task, then, next(self._numbers), count, sum(key in stored for key in keys))

    def _found(self, table: PageTable, req: Req, limit: int) -> list[PageKey]:
        """The leading keys that the tier has, of the pages after those in the prefix cache."""
        tokens = req.tokens.view()
        probed = (table.num_cached_pages + _PROBED_PAGES) * self._cache.page_size
        if not self._cache.loads_any_prefix:
            probed = limit
        keys = self._cache.tier_keys(table, tokens, min(limit, probed))
        count = self._tier.lookup(keys)
        if count == _PROBED_PAGES and probed < limit:
            keys = self._cache.tier_keys(table, tokens, limit)
            count = self._tier.lookup(keys)
        return keys[:count]

    # -- each step ---------------------------------------------------------------------------------------------------

    def finished(self, now: float = 0.0) -> list[tuple[Req, Then]]:
        """The requests whose pages have been loaded since the last call, in the order in which they began. Once a step,
        of which ``now`` is the time on all ranks."""
        self._now = now
        self._cache.poll_tier(self._min_copied)
        if self._grows:
            self._grow(self._tier)  # type: ignore[arg-type]
        if self.prefetches is not None:
            self.prefetches.poll(now)
        if not self._loads:
            return []
        counts = self._group.min_by_key("loads", [load.number for load in self._loads], self._sample, (-1,))
        done = [(load, count) for load, (count,) in zip(self._loads, counts.tolist()) if count >= 0]
        for load, count in done:
            self._end(load, count)
            self._loads.remove(load)
        return [(load.req, load.then) for load, _ in done if load.abandoned is None]

    def _min_copied(self, copied: Callable[[], int]) -> int:
        """The evictions whose pages have been copied on all ranks."""
        ((count,),) = self._group.min_by_key("copied", [0], lambda: {0: (copied(),)}, (0,)).tolist()
        return int(count)

    def _grow(self, tier: GrowingTier) -> None:
        """Use the memory that all ranks have by now."""
        ((count,),) = self._group.min_by_key("tier_pages", [0], lambda: {0: (tier.num_allocated,)}, (0,)).tolist()
        if count > self._tier.capacity:
            tier.grow(count)

    def flush(self) -> None:
        """Start the copies that this step has queued, after its launch."""
        self._tier.flush()

    def _sample(self) -> dict[int, tuple[int]]:
        return {load.number: (load.task.num_pages if load.task.done else -1,) for load in self._loads}

    def _end(self, load: _Load, num_pages: int) -> None:
        """Give the pages of a load that is done on all ranks to the prefix cache, or free them."""
        if self._shared or load.abandoned is not None:
            load.task.wait()
        self._tier.finish(load.task)
        if load.abandoned is not None:
            self._cache.release(load.abandoned)
            return
        req = load.req
        assert req.page_table is not None and (num_pages == load.num_pages or not self._cache.groups)
        self._cache.add_loaded(req.page_table, req.tokens.view(), num_pages)
        self.num_loaded += num_pages
        num_stored = min(load.num_stored, num_pages)
        self.num_loaded_stored += num_stored
        self._count_loaded(req, num_pages - num_stored, num_stored)

    def _count_loaded(self, req: Req, num_host: int, num_stored: int) -> None:
        """Record for the request's report how many pages each tier gave its prompt."""
        if not req.num_retractions:
            storage, page_size = None if self.prefetches is None else self.prefetches.storage, self._cache.page_size
            req.loaded = LoadedTokens(num_host * page_size, num_stored * page_size,
                                      None if storage is None else storage.name)

    # -- retracted requests, and those that leave --------------------------------------------------------------------

    def keep(self, req: Req) -> None:
        """Keep the computed pages of a request that is retracted in the tier until it is admitted again, where there is
        room for them; afterwards its page table may be released to the prefix cache."""
        table = req.page_table
        assert table is not None
        room = int(_MOST_OF_HOST * self._tier.capacity) - sum(map(len, self._kept.values()))
        keys, page_ids = self._cache.computed_pages(table, req.computed(self._cache.lookahead))
        if not 0 < len(keys) <= room:
            return
        task = self._tier.store(keys, page_ids)
        if not task.done:  # pages that the prefix cache has twice become free now
            task.wait_on_device()
            if self._shared:
                task.wait()
        kept = keys[:self._tier.lookup(keys)]
        self._tier.pin(kept)
        self._kept[req] = kept

    def forget(self, reqs: Sequence[Req]) -> None:
        """Let the pages be evicted that are kept for requests."""
        for req in reqs if self._kept else ():
            if (kept := self._kept.pop(req, None)) is not None:
                self._tier.unpin(kept)

    def abandon(self, reqs: Sequence[Req]) -> None:
        """Forget requests, and keep their pages until the copies into them have ended."""
        self.forget(reqs)
        if self.prefetches is not None:
            self.prefetches.abandon(reqs)
        leaving = set(reqs) if self._loads else set()
        for load in self._loads:
            if load.req in leaving and load.abandoned is None:
                load.abandoned, load.req.page_table = load.req.page_table, None

    def stored(self, keys: Sequence[PageKey]) -> None:
        """Implements HostListener: nothing waits for copies out of the pool."""

    def dropped(self, keys: Sequence[PageKey]) -> None:
        """Implements HostListener: what is lost is computed."""

    def cleared(self) -> None:
        """Implements HostListener: pins have gone with the pages."""
        self._kept.clear()
        if self.prefetches is not None:
            self.prefetches.clear()

    def close(self) -> None:
        """Close the storage; the tier is the cache's."""
        if self.prefetches is not None:
            self.prefetches.close()

    @property
    def counters(self) -> dict[str, float]:
        """What the tiers did, for the engine's report: pages and bytes, of this rank."""
        tier, size = self._tier.counters, self._tier.page_bytes
        found: dict[str, float] = {
            "tier_pages_stored": tier.stored, "tier_pages_loaded": self.num_loaded, "tier_pages_evicted": tier.evicted,
            "tier_bytes_stored": tier.stored * size, "tier_bytes_loaded": self.num_loaded * size,
            "tier_pages_computed": self.num_computed, "tier_pages_loaded_from_storage": self.num_loaded_stored}
        return found if self.prefetches is None else found | self.prefetches.counters | self.prefetches.storage_counters

    @property
    def gauges(self) -> dict[str, float]:
        """Host memory in tokens, by SGLang's names, and what loads cost."""
        page_size = self._cache.page_size
        found: dict[str, float] = {"hicache_host_used_tokens": self._tier.num_pages * page_size,
                                   "hicache_host_total_tokens": self._tier.capacity * page_size,
                                   **self._rates.page_costs(self._tier.page_bytes, page_size)}
        return found if self.prefetches is None else found | self.prefetches.storage_gauges

    def check_integrity(self) -> None:
        """Asserts, for a moment without requests, that the tier keeps nothing for any."""
        assert not self._kept and not self._loads, (self._kept, self._loads)
        if self.prefetches is not None:
            self.prefetches.check_integrity()
