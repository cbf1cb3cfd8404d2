"""Page columns: the page tables of a batch's requests as the arrays that a forward pass reads."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from typing import NamedTuple

import numpy as np

from .manager import KVCacheManager, PageTable
from .padded_pages import PaddedPages

_NO_PAGES = np.empty(0, np.int64), np.empty(0, np.int64)
_versions = count(1)


class GroupSlots(NamedTuple):
    """The slots and pages in a further cache group; the fields as in PageSlots. Of each request there are the pages up
    to its last token's that its tokens read, or more. With ``num_drafts`` [B] as many of each request's last tokens are
    drafts with pages of their own, which ``kv_indices`` has not."""

    page_of_token: np.ndarray  # [T] int64
    kv_indptr: np.ndarray  # [B + 1] int32
    kv_indices: np.ndarray  # [M] int32
    num_drafts: np.ndarray | None = None


class PageSlots(NamedTuple):
    """The slots that a step's T tokens are stored in, and the pages of its B requests afterwards."""

    page_of_token: np.ndarray  # [T] int64
    offset_in_page: np.ndarray  # [T] int64
    kv_indptr: np.ndarray  # [B + 1] int32
    kv_indices: np.ndarray  # [N] int32
    kv_last_page_len: np.ndarray  # [B] int32
    version: int
    """Equal versions, of whatever batches, have equal ``kv_indptr`` and ``kv_indices``, in all cache groups."""
    further: tuple[GroupSlots, ...] = ()


