"""What a prompt costs at a worker, in pages to compute.

- Whole and prefill workers: missing pages (x STORING: copies, and those without room) + requests in flight x
  REMAINING x the mean of pages missing of late.
- Decode workers: pages to be sent x TRANSFER + requests in flight, or what their memory says they
  come to, x TRANSFER x the mean pages of a prompt; FULL where the prompt does not fit.
- Pairs: both together, with the cheaper transfer where they share a host.
"""

from __future__ import annotations

from typing import NamedTuple

from ..workers.kv_index import KVIndex
from ..workers.registry import Worker

TRANSFER = 0.1
"""Cost of sending a page from prefill to decode, in pages computed: an 8B model computes 16 tokens in 0.4 ms on
an H200 and sends their 2 MB in 0.04 ms over 400 Gb/s."""
TRANSFER_NEAR = 0.02
"""The same where both are on one host."""
FULL = 1e6
"""Cost of a decode worker whose memory lacks room: only taken when all lack it."""
STORING = 2.0
"""Cost of a missing page that another worker has (a copy takes room in which something else would be found again), or
that finds no room: it is computed, and so is what it pushes out."""
REMAINING = 0.5
"""Of a request in flight, what is still to be computed: half on the average."""
LEAST_MEAN = 4.0
"""Pages of a request that waits in front, at least: even a wholly cached one takes a step."""


class Share(NamedTuple):
    """A prompt beside the fleet: its pages, and how many of them each worker has (by worker id)."""

    pages: float
    cached: dict[int, int]
    most: int = 0
    """Pages that the worker with the most of them has."""


class Memory(NamedTuple):
    """A worker's KV memory by its last report, in pages."""

    used: float
    total: float


class PageCosts:
    """``memory`` is that of each worker that tells it, by id; the means are of the prompts that ``note`` was told."""

    def __init__(self, residency: KVIndex):
        self._residency = residency
        self.memory: dict[int, Memory] = {}
        self._mean_missing = LEAST_MEAN
        self.mean_pages = LEAST_MEAN

    def computing(self, worker: Worker, share: Share) -> float:
        own = share.cached.get(worker.id, 0)
        missing = max(0.0, share.pages - own)
        memory = self.memory.get(worker.id)
        room = 0.0 if memory is None else memory.total - self._residency.sizes.get(worker.id, 0)
        copied = min(missing, max(0.0, missing - room, share.most - own))
        return missing + (STORING - 1) * copied + worker.load * REMAINING * self._mean_missing

    def decoding(self, worker: Worker, share: Share, transfer: float) -> float:
        missing = max(0.0, share.pages - share.cached.get(worker.id, 0))
        memory = self.memory.get(worker.id)
        running: float = worker.load
        full = 0.0
        if memory is not None:
            running = max(running, memory.used / self.mean_pages)
            full = FULL if memory.total - memory.used < missing else 0.0
        return missing * transfer + running * TRANSFER * self.mean_pages + full

    def note(self, share: Share, cached: int) -> None:
        """A prompt goes where ``cached`` of its pages are."""
        missing = max(0.0, share.pages - cached)
        self._mean_missing += (max(missing, LEAST_MEAN) - self._mean_missing) * 0.02
        self.mean_pages += (max(share.pages, LEAST_MEAN) - self.mean_pages) * 0.02
