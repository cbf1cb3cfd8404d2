"""Cache groups: layers whose pages have one shape and are kept by one rule, with page ids of their own.

A request has a page table in each group. The first group's layers read all tokens; its pages are the prefix cache's
tree. Each further group has a rule that says which pages a request still reads, so that it can give the others back:
a sliding window's, those behind the window. A node of the tree may lack pages of such a group.

The two counts by which a page of the tree is protected, one of the node for the first group and one of the page for
a group with a window, are an idea of SGLang's SWARadixCache.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from .allocator import PageAllocator

ABSENT = -1
"""The id of a page that a node of the tree lacks."""
NONE_IN_FLIGHT = 1 << 62


class RetentionRule(Protocol):
    """Says which of a request's pages the layers of a group still read. Pages are counted from the first token's."""

    def first_page(self, num_tokens: int, page_size: int) -> int:
        """The first page that is read by tokens after the first ``num_tokens``."""

    def reusable_pages(self, present: np.ndarray, page_size: int) -> int:
        """Pages of the longest prefix after which tokens can be computed, where only the ``present`` [n] bool are
        there."""

    def max_pages(self, page_size: int) -> int:
        """Pages with which a request of any length can be computed, a page of tokens at a time. The step before, of a
        page of tokens as well, may be in flight."""


@dataclass(frozen=True)
class SlidingWindow:
    """Each token reads the last ``tokens`` tokens, its own included."""

    tokens: int

    def __str__(self) -> str:
        return f"a sliding window of {self.tokens} tokens"

    def first_page(self, num_tokens: int, page_size: int) -> int:
        return max(0, num_tokens + 1 - self.tokens) // page_size

    def reusable_pages(self, present: np.ndarray, page_size: int) -> int:
        ends = np.arange(1, len(present) + 1)
        last_absent = np.maximum.accumulate(np.where(present, 0, ends))  # the end of the last absent page, 0 for none
        usable = np.flatnonzero(ends - last_absent >= np.minimum(ends, self._pages_before(page_size)))
        return int(usable[-1]) + 1 if len(usable) else 0

    def max_pages(self, page_size: int) -> int:
        return self._pages_before(page_size) + 2

    def _pages_before(self, page_size: int) -> int:
        """Pages that the first token of a page reads, besides its own."""
        return -((1 - self.tokens) // page_size)


class GroupTable:
    """Page table of one request in a further group: its pages from page ``first`` on.

    ``owned[i]`` is True where ``ids[i]`` is allocated to the request, False where the prefix cache owns it and the
    request is one of its readers. ``bound``: the pages that are reserved for the request. ``unread``: pages before
    this one are read by no step but one that is in flight. ``cached_end``: the table began with pages of the prefix
    cache, up to this one. ``drafts``: ids of pages for the drafts of the step in flight, in their order, in a group
    where each has one.
    """

    __slots__ = ("bound", "cached_end", "drafts", "first", "group", "ids", "owned", "unread")

    def __init__(self, group: CacheGroup) -> None:
        self.group = group
        self.first = self.bound = self.unread = self.cached_end = 0
        self.ids = np.empty(0, np.int64)
        self.drafts = self.ids
        self.owned = np.empty(0, bool)

    def __repr__(self) -> str:
        return f"GroupTable(pages {self.first} to {self.end}, {np.count_nonzero(self.owned)} owned)"

    @property
    def end(self) -> int:
        """The page after the last."""
        return self.first + len(self.ids)

    def span(self, first: int, end: int) -> np.ndarray:
        """Ids of pages ``first`` to ``end``, which the table has."""
        assert self.first <= first and end <= self.end, f"pages {first} to {end} of {self}"
        return self.ids[first - self.first:end - self.first]


class CacheGroup:
    """Page ids of a further group: each is free, allocated to one request, or owned by the prefix cache:
    ``free + allocated + cached == total``. A cached page with readers is not evicted. Gauges of the group begin with
    ``name``."""

    name = "swa"
    is_in_every_page = True
    """True where every page of tokens that is computed has one of the group."""
    stores_drafts = True
    """True where drafts are stored in the pages of their tokens, and overwritten where they are refused."""

    def __init__(self, rule: RetentionRule, num_pages: int, page_size: int):
        self.rule = rule
        self.page_size = page_size
        self.allocator = PageAllocator(num_pages)
        self.num_allocated = 0  # pages that requests own
        self.num_cached = self.num_read = 0
        self.num_reserved = 0  # the sum of all tables' bounds
        self.num_in_tables = 0  # pages of all tables; one that several read counts for each
        self._num_readers = np.zeros(num_pages, np.int32)
        self._max_pages = rule.max_pages(page_size)
        assert num_pages >= self._max_pages, f"{num_pages} pages are too few for {rule}"

    def __repr__(self) -> str:
        return (f"CacheGroup({self.rule}, free {self.num_free}, allocated {self.num_allocated}, "
                f"cached {self.num_cached})")

    @property
    def num_pages(self) -> int:
        return self.allocator.num_pages

    @property
    def num_free(self) -> int:
        return self.allocator.num_free

    @property
    def num_available(self) -> int:
        """Pages that could be allocated now, evicting what no request reads."""
        return self.num_free + self.num_cached - self.num_read

    @property
    def num_unreserved(self) -> int:
        """Available pages that no request's bound covers: a step that computes many tokens may take them."""
        return self.num_available - max(0, self.num_reserved - self.num_in_tables)

    def first_page(self, num_tokens: int) -> int:
        """See ``RetentionRule.first_page``."""
        return self.rule.first_page(num_tokens, self.page_size)

    def bound_for(self, max_tokens: int) -> int:
        """Pages to be reserved for a request of at most ``max_tokens`` tokens."""
        return min(self._max_pages, -(-max_tokens // self.page_size))

    def reserve(self, table: GroupTable, bound: int) -> None:
        self.num_reserved += bound - table.bound
        table.bound = bound

    def begin(self, table: GroupTable, first: int, cached: np.ndarray) -> None:
        """Let an empty table begin at page ``first``, with pages of the prefix cache, which it reads."""
        assert not len(table.ids)
        table.first = table.unread = first
        self._add_readers(cached)
        self._append(table, cached, owned=False)
        table.cached_end = table.end

    def read(self, table: GroupTable, page: int) -> None:
        """Append a page of the prefix cache, which the table reads."""
        self._add_readers(ids := np.array([page]))
        self._append(table, ids, owned=False)

    def extend(self, table: GroupTable, end: int) -> None:
        """Allocate the pages up to ``end``. The caller has checked ``num_free``."""
        if end > table.end:
            self._append(table, self.allocator.allocate(end - table.end), owned=True)

    def extend_for_chunk(self, table: GroupTable, start: int, stop: int, free: Callable[[int], bool]) -> int:
        """Allocate the pages of the tokens ``start`` to ``stop``, which the next step computes, or of fewer where pages
        are short; returns where these end. ``free(n)`` evicts until n pages are free; False where that is impossible.
        """
        spare = self.num_unreserved + max(0, table.bound - len(table.ids))
        end = -(-stop // self.page_size)
        wanted = min(end, table.end + max(0, min(spare, self.num_available))) - table.end
        if wanted > 0 and free(wanted):
            self.extend(table, table.end + wanted)
        return max(start, min(stop, table.end * self.page_size))

    def allocate_drafts(self, table: GroupTable, count: int, free: Callable[[int], bool]) -> int:
        """Allocate what the ``count`` drafts that the next step verifies take besides the slots of their tokens, or
        fewer where pages are short; returns for how many. ``free`` as in ``extend_for_chunk``."""
        return count

    def keep_accepted(self, table: GroupTable, start: int, accepted: int) -> None:
        """Record that the first ``accepted`` drafts after the token at position ``start`` are tokens: the step has
        run."""

    def drop_before(self, table: GroupTable, first: int) -> None:
        """Give back the pages before ``first``."""
        count = min(first - table.first, len(table.ids))
        if count > 0:
            self._leave(table.ids[:count], table.owned[:count])
            table.ids, table.owned = table.ids[count:], table.owned[count:]
            table.first += count

    def drop_unread(self, table: GroupTable, num_tokens: int) -> None:
        """Give back the pages that no step reads. ``num_tokens`` are computed or being computed.

        Called before each step of the request is launched, when at most the step of the call before is in flight:
        another process may write into a page from the moment that it is free.
        """
        self.drop_before(table, table.unread)
        table.unread = self.first_page(num_tokens)

    def make_room(self, table: GroupTable, num_tokens: int) -> None:
        """Give back what no step reads, before pages are allocated for the tokens after the first ``num_tokens``. The
        step of the token before may be in flight."""
        self.drop_before(table, min(table.unread, self.first_page(num_tokens - 1)))
        table.unread = NONE_IN_FLIGHT

    def release(self, table: GroupTable) -> None:
        """Give back all pages and the reservation."""
        self._leave(table.ids, table.owned)
        self.reserve(table, 0)
        table.ids, table.owned = table.ids[:0], table.owned[:0]

    def give_to_cache(self, table: GroupTable, first: int, into: np.ndarray) -> bool:
        """Hand pages that the table owns to the prefix cache, where ``into`` [n], the ids of pages ``first`` onwards of
        a node, has none; False where there are none. The table reads them from now on."""
        begin, end = max(first, table.first), min(first + len(into), table.end)
        ids, owned = table.span(begin, end), table.owned[begin - table.first:end - table.first]
        slots = into[begin - first:end - first]
        given = owned & (slots == ABSENT)
        slots[given] = ids[given]
        owned[given] = False
        self._add_cached(ids[given])
        return bool(given.any())

    def give_last_to_cache(self, table: GroupTable) -> int:
        """Hand the table's last page, which it owns, to the prefix cache; the table reads it from now on."""
        assert table.owned[-1]
        table.owned[-1] = False
        self._add_cached(table.ids[-1:])
        return int(table.ids[-1])

    def unread_of(self, ids: np.ndarray) -> np.ndarray:
        """[n] bool: which cached pages have no reader."""
        unread: np.ndarray = self._num_readers[ids] == 0
        return unread

    def free_cached(self, ids: np.ndarray) -> None:
        """Free pages that leave the prefix cache; none has a reader."""
        assert not self._num_readers[ids].any(), "a page was evicted while a request reads it"
        self.allocator.free(ids)
        self.num_cached -= len(ids)

    def check_integrity(self, cached: Sequence[np.ndarray]) -> None:
        """Asserts the counts; ``cached`` are the ids of all pages that the prefix cache has."""
        assert self.num_free + self.num_allocated + self.num_cached == self.num_pages, repr(self)
        ids = np.concatenate([*cached, np.empty(0, np.int64)])
        assert len(np.unique(ids)) == len(ids) == self.num_cached, "the count of cached pages is off"
        assert np.count_nonzero(self._num_readers) == np.count_nonzero(self._num_readers[ids]) == self.num_read, (
            "the count of pages that are read is off")

    def _append(self, table: GroupTable, ids: np.ndarray, *, owned: bool) -> None:
        table.ids = np.concatenate((table.ids, ids))
        table.owned = np.concatenate((table.owned, np.full(len(ids), owned)))
        self.num_in_tables += len(ids)
        self.num_allocated += owned * len(ids)

    def _leave(self, ids: np.ndarray, owned: np.ndarray) -> None:
        self.num_in_tables -= len(ids)
        self.allocator.free(freed := ids[owned])
        self.num_allocated -= len(freed)
        read = ids[~owned]
        if len(read):
            self._num_readers[read] -= 1
            self.num_read -= int(np.count_nonzero(self._num_readers[read] == 0))

    def _add_cached(self, ids: np.ndarray) -> None:
        """Record that pages which a request owned, and reads, are the prefix cache's."""
        self.num_cached += len(ids)
        self.num_allocated -= len(ids)
        self._add_readers(ids)

    def _add_readers(self, ids: np.ndarray) -> None:
        if len(ids):
            self.num_read += int(np.count_nonzero(self._num_readers[ids] == 0))
            self._num_readers[ids] += 1
