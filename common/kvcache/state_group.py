"""The state group: pages of layers whose memory of a sequence is a state of one size, however long it is (Mamba-2,
arXiv:2405.21060; gated delta networks, arXiv:2412.06464).

The page of tokens ``[p * page_size, (p + 1) * page_size)`` holds the state after the last of these that is computed, so
that a page that is full never changes: it is a snapshot, after which a prompt with the same beginning can go on. A step
reads the page of the token before its first one, and writes those of its last full page and of its last token. Pages
between have no state: they are ABSENT in page tables, and take no memory.

A state cannot forget a draft that is refused. So each draft of a step gets a page of its own for as long as the step
runs; that of the last accepted draft takes its token's place in the page table, and the others are free again.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from .cache_group import ABSENT, NONE_IN_FLIGHT, CacheGroup, GroupTable

READ_TOKENS = 2
"""A state is read as keys and values are in a sliding window of two tokens: only that of the token before."""
_MOST_PAGES = 3
"""The page that a step reads, and the two that it writes."""
LEAST_STATES = _MOST_PAGES + 2
"""States with which a request can be computed, in whatever group."""


class LastState:
    """The rule of a state group: a token reads the state after the token before it. ``in_flight``: see StateGroup."""

    def __init__(self, in_flight: bool = False):
        self._max_pages = _MOST_PAGES + 2 * in_flight

    def __str__(self) -> str:
        return "a state"

    def first_page(self, num_tokens: int, page_size: int) -> int:
        return max(0, num_tokens - 1) // page_size

    def reusable_pages(self, present: np.ndarray, page_size: int) -> int:
        places = np.flatnonzero(present)
        return int(places[-1]) + 1 if len(places) else 0

    def max_pages(self, page_size: int) -> int:
        return self._max_pages


class StateGroup(CacheGroup):
    """Pages of states. A request keeps that of its last full page, which the prefix cache gets when it ends.

    ``in_flight``: pages may be written by other processes from the moment that they are free (transfers into a decode
    server), so that a page which a step in flight reads is kept until that has run. Else all that read and write are
    steps of one stream.
    """

    name = "mamba"
    is_in_every_page = False
    stores_drafts = False

    def __init__(self, num_pages: int, page_size: int, *, in_flight: bool = False):
        super().__init__(LastState(in_flight), num_pages, page_size)
        self._in_flight = in_flight

    def _last_full_page(self, num_tokens: int) -> int:
        return max(0, num_tokens // self.page_size - 1)

    def _drop(self, table: GroupTable, first: int) -> None:
        """Give back the pages before ``first``, of those that the step in flight reads at the next call."""
        self.drop_before(table, min(first, table.unread) if self._in_flight else first)
        table.unread = first

    def extend_for_chunk(self, table: GroupTable, start: int, stop: int, free: Callable[[int], bool]) -> int:
        pages = sorted({stop // self.page_size - 1, (stop - 1) // self.page_size})
        new = [page for page in pages if page >= table.end]
        ends_page = stop // self.page_size > max(0, start - 1) // self.page_size
        self._drop(table, self.first_page(start) if ends_page else self._last_full_page(start))
        held = int(np.count_nonzero(table.ids != ABSENT))
        spare = min(self.num_unreserved + max(0, table.bound - held), self.num_available)
        if len(new) > spare or not free(len(new)):
            return start
        for page in new:
            self._append(table, np.full(page - table.end, ABSENT), owned=False)
            self._append(table, self.allocator.allocate(1), owned=True)
        return stop

    def allocate_drafts(self, table: GroupTable, count: int, free: Callable[[int], bool]) -> int:
        count = max(0, min(count, self.num_unreserved))
        if not count or not free(count):
            return 0
        table.drafts = self.allocator.allocate(count)
        self.num_allocated += count
        return count

    def keep_accepted(self, table: GroupTable, start: int, accepted: int) -> None:
        drafts, table.drafts = table.drafts, table.drafts[:0]
        if not len(drafts):
            return
        size, stop = self.page_size, start + accepted + 1
        kept = {}
        for page in {stop // size - 1, (stop - 1) // size}:  # the last full page, and that of the last token
            last = min(stop, (page + 1) * size) - 1  # the token after which the page has the state
            if last > start:
                kept[page] = last - start - 1
        for page, draft in sorted(kept.items()):
            place = page - table.first
            if page < table.end:  # the state after the token at ``start``
                self._leave(table.ids[place:place + 1], table.owned[place:place + 1])
                table.ids[place], table.owned[place] = drafts[draft], True
                self.num_in_tables += 1
            else:
                self._append(table, np.full(page - table.end, ABSENT), owned=False)
                self._append(table, drafts[draft:draft + 1], owned=True)
                self.num_allocated -= 1  # it was counted before
        refused = np.delete(drafts, list(kept.values()))
        self.allocator.free(refused)
        self.num_allocated -= len(refused)
        self.drop_before(table, self._last_full_page(stop))
        table.unread = NONE_IN_FLIGHT

    def release(self, table: GroupTable) -> None:
        self.allocator.free(table.drafts)
        self.num_allocated -= len(table.drafts)
        table.drafts = table.drafts[:0]
        super().release(table)

    def drop_unread(self, table: GroupTable, num_tokens: int) -> None:
        """Nothing: ``extend_for_chunk`` knows what the step reads."""

    def make_room(self, table: GroupTable, num_tokens: int) -> None:
        one_token = self.page_size == 1  # then the step in flight reads the page before the last full one
        self._drop(table, self._last_full_page(num_tokens - one_token))
        table.unread = NONE_IN_FLIGHT

    def _append(self, table: GroupTable, ids: np.ndarray, *, owned: bool) -> None:
        super()._append(table, ids, owned=owned)
        self.num_in_tables -= int(np.count_nonzero(ids == ABSENT))

    def _leave(self, ids: np.ndarray, owned: np.ndarray) -> None:
        present = ids != ABSENT
        super()._leave(ids[present], owned[present])
