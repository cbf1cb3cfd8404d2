"""The KV index: which worker has which pages in its prefix cache, by the workers' own events. Plain state, no I/O."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain, islice
from typing import cast

from ...common.api.kv_events import Cleared, Event, Hash, Removed, Stored, page_hashes
from .worker_sets import EMPTY_SET, WorkerSets

MAX_PAGES_PER_WORKER = 2**20
"""200 MB at worst: 16 million tokens in pages of 16, more than fit on a GPU."""

MAX_PAGES = 2**22
"""Different pages of all workers, 700 MB at worst: 67 million tokens in pages of 16. Those beyond count as absent."""
MAX_MATCHED_WORKERS = 64
"""Workers that a match names of those with equally many pages: looking at a thousand would take longer than is won."""


class KVIndex:
    """Page hash -> ids of the workers that have the page cached, kept up to date by their events.

    Pages are known by ``page_hashes`` of their tokens. Our servers send these. Other engines' hashes
    are their own secret, so theirs are computed from the tokens and only serve to find a page again.
    """

    def __init__(self) -> None:
        self._workers_of: dict[int, int] = {}
        """Page hash -> number of the set of its workers."""
        self._sets = WorkerSets()
        self._rotation = 0
        self._pages: dict[int, dict[Hash, int]] = {}
        """Worker id -> the worker's own hash of a page -> ``page_hashes``' hash of it."""
        self.sizes: dict[int, int] = {}
        """Pages of each worker that ever stored one."""
        self.page_sizes: dict[int, int] = {}
        """Tokens a page of each worker that ever stored one."""

    def __len__(self) -> int:
        return len(self._workers_of)

    def __repr__(self) -> str:
        return f"KVIndex({len(self._workers_of)} pages, by worker {self.sizes})"

    def apply(self, worker_id: int, events: Iterable[Event], *, native: bool = True) -> None:
        """Takes in a worker's events; ``native`` where its hashes are ``page_hashes``."""
        for event in events:
            if isinstance(event, Stored):
                self._store(worker_id, event, native)
            elif isinstance(event, Removed):
                self._remove(worker_id, event.hashes)
            elif isinstance(event, Cleared):
                self.clear(worker_id)
        if worker_id in self._pages:
            self.sizes[worker_id] = len(self._pages[worker_id])

    def has(self, worker_id: int, own_hash: Hash) -> bool:
        """True where the worker has stored a page under this hash of its own."""
        return own_hash in self._pages.get(worker_id, ())

    def copy_worker(self, worker_id: int, other: KVIndex) -> None:
        """Adds the pages that the worker has in another index."""
        if (size := other.page_sizes.get(worker_id)) is not None:
            pages = other._pages.get(worker_id, {})
            self.page_sizes[worker_id] = size
            self._add(worker_id, pages.keys(), pages.values())

    def clear(self, worker_id: int) -> None:
        """Removes all pages of a worker."""
        for page in set(self._pages.pop(worker_id, {}).values()):
            self._drop(page, worker_id)
        self.sizes[worker_id] = 0

    def forget(self, worker_id: int) -> None:
        """Removes a worker that left."""
        self.clear(worker_id)
        self.page_sizes.pop(worker_id, None)
        self.sizes.pop(worker_id, None)

    def match(self, runs: Iterable[tuple[int, Sequence[int]]]) -> dict[int, int]:
        """Returns the number of leading pages that each worker has, for workers that have any.

        ``runs`` yields ``(number of pages up to its end, hashes)`` from the prompt's beginning on, of all pages or of
        some; it is read no further than some worker has them. The last page of a run is looked up first: a worker that
        has it has the others. Of many workers with equally many pages only MAX_MATCHED_WORKERS are named, in rotation.
        """
        matched: dict[int, int] = {}
        get, sets = self._workers_of.get, self._sets.by_number
        workers: frozenset[int] = frozenset()
        last, reached = -1, 0
        for end, run in runs:
            if get(run[-1], EMPTY_SET) != last:
                for pages, value in enumerate(run, end - len(run) + 1):
                    now = get(value, EMPTY_SET)
                    if now != last:
                        self._add_matches(matched, workers - sets[now], reached)
                        workers = sets[now] if last < 0 else workers & sets[now]
                        last = now
                        if not workers:
                            return matched
                    reached = pages
            reached = end
        self._add_matches(matched, workers, reached)
        return matched

    def _add_matches(self, matched: dict[int, int], workers: frozenset[int], reached: int) -> None:
        if len(workers) > MAX_MATCHED_WORKERS:
            self._rotation = (self._rotation + MAX_MATCHED_WORKERS) % len(workers)
            some = islice(chain(workers, workers), self._rotation, self._rotation + MAX_MATCHED_WORKERS)
            matched.update(dict.fromkeys(some, reached))
        else:
            matched.update(dict.fromkeys(workers, reached))

    def _store(self, worker_id: int, event: Stored, native: bool) -> None:
        self.page_sizes[worker_id] = event.page_size
        known = self._pages.setdefault(worker_id, {})
        self._add(worker_id, event.hashes, self._page_hashes(known, event, native))

    def _add(self, worker_id: int, own_hashes: Iterable[Hash], pages: Iterable[int]) -> None:
        known = self._pages.setdefault(worker_id, {})
        workers_of, sets = self._workers_of, self._sets
        singleton = sets.singleton(worker_id)
        for own_hash, page in zip(own_hashes, pages):
            if len(known) >= MAX_PAGES_PER_WORKER:
                return
            known[own_hash] = page
            present = workers_of.get(page)
            if present is None:
                if len(workers_of) >= MAX_PAGES:
                    del known[own_hash]
                    return
                workers_of[page] = singleton
            elif worker_id not in sets.by_number[present]:
                workers_of[page] = sets.acquire(sets.by_number[present] | sets.by_number[singleton])
                sets.release(present)

    @staticmethod
    def _page_hashes(known: dict[Hash, int], event: Stored, native: bool) -> Sequence[int]:
        """The pages of an event by ``page_hashes``."""
        if native:
            return cast(Sequence[int], event.hashes)
        parent = None
        if event.parent is not None:
            parent = known.get(event.parent)
            if parent is None:  # Its event was lost: what prompt these pages continue cannot be known.
                return ()
        return page_hashes(event.token_ids, event.page_size, parent)

    def _remove(self, worker_id: int, hashes: Iterable[Hash]) -> None:
        known = self._pages.get(worker_id, {})
        for own_hash in hashes:
            page = known.pop(own_hash, None)
            if page is not None:
                self._drop(page, worker_id)

    def _drop(self, page: int, worker_id: int) -> None:
        sets = self._sets
        present = self._workers_of.get(page, EMPTY_SET)
        if worker_id in sets.by_number[present]:
            rest = sets.by_number[present] - {worker_id}
            if rest:
                self._workers_of[page] = sets.acquire(rest)
            else:
                del self._workers_of[page]
            sets.release(present)
