"""Costs of a prompt at each worker, in pages to compute.

- Whole and prefill workers: missing pages (x DUPLICATION_COST: copies, and pages that do not fit) + pages to load from
  host memory and storage x their costs + requests in flight x REMAINING_FRACTION x the recent mean of missing pages.
- Decode workers: pages to transfer x TRANSFER_COST + requests in flight, or the number that their memory use
  amounts to, x TRANSFER_COST x the mean pages of a prompt; FULL_MEMORY_COST where the prompt does not fit.
- Pairs: both together, with the cheaper transfer where they share a host.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from ..workers.kv_index import KVIndex
from ..workers.registry import Worker
from ..workers.tier_index import TierMatch

TRANSFER_COST = 0.1
"""Cost of sending a page from prefill to decode, in pages computed: an 8B model computes 16 tokens in 0.4 ms on
an H200 and sends their 2 MB in 0.04 ms over 400 Gb/s."""
SAME_HOST_TRANSFER_COST = 0.02
"""The same cost where both are on one host."""
HOST_COST = 0.12
"""Cost of loading a page from host memory, in pages computed, until the worker reports its own: an 8B model's 2 MB take
0.04 ms at 55 GB/s, and 0.4 ms to compute on an H200."""
STORAGE_COST = 0.6
"""The same cost from storage, at 8 GB/s; one NVMe disk wins little, a storage over 400 Gb/s much."""
FULL_MEMORY_COST = 1e6
"""Cost of a decode worker whose memory cannot take the prompt: it is only chosen when none can."""
DUPLICATION_COST = 2.0
"""Cost of a missing page that another worker has (a copy takes memory in which something else would be cached), or
that does not fit: it is computed, and so is the page that it evicts."""
REMAINING_FRACTION = 0.5
"""A request in flight has half of its pages still to compute on average."""
MIN_MEAN_PAGES = 4.0
"""Least mean pages of a request: even a wholly cached one takes a step."""


class PrefixMatch(NamedTuple):
    """A prompt's pages, and how many leading ones each worker need not compute (by worker id)."""

    pages: float
    cached: dict[int, int]
    """Pages on the worker's GPU, in its host memory or in its storage."""
    longest: int = 0
    """Pages that the worker with the most of them has."""
    loads: Mapping[int, TierMatch] = {}
    """Of these, where they are, for workers that have some elsewhere than on the GPU."""

    def on_gpu(self, worker_id: int) -> int:
        load = self.loads.get(worker_id)
        return self.cached.get(worker_id, 0) if load is None else load.gpu


class KVMemory(NamedTuple):
    """A worker's KV memory by its last report, in pages, and the requests that use it."""

    used: float
    total: float
    running: int = 0
    """All requests that it counts, those of other routers too."""
    load: int = 0
    """The most requests that this router had there since the report before: which of them the report counts is not
    known."""

    def remaining(self, load: int) -> float:
        """Returns the used pages without those of requests that may have ended since, where ``load`` are left."""
        ended = max(0, self.load - load)
        return self.used * max(0.0, 1 - ended / max(1, self.running, self.load))


class PageCosts:
    """Costs by the KV index, loads and ``memory``, the last report of each worker that sends any, by worker id.
    ``load_costs``: those of a page from host memory and from storage, of workers that report them."""

    def __init__(self, kv_index: KVIndex, host_cost: float | None = None, storage_cost: float | None = None):
        """``host_cost`` and ``storage_cost``: for all workers, whatever they report."""
        self._kv_index = kv_index
        self._fixed = host_cost, storage_cost
        self._default = self._load_costs_of(None, None)
        self.load_costs: dict[int, tuple[float, float]] = {}
        self.memory: dict[int, KVMemory] = {}
        self._mean_missing = MIN_MEAN_PAGES
        self.mean_pages = MIN_MEAN_PAGES

    def prefill_cost(self, worker: Worker, match: PrefixMatch) -> float:
        cached = match.cached.get(worker.id, 0)
        missing = max(0.0, match.pages - cached)
        memory = self.memory.get(worker.id)
        free = 0.0 if memory is None else memory.total - self._kv_index.sizes.get(worker.id, 0)
        duplicated = min(missing, max(0.0, missing - free, match.longest - cached))
        return (missing + (DUPLICATION_COST - 1) * duplicated + self._load_cost(worker, match) +
                worker.load * REMAINING_FRACTION * self._mean_missing)

    def _load_cost(self, worker: Worker, match: PrefixMatch) -> float:
        load = match.loads.get(worker.id)
        if load is None:
            return 0.0
        host_cost, storage_cost = self.load_costs.get(worker.id, self._default)
        return (load.host - load.gpu) * host_cost + (load.storage - load.host) * storage_cost

    def on_load_costs(self, worker: Worker, host_cost: float | None, storage_cost: float | None) -> None:
        """Notes what loading a page costs a worker by its last report; None where it does not say."""
        self.load_costs[worker.id] = self._load_costs_of(host_cost, storage_cost)

    def _load_costs_of(self, *reported: float | None) -> tuple[float, float]:
        host, storage = (default if (cost := own if own is not None else new) is None else cost
                         for own, new, default in zip(self._fixed, reported, (HOST_COST, STORAGE_COST)))
        return host, storage

    def decode_cost(self, worker: Worker, match: PrefixMatch, transfer_cost: float) -> float:
        missing = max(0.0, match.pages - match.on_gpu(worker.id))
        memory = self.memory.get(worker.id)
        running: float = worker.load
        full = 0.0
        if memory is not None:
            running = max(running, memory.remaining(worker.load) / self.mean_pages)
            full = FULL_MEMORY_COST if memory.total - memory.used < missing else 0.0
        return missing * transfer_cost + running * TRANSFER_COST * self.mean_pages + full

    def record(self, match: PrefixMatch, cached: int) -> None:
        """Takes a placed prompt into the means; ``cached`` of its pages are on its worker."""
        missing = max(0.0, match.pages - cached)
        self._mean_missing += (max(missing, MIN_MEAN_PAGES) - self._mean_missing) * 0.02
        self.mean_pages += (max(match.pages, MIN_MEAN_PAGES) - self.mean_pages) * 0.02
