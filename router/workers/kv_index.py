"""Which worker holds which pages of the prefix cache, as the workers themselves tell: plain state, no I/O."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain, islice

from ...common.api.kv_events import Cleared, Event, Hash, Removed, Stored, page_hashes
from .worker_sets import NOBODY, WorkerSets

MOST_PAGES = 2**20
"""Pages remembered a worker, 200 MB at worst: 16 million tokens in pages of 16, more than a GPU holds."""

MOST_IN_ALL = 2**22
"""Different pages remembered of all workers, 700 MB at worst: 67 million tokens in pages of 16. Those beyond count as
absent."""
MOST_HOLDERS = 64
"""Workers named of those that hold equally much: looking at a thousand would take longer than what is gained."""

class KVIndex:
    """Page hash -> ids of the workers that hold it, kept up to date by their events.

    Pages are known by ``page_hashes`` of their tokens. Our servers send these; other engines' hashes
    are their own secret, so theirs are computed from the tokens and only serve to find a page again.
    """

    def __init__(self) -> None:
        self._holders: dict[int, int] = {}
        self._sets = WorkerSets()
        self._turn = 0
        self._pages: dict[int, dict[Hash, int]] = {}
        self.sizes: dict[int, int] = {}
        """Pages of each worker that ever stored one."""
        self.page_sizes: dict[int, int] = {}
        """Tokens a page of each worker that ever stored one."""

    def __len__(self) -> int:
        return len(self._holders)

    def __repr__(self) -> str:
        return f"Residency({len(self._holders)} pages, by worker {self.sizes})"

    def apply(self, worker_id: int, events: Iterable[Event], *, native: bool = True) -> None:
        """Take in a worker's events; ``native`` where its hashes are ``page_hashes``."""
        for event in events:
            if isinstance(event, Stored):
                self._store(worker_id, event, native)
            elif isinstance(event, Removed):
                self._remove(worker_id, event.hashes)
            elif isinstance(event, Cleared):
                self.clear(worker_id)
        if worker_id in self._pages:
            self.sizes[worker_id] = len(self._pages[worker_id])

    def clear(self, worker_id: int) -> None:
        """The worker holds nothing."""
        for page in set(self._pages.pop(worker_id, {}).values()):
            self._drop(page, worker_id)
        self.sizes[worker_id] = 0

    def forget(self, worker_id: int) -> None:
        """The worker is gone."""
        self.clear(worker_id)
        self.page_sizes.pop(worker_id, None)
        self.sizes.pop(worker_id, None)

    def depths(self, runs: Iterable[tuple[int, Sequence[int]]]) -> dict[int, int]:
        """How many leading pages each worker holds, for workers that hold any.

        ``runs`` yields ``(number of pages up to its end, hashes)`` from the prompt's beginning on, of all pages or of
        some; it is read no further than some worker holds it. Of a run the last page is looked at first: who holds it
        holds the others. Of many workers that hold equally much only MOST_HOLDERS are named, others each time.
        """
        found: dict[int, int] = {}
        get, sets = self._holders.get, self._sets.by_number
        holders: frozenset[int] = frozenset()
        last, reached = -1, 0
        for end, run in runs:
            if get(run[-1], NOBODY) != last:
                for pages, value in enumerate(run, end - len(run) + 1):
                    now = get(value, NOBODY)
                    if now != last:
                        self._name(found, holders - sets[now], reached)
                        holders = sets[now] if last < 0 else holders & sets[now]
                        last = now
                        if not holders:
                            return found
                    reached = pages
            reached = end
        self._name(found, holders, reached)
        return found

    def _name(self, found: dict[int, int], holders: frozenset[int], reached: int) -> None:
        if len(holders) > MOST_HOLDERS:
            self._turn = (self._turn + MOST_HOLDERS) % len(holders)
            some = islice(chain(holders, holders), self._turn, self._turn + MOST_HOLDERS)
            found.update(dict.fromkeys(some, reached))
        else:
            found.update(dict.fromkeys(holders, reached))

    def _store(self, worker_id: int, event: Stored, native: bool) -> None:
        known = self._pages.setdefault(worker_id, {})
        self.page_sizes[worker_id] = event.page_size
        pages = self._own_hashes(known, event, native)
        holders, sets = self._holders, self._sets
        alone = sets.alone(worker_id)
        for theirs, page in zip(event.hashes, pages):
            if len(known) >= MOST_PAGES:
                return
            known[theirs] = page
            present = holders.get(page)
            if present is None:
                if len(holders) >= MOST_IN_ALL:
                    del known[theirs]
                    return
                holders[page] = alone
            elif worker_id not in sets.by_number[present]:
                holders[page] = sets.take(sets.by_number[present] | sets.by_number[alone])
                sets.drop(present)

    @staticmethod
    def _own_hashes(known: dict[Hash, int], event: Stored, native: bool) -> Sequence[int]:
        if native:
            return event.hashes  # type: ignore[return-value]  # integers
        parent = None
        if event.parent is not None:
            parent = known.get(event.parent)
            if parent is None:  # Its event was lost: what prompt these pages continue cannot be known.
                return ()
        return page_hashes(event.token_ids, event.page_size, parent)

    def _remove(self, worker_id: int, hashes: Iterable[Hash]) -> None:
        known = self._pages.get(worker_id, {})
        for theirs in hashes:
            page = known.pop(theirs, None)
            if page is not None:
                self._drop(page, worker_id)

    def _drop(self, page: int, worker_id: int) -> None:
        sets = self._sets
        present = self._holders.get(page, NOBODY)
        if worker_id in sets.by_number[present]:
            rest = sets.by_number[present] - {worker_id}
            if rest:
                self._holders[page] = sets.take(rest)
            else:
                del self._holders[page]
            sets.drop(present)
