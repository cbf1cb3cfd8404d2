"""Prefetches: pages of waiting requests that a storage fills into host memory, before the requests are admitted.

At arrival the storage is asked for what neither the prefix cache nor host memory has. The ranks agree on the leading
pages that all of them find, reserve the same slots, and read; what all of them have read is published, so that
``lookup`` finds it. Reads of requests that leave go on until they have ended: only then are their slots reused.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from ..config.server.tiers import PrefetchLimits, PrefetchPolicy
from ..distributed.agreement import RankAgreement
from ..kvcache.manager import KVCacheManager
from ..kvcache.page_keys import PageKey
from ..kvcache.storage.page_servers import PageServers
from ..kvcache.storage.storage import StorageCounters
from ..kvcache.tiers.base import HostSlots, KVTier
from ..request.req import Req
from .preemption.copy_rates import AgreedRates

_MOST_OF_HOST = 0.5
"""Share of host memory that prefetches may hold: reserved, or kept until their requests are admitted."""
_DRAIN_SECONDS = 5.0
"""Longest that a server waits at its end for pages to be written."""


class Query(Protocol):
    """A question to the storage: ``count`` leading pages are there, once ``done``."""

    @property
    def done(self) -> bool: ...

    @property
    def count(self) -> int: ...


class Read(Protocol):
    """Pages on their way into slots: ``num_pages`` leading ones are there; no slot is written once ``done``."""

    @property
    def done(self) -> bool: ...

    @property
    def num_pages(self) -> int: ...

    def cancel(self) -> None: ...


class Storage(Protocol):
    """Asks and reads in the background; see kvcache/storage/storage.py."""

    @property
    def name(self) -> str: ...

    def query(self, keys: Sequence[PageKey]) -> Query: ...

    def read(self, keys: Sequence[PageKey], slots: np.ndarray) -> Read: ...

    def close(self, drain_seconds: float = 0.0) -> None: ...

    @property
    def counters(self) -> StorageCounters: ...

    @property
    def read_rate(self) -> float: ...

    @property
    def num_queued_writes(self) -> int: ...

    @property
    def healthy(self) -> bool: ...


class HostMemory(KVTier, HostSlots, Protocol):
    """A tier with slots for a storage."""


@dataclass(eq=False)
class Prefetch:
    """``keys`` of the pages that host memory lacks. ``slots`` are reserved, for the first of them; ``num_read`` of
    these the ranks agree on. ``kept``: pages that are pinned until the request is admitted."""

    req: Req
    number: int
    keys: list[PageKey]
    kept: list[PageKey]
    query: Query
    began: float | None = None
    found: int = 0
    read: Read | None = None
    slots: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))
    num_read: int = 0
    ended: bool = False

    @property
    def key(self) -> int:
        """Names its present phase to the other ranks."""
        return 2 * self.number + (self.read is not None)

    def state(self) -> tuple[bool, int]:
        """Whether the phase is over on this rank, and its pages."""
        if self.read is None:
            return (True, self.query.count) if self.query.done else (False, 0)
        done = self.read.done  # before num_pages, which is final then
        return done, self.read.num_pages


class Prefetches:
    """Prefetches of one rank; all ranks of ``group`` make the same calls."""

    def __init__(self, cache: KVCacheManager, host: HostMemory, storage: Storage | None, group: RankAgreement,
                 rates: AgreedRates, policy: PrefetchPolicy = "best_effort",
                 limits: PrefetchLimits = PrefetchLimits(),  # noqa: B008 (frozen)
                 open_storage: Callable[[str, Mapping[str, Any]], Storage] | None = None,
                 page_servers: PageServers | None = None):
        """``open_storage`` opens one by its name and options, for ``open``. ``page_servers``: those that this rank
        hears of, for storages that read other servers' host memory."""
        self._open_storage = open_storage
        self.page_servers = page_servers or PageServers()
        self._cache, self._host, self.storage = cache, host, storage
        self._group, self._rates = group, rates
        rates.storage_rate = lambda: 0.0 if self.storage is None else self.storage.read_rate
        self._policy, self._limits = policy, limits
        self._numbers = itertools.count()
        self._of: dict[Req, Prefetch] = {}
        self._draining: list[Prefetch] = []  # their slots from ``num_read`` on are written until the reads are done
        self._num_held = 0
        self.counters: dict[str, float] = dict.fromkeys(
            ("prefetches", "prefetched_pages", "prefetches_refused", "prefetch_wait_seconds"), 0)

    def __repr__(self) -> str:
        return f"Prefetches({len(self._of)} open, {len(self._draining)} draining, {self._num_held} pages held)"

    @property
    def policy(self) -> PrefetchPolicy:
        return self._policy

    @property
    def storage_counters(self) -> dict[str, float]:
        """What the storage did since it was attached, on this rank."""
        if self.storage is None:
            return {}
        done = self.storage.counters
        return {"storage_pages_read": done.read_pages, "storage_pages_written": done.written_pages,
                "storage_bytes_read": done.read_bytes, "storage_bytes_written": done.written_bytes,
                "storage_read_seconds": done.read_seconds, "storage_write_seconds": done.write_seconds,
                "storage_pages_dropped": done.dropped + done.lost, "storage_objects_evicted": done.evicted,
                "storage_times_aside": done.times_aside,
                **{f"storage_errors_{kind}": count for kind, count in done.errors.items()}}

    @property
    def storage_gauges(self) -> dict[str, float]:
        if self.storage is None:
            return {}
        return {"storage_pages_queued": self.storage.num_queued_writes, "storage_healthy": float(self.storage.healthy)}

    @property
    def busy(self) -> bool:
        """True while reads of requests that have left are in flight."""
        return bool(self._draining)

    @property
    def num_held(self) -> int:
        """Slots of host memory that are reserved or kept."""
        return self._num_held

    def start(self, req: Req, limit: int) -> None:
        """Ask the storage for pages of the first ``limit`` tokens of a request that has arrived."""
        if self.storage is None or req in self._of or req.embeds is not None:
            return
        keys = self._cache.keys_beyond_cache(req.tokens.view(), limit, req.namespace)
        num_host = self._host.lookup(keys)
        if not len(keys) > num_host or (len(keys) - num_host) * self._cache.page_size < self._limits.prefetch_threshold:
            return
        kept = keys[:min(num_host, max(0, self._limit - self._num_held))]
        self._host.pin(kept)
        self._num_held += len(kept)
        missing = keys[num_host:]
        self._of[req] = Prefetch(req, next(self._numbers), missing, kept, self.storage.query(missing))
        self.counters["prefetches"] += 1

    def poll(self, now: float) -> None:
        """Go on with what all ranks have; once a step."""
        if not self._of and not self._draining:
            return
        phases = [each for each in (*self._of.values(), *self._draining) if not each.ended]
        agreed = self._group.min_by_key("prefetches", [each.key for each in phases], self._sample, (False, 0))
        for prefetch, (done, count) in zip(phases, agreed.tolist()):
            if prefetch.began is None:
                prefetch.began = now
            if prefetch.req not in self._of or self._of[prefetch.req] is not prefetch:
                if done:
                    self._host.unreserve(prefetch.slots[prefetch.num_read:])
                    self._num_held -= len(prefetch.slots) - prefetch.num_read
                    prefetch.ended = True
            elif prefetch.read is None:
                if done:
                    self._begin_read(prefetch, count)
            else:
                prefetch.num_read = count
                if done:
                    self._publish(prefetch)
                    self._host.unreserve(prefetch.slots[count:])
                    self._num_held -= len(prefetch.slots) - count
                    prefetch.ended = True
        self._draining = [each for each in self._draining if not each.ended]

    def is_ready(self, req: Req, now: float) -> bool:
        """True where the policy lets ``req`` wait no longer."""
        prefetch = self._of.get(req)
        if prefetch is None or prefetch.ended or self._policy == "best_effort":
            return True
        if prefetch.began is None:
            return False
        limits = self._limits
        most = (limits.prefetch_timeout_max if self._policy == "wait_complete"
                else limits.timeout(len(prefetch.keys) * self._cache.page_size))
        return now - prefetch.began >= most

    def count_wait(self, req: Req, now: float) -> None:
        """Record that a request has waited for its prefetch until ``now``."""
        prefetch = self._of.get(req)
        if prefetch is not None and prefetch.began is not None:
            self.counters["prefetch_wait_seconds"] += now - prefetch.began

    def take(self, req: Req) -> tuple[list[PageKey], set[PageKey]]:
        """End the prefetch of a request that is admitted, and publish what all ranks have read. Returns the pages that
        are pinned for it, for ``release``, and those that came from the storage."""
        prefetch = self._of.get(req)
        if prefetch is None:
            return [], set()
        self._leave(prefetch, publish=True)
        return prefetch.kept, set(prefetch.keys[:prefetch.num_read])

    def release(self, kept: Sequence[PageKey]) -> None:
        """Let pages be evicted that ``take`` has returned."""
        self._host.unpin(kept)
        self._num_held -= len(kept)

    def abandon(self, reqs: Iterable[Req]) -> None:
        """Forget requests that leave."""
        for req in reqs if self._of else ():
            if (prefetch := self._of.get(req)) is not None:
                self._leave(prefetch, publish=False)
                self.release(prefetch.kept)

    def clear(self) -> None:
        """Forget all prefetches: host memory was cleared, and so were its pins."""
        for prefetch in list(self._of.values()):
            self._leave(prefetch, publish=False)
            self._num_held -= len(prefetch.kept)

    def open(self, name: str, options: Mapping[str, Any]) -> Storage:
        """Opens a storage that ``attach`` may take. Raises ConfigError."""
        assert self._open_storage is not None
        return self._open_storage(name, options)

    def attach(self, storage: Storage, policy: PrefetchPolicy | None, limits: PrefetchLimits) -> None:
        """Use ``storage`` from now on, in the same iteration on all ranks, while there are no requests and no other
        storage. ``policy``: None leaves it as it is."""
        assert self.storage is None and not self._of and not self._draining
        self.storage, self._policy, self._limits = storage, policy or self._policy, limits

    def close(self) -> None:
        """Close the storage, after what host memory was given last has been written."""
        if self.storage is not None:
            self.storage.close(_DRAIN_SECONDS)
            self.storage = None

    def check_integrity(self) -> None:
        """Asserts, for a moment without requests, that nothing is held."""
        assert not self._of and (self._draining or self._num_held == 0), repr(self)

    @property
    def _limit(self) -> int:
        return int(_MOST_OF_HOST * self._host.capacity)

    def _sample(self) -> dict[int, tuple[bool, int]]:
        return {each.key: each.state() for each in (*self._of.values(), *self._draining) if not each.ended}

    def _begin_read(self, prefetch: Prefetch, found: int) -> None:
        """Read the ``found`` pages that all ranks have found, as many as fit; where that is too slow, none. Without
        memory it is tried again."""
        page_size = self._cache.page_size
        queued = sum(len(each.slots) - each.num_read for each in (*self._of.values(), *self._draining)
                     if each.read is not None and not each.ended)
        if self.storage is None or found * page_size < self._limits.prefetch_threshold:
            prefetch.ended = True
            return
        if not self._rates.should_read((queued + found) * self._host.page_bytes, found * page_size):
            prefetch.ended = True
            self.counters["prefetches_refused"] += 1
            return
        count = min(found, self._limit)
        if count > self._limit - self._num_held or (slots := self._host.reserve(count)) is None:
            prefetch.ended = count == 0
            return
        self._num_held += count
        prefetch.slots = slots
        prefetch.read = self.storage.read(prefetch.keys[:count], slots)

    def _publish(self, prefetch: Prefetch) -> None:
        """Publish the pages that all ranks have read, and keep them."""
        keys = prefetch.keys[:prefetch.num_read]
        self._host.publish(keys, prefetch.slots[:prefetch.num_read])
        kept = keys[:self._host.lookup(keys)]
        self._host.pin(kept)
        prefetch.kept = [*prefetch.kept, *kept]
        self._num_held -= len(keys) - len(kept)
        self.counters["prefetched_pages"] += len(keys)

    def _leave(self, prefetch: Prefetch, *, publish: bool) -> None:
        """Take a prefetch out; its read, where one is in flight, is cancelled."""
        del self._of[prefetch.req]
        if prefetch.read is None or prefetch.ended:
            return
        prefetch.read.cancel()
        if publish:
            self._publish(prefetch)
        else:
            prefetch.num_read = 0
        self._draining.append(prefetch)