class PageColumns:
    """The pages of B requests in the pools of all cache groups, row by row. It persists while the requests decode, so
    that a step costs array operations only, and reads a page table only where the request has entered a new page; in
    further cache groups, all page tables where any has.

    Nothing here knows requests, tokens or steps: the caller passes positions.
    """

    def __init__(self, page_tables: Sequence[PageTable], page_size: int):
        self._tables = list(page_tables)
        self._page_size = page_size
        self._capacity = np.array([table.count * page_size for table in page_tables], np.int64)  # tokens
        self._kv_indptr = np.zeros(len(page_tables) + 1, np.int32)
        self._kv_indices = np.empty(0, np.int32)
        self._version = next(_versions)
        self._page_of_token = np.empty(0, np.int64)
        self._page_start: np.ndarray | None = None  # [B]: the first position in each last page; None: unknown
        self._further: tuple[GroupSlots, ...] = ()
        self._appended = _NO_PAGES  # rows, and the pages appended to them since the page tables were last read
        self._padded: PaddedPages | None = None
        self._padded_version = 0
        # True where the first group may have pages for drafts while others lack that of a token.
        self._may_lag = not all(table.covers(table.count) for table in page_tables)

    def __len__(self) -> int:
        return len(self._tables)

    def select(self, rows: np.ndarray, joining: Sequence[PageTable]) -> PageColumns:
        """Returns the columns of ``rows`` (ascending) of these, followed by those of ``joining``."""
        columns = PageColumns(joining, self._page_size)
        if not len(rows):
            return columns
        columns._may_lag = columns._may_lag or self._may_lag
        columns._tables = [self._tables[row] for row in rows.tolist()] + columns._tables
        columns._capacity = np.concatenate((self._capacity[rows], columns._capacity))
        indptr, indices = self._kv_indptr, self._kv_indices
        columns._kv_indptr = np.zeros(len(columns) + 1, np.int32)
        np.cumsum(np.diff(indptr)[rows], out=columns._kv_indptr[1:len(rows) + 1])
        columns._kv_indptr[len(rows) + 1:] = columns._kv_indptr[len(rows)]
        cuts = np.flatnonzero(np.diff(rows) != 1) + 1
        columns._kv_indices = np.concatenate([indices[indptr[some[0]]:indptr[some[-1] + 1]]
                                              for some in np.split(rows, cuts)])
        return columns

    def same_tables(self, rows: Sequence[int], tables: Sequence[PageTable]) -> bool:
        """True where ``tables`` are those of ``rows``: a request that was retracted returns with another one."""
        return [self._tables[row] for row in rows] == list(tables)  # tables are compared by identity

    # -- capacity ------------------------------------------------------------------------------------------------------

    def rows_without_page(self, last_positions: np.ndarray) -> list[int]:
        """Rows that have no page for the token at ``last_positions`` [B]. After allocating one otherwise than by
        ``append_pages``, call ``update_capacity``, or write to ``capacities``."""
        short = self._capacity <= last_positions
        if self._may_lag:
            pages = last_positions // self._page_size + 1
            short |= np.array([not table.covers(count) for table, count in zip(self._tables, pages.tolist())], bool)
        return np.flatnonzero(short).tolist()

    @property
    def capacities(self) -> np.ndarray:
        """Tokens [B] int64 that the rows' pages of the first group hold. Who allocates pages otherwise than by
        ``append_pages``, as for drafts, writes the new values into it."""
        self._may_lag = bool(self._tables) and any(not own.group.stores_drafts for own in self._tables[0].groups)
        return self._capacity

    def update_capacity(self, row: int) -> None:
        """Reads the number of a row's pages anew."""
        self._capacity[row] = self._tables[row].count * self._page_size

    def append_pages(self, cache: KVCacheManager, rows: list[int]) -> bool:
        """Appends a page to each of ``rows``; returns False, and changes nothing, where too few are free, or where a
        page table has grown without ``update_capacity``."""
        tables = list(map(self._tables.__getitem__, rows))
        current = [table.count for table in tables] == (self._capacity[rows] // self._page_size).tolist()
        current = current and not (self._may_lag and not all(table.covers(table.count) for table in tables))
        pages = cache.append_pages(tables) if current else None
        if pages is None:
            return False
        self._appended = np.array(rows), pages
        if self._padded is not None:
            self._padded.append(*self._appended)
        self._capacity[rows] += self._page_size
        return True

    # -- slots of a step -----------------------------------------------------------------------------------------------

    def slots(self, positions: np.ndarray) -> PageSlots:
        """Returns the slots of one token a row, at ``positions`` [B] int64. The pages must cover them."""
        start = self._page_start
        offsets = positions if start is None else positions - start
        if start is None or int(offsets.max()) >= self._page_size:
            self._page_start = self._cover(positions)
            self._page_of_token = self._kv_indices[self._kv_indptr[1:] - 1].astype(np.int64)
            offsets = positions - self._page_start
            self._further = self._group_slots(positions, positions, positions)
            if self._may_lag:  # drafts that were accepted have changed page tables
                self._version = next(_versions)
        return PageSlots(self._page_of_token, offsets, self._kv_indptr, self._kv_indices,
                         (offsets + 1).astype(np.int32), self._version, self._further)

    def ragged_slots(self, last_positions: np.ndarray, q_lens: np.ndarray, positions: np.ndarray) -> PageSlots:
        """Returns the slots of ``q_lens`` [B] tokens a row, at ``positions`` [T] int64, up to ``last_positions`` [B].

        Positions of later calls may be lower: tokens that were not accepted are stored again.
        """
        page_start = self._cover(last_positions)
        self._page_start = None
        if self._may_lag:
            self._version = next(_versions)
        in_request, offsets = np.divmod(positions, self._page_size)
        first = np.repeat(self._kv_indptr[:-1], q_lens)
        return PageSlots(self._kv_indices[first + in_request].astype(np.int64), offsets, self._kv_indptr,
                         self._kv_indices, (last_positions - page_start + 1).astype(np.int32), self._version,
                         self._group_slots(last_positions - q_lens + 1, last_positions, positions, q_lens))

    def padded(self, num_tokens: np.ndarray, scratch_page: int) -> tuple[np.ndarray, np.ndarray, int]:
        """Returns ``kv_indptr``, ``kv_indices`` and ``version`` of the pages of ``num_tokens`` [B] tokens or more, in
        the first cache group, with the scratch page where a row has too few."""
        if self._padded is None:
            self._padded = PaddedPages(self._tables, scratch_page)
        if self._padded.cover(self._capacity // self._page_size, -(-num_tokens // self._page_size)):
            self._padded_version = next(_versions)
        return self._padded.kv_indptr, self._padded.kv_indices, self._padded_version

    def _group_slots(self, starts: np.ndarray, last_positions: np.ndarray, positions: np.ndarray,
                     q_lens: np.ndarray | int = 1) -> tuple[GroupSlots, ...]:
        """Returns the slots in further cache groups of ``q_lens`` tokens a row, at ``positions`` [T], which are those
        from ``starts`` [B] to ``last_positions`` [B]."""
        if not self._tables or not self._tables[0].groups:
            return ()
        slots = []
        for tables in zip(*(table.groups for table in self._tables)):
            num_drafts = np.array([len(own.drafts) for own in tables])
            lasts = last_positions - num_drafts
            firsts = [max(own.first, own.group.first_page(start)) for own, start in zip(tables, starts.tolist())]
            ends = (lasts // self._page_size + 1).tolist()
            parts = [own.span(first, end) for own, first, end in zip(tables, firsts, ends)]
            kv_indptr = np.zeros(len(tables) + 1, np.int32)
            np.cumsum([len(ids) for ids in parts], out=kv_indptr[1:])
            kv_indices = np.concatenate(parts, dtype=np.int32, casting="same_kind")
            stored = positions if not num_drafts.any() else np.minimum(positions, np.repeat(lasts, q_lens))
            places = stored // self._page_size + np.repeat(kv_indptr[:-1] - np.array(firsts), q_lens)
            page_of_token = kv_indices[places].astype(np.int64)
            if num_drafts.any():
                is_draft = positions > np.repeat(lasts, q_lens)
                page_of_token[is_draft] = np.concatenate([own.drafts for own in tables])
            slots.append(GroupSlots(page_of_token, kv_indptr, kv_indices, num_drafts if num_drafts.any() else None))
        return tuple(slots)

    def _cover(self, last_positions: np.ndarray) -> np.ndarray:
        """Makes each row's pages end with that of ``last_positions``; returns the first positions in these pages."""
        pages = last_positions // self._page_size
        counts = np.diff(self._kv_indptr)
        if np.any(counts > pages + 1):
            self._kv_indptr, self._kv_indices = np.zeros_like(self._kv_indptr), self._kv_indices[:0]
            counts, self._appended = np.zeros_like(counts), _NO_PAGES
        rows = np.flatnonzero(counts <= pages)
        if len(rows):
            self._insert(pages, rows)
            self._version = next(_versions)
        assert len(self._kv_indices) == self._kv_indptr[-1], "a request's pages do not cover its tokens"
        return pages * self._page_size

    def _insert(self, pages: np.ndarray, rows: np.ndarray) -> None:
        """Inserts the missing pages of ``rows``, up to page ``pages`` of each, into ``_kv_indices``."""
        before, indptr = self._kv_indices, self._kv_indptr
        (appended_rows, appended), self._appended = self._appended, _NO_PAGES
        one_missing_each = len(before) == int(pages.sum()) + len(pages) - len(rows)
        if (one_missing_each and np.array_equal(appended_rows, rows)  # they entered their new pages together
                and np.array_equal(self._capacity[rows], (pages[rows] + 1) * self._page_size)):
            self._kv_indices = np.insert(before, indptr[rows + 1], appended.astype(np.int32))
        else:
            self._kv_indices = self._indices_with(rows.tolist(), pages[rows].tolist())
        self._kv_indptr = np.zeros_like(indptr)
        np.cumsum(pages + 1, out=self._kv_indptr[1:])

    def _indices_with(self, rows: list[int], last_pages: list[int]) -> np.ndarray:
        """Returns ``_kv_indices`` with the pages of ``rows`` extended up to ``last_pages``."""
        before, indptr = self._kv_indices, self._kv_indptr.tolist()
        parts: list[np.ndarray] = []
        at = 0
        for row, last in zip(rows, last_pages):
            begin, end = indptr[row], indptr[row + 1]
            if at < end:
                parts.append(before[at:end])
            parts.append(self._tables[row].ids[end - begin:last + 1])
            at = end
        parts.append(before[at:])
        return np.concatenate(parts, dtype=np.int32, casting="same_kind")
