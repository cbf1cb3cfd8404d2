"""Padded pages: page tables as arrays that reach further than the pages that requests have."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from .manager import PageTable


class PaddedPages:
    """The pages of B requests; where one has fewer than wanted, the scratch page is in the place of each missing one.

    ``kv_indices`` [N] int32 from ``kv_indptr[b]`` to ``kv_indptr[b + 1]`` ([B + 1] int32) are request b's. They persist
    and are only extended, by reading the page tables of requests that have new pages.
    """

    def __init__(self, tables: Sequence[PageTable], scratch_page: int):
        self._tables = tables
        self._scratch_page = scratch_page
        self._owned = np.zeros(len(tables), np.int64)  # pages listed that the requests have
        self._listed = np.zeros(len(tables), np.int64)
        self._appended: list[tuple[np.ndarray, np.ndarray]] = []
        self.kv_indptr = np.zeros(len(tables) + 1, np.int32)
        self.kv_indices = np.empty(0, np.int32)

    def append(self, rows: np.ndarray, pages: np.ndarray) -> None:
        """Takes note of ``pages`` [n] that the requests ``rows`` [n] (ascending) got, one each: then it need not read
        their page tables."""
        self._appended.append((rows, pages))

    def cover(self, owned: np.ndarray, wanted: np.ndarray) -> bool:
        """Lists all ``owned`` [B] pages of the requests, and at least ``wanted`` [B]; True where the arrays are new."""
        changed = (owned > self._owned) | (wanted > self._listed)
        if not changed.any():
            return False
        rows = np.flatnonzero(changed)
        listed = np.maximum(np.maximum(owned, wanted), self._listed)
        appended, self._appended = self._appended, []
        before = self._owned[rows]
        if (len(appended) == 1 and np.array_equal(appended[0][0], rows) and np.array_equal(before, self._listed[rows])
                and np.array_equal(before + 1, listed[rows])):
            self.kv_indices = np.insert(self.kv_indices, self.kv_indptr[rows + 1], appended[0][1].astype(np.int32))
        else:
            self.kv_indices = self._extended(rows.tolist(), owned, listed)
        self._owned, self._listed = owned, listed
        self.kv_indptr = np.zeros_like(self.kv_indptr)
        np.cumsum(listed, out=self.kv_indptr[1:])
        return True

    def _extended(self, rows: list[int], owned: np.ndarray, listed: np.ndarray) -> np.ndarray:
        """Returns ``kv_indices`` with the ``rows`` extended."""
        before, indptr, had = self.kv_indices, self.kv_indptr, self._owned
        parts: list[np.ndarray] = []
        at = 0
        columns = (rows, indptr[rows].tolist(), had[rows].tolist(), owned[rows].tolist(), listed[rows].tolist())
        ends = indptr[1:][rows].tolist()
        for (row, begin, first, stop, count), end in zip(zip(*columns), ends):
            parts.append(before[at:begin + first])
            if stop > first:
                parts.append(self._tables[row].ids[first:stop])
            if count > stop:
                parts.append(np.full(count - stop, self._scratch_page, np.int32))
            at = end
        parts.append(before[at:])
        return np.concatenate(parts, dtype=np.int32, casting="same_kind")
