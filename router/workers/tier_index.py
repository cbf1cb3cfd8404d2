"""Which worker can load which pages without computing them, by the medium that its KV events name. No I/O.

A prompt's beginning may be on the GPU and its continuation in host memory: pages of either count, and each has a cost
of its own. Storage is taken for one that all workers with a storage share: what one has written any other reads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from ...common.api.kv_events import GPU, HOST, Cleared, Event, Hash, Removed, Stored
from .kv_index import KVIndex

Runs = Callable[[], Iterable[tuple[int, Sequence[int]]]]
"""Makes the argument of ``KVIndex.match``."""

_STORAGE = -1
"""Stands for the storage where the index has workers."""


class TierMatch(NamedTuple):
    """Leading pages of a prompt that a worker need not compute: on its GPU, with those in host memory after them, and
    with those in storage after these."""

    gpu: int
    host: int
    storage: int


class TierIndex:
    """The KV index of GPUs, ``gpu``, and those of host memory and storage, which are empty where no worker has any."""

    def __init__(self) -> None:
        self.gpu = KVIndex()
        self.loadable = KVIndex()
        """Pages on the GPU or in host memory, of the workers that have any in host memory."""
        self.storage = KVIndex()
        self._in_host: dict[int, set[Hash]] = {}
        self.with_storage: set[int] = set()
        """Ids of workers that read the storage."""

    def __repr__(self) -> str:
        return f"TierIndex({self.gpu}, {len(self.loadable)} pages with host memory, {len(self.storage)} in storage)"

    def apply(self, worker_id: int, events: Iterable[Event], *, native: bool = True) -> None:
        """Takes in a worker's events; ``native`` where its hashes are ``page_hashes``."""
        for event in events:
            if isinstance(event, Cleared):
                self.clear(worker_id)
            elif event.medium == GPU:
                self.gpu.apply(worker_id, (event,), native=native)
                if worker_id in self._in_host:
                    self._apply_loadable(worker_id, event, native)
            elif event.medium == HOST:
                self._apply_host(worker_id, event, native)
            elif native:  # other engines' hashes are known by worker
                self.with_storage.add(worker_id)
                self.storage.apply(_STORAGE, (event,))

    def clear(self, worker_id: int) -> None:
        """Removes all pages of a worker, but for those that it wrote to the storage."""
        self.gpu.clear(worker_id)
        if self._in_host.pop(worker_id, None) is not None:
            self.loadable.forget(worker_id)

    def forget(self, worker_id: int) -> None:
        """Removes a worker that left."""
        self.clear(worker_id)
        self.gpu.forget(worker_id)
        self.with_storage.discard(worker_id)

    @property
    def page_sizes(self) -> set[int]:
        """Tokens a page of all workers."""
        return {size for index in (self.gpu, self.loadable, self.storage) for size in index.page_sizes.values()}

    def match(self, runs: Runs) -> tuple[dict[int, int], dict[int, TierMatch]]:
        """The number of leading pages that each worker need not compute, for workers that have any; and where they are,
        for workers that have some of them elsewhere than on the GPU."""
        cached, loads = self.gpu.match(runs()), {}
        if len(self.loadable):
            for worker, pages in self.loadable.match(runs()).items():
                if pages > (gpu := cached.get(worker, 0)):
                    loads[worker] = TierMatch(gpu, pages, pages)
        if self.with_storage and (stored := self.storage.match(runs()).get(_STORAGE, 0)):
            for worker in self.with_storage:
                gpu = cached.get(worker, 0)
                here = loads.get(worker) or TierMatch(gpu, gpu, gpu)
                if stored > here.host:
                    loads[worker] = here._replace(storage=stored)
        cached.update((worker, here.storage) for worker, here in loads.items())
        return cached, loads

    def _apply_host(self, worker_id: int, event: Stored | Removed, native: bool) -> None:
        if isinstance(event, Removed):
            self._in_host.get(worker_id, set()).difference_update(event.hashes)
            gone = [own for own in event.hashes if not self.gpu.has(worker_id, own)]
            self.loadable.apply(worker_id, (event._replace(hashes=gone),))
            return
        if worker_id not in self._in_host:  # vLLM's pages are known from the GPU's events, or not at all
            self._in_host[worker_id] = set()
            self.loadable.copy_worker(worker_id, self.gpu)
        if native or event.token_ids:
            self.loadable.apply(worker_id, (event,), native=native)
        self._in_host[worker_id].update(own for own in event.hashes if self.loadable.has(worker_id, own))

    def _apply_loadable(self, worker_id: int, event: Stored | Removed, native: bool) -> None:
        if isinstance(event, Removed):
            in_host = self._in_host[worker_id]
            event = event._replace(hashes=[own for own in event.hashes if own not in in_host])
        self.loadable.apply(worker_id, (event,), native=native)
