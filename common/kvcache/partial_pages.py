"""Tails: last, partly filled pages of prompts that outlive their request.

The radix tree keeps whole pages. What is left over of a prompt is kept here while somebody may want all of it again;
such pages belong to the cache like the tree's, and are given up when memory is needed and nobody reads them.
"""

from __future__ import annotations

import numpy as np


class PartialPage:
    """One page, and how many holds read it. ``wanted`` until it is dropped; ``page`` is None once it was given up."""

    __slots__ = ("page", "readers", "wanted")

    def __init__(self, page: int):
        self.page: int | None = page
        self.readers = 0
        self.wanted = True

    def __repr__(self) -> str:
        return f"Tail(page {self.page}, {self.readers} readers{'' if self.wanted else ', dropped'})"


class PartialPages:
    """All tails of one cache, the oldest first. A tail leaves when it is neither wanted nor read."""

    def __init__(self) -> None:
        self._tails: dict[PartialPage, None] = {}
        self._num_read = 0

    def __len__(self) -> int:
        return len(self._tails)

    @property
    def num_evictable(self) -> int:
        return len(self._tails) - self._num_read

    def add(self, page: int) -> PartialPage:
        tail = PartialPage(page)
        self._tails[tail] = None
        return tail

    def read(self, tail: PartialPage) -> None:
        assert tail.page is not None, "a tail was read after it was given up"
        self._num_read += not tail.readers
        tail.readers += 1

    def done(self, tail: PartialPage) -> np.ndarray:
        """One reader less; returns the page ids that are the caller's now."""
        assert tail.readers > 0
        tail.readers -= 1
        self._num_read -= not tail.readers
        return self._freed([tail] if not tail.wanted and not tail.readers else [])

    def drop(self, tail: PartialPage) -> np.ndarray:
        """Nobody will want it again; returns the page ids that are the caller's now."""
        tail.wanted = False
        return self._freed([tail] if not tail.readers and tail.page is not None else [])

    def evict(self, count: int) -> np.ndarray:
        """Give up the oldest unread tails, ``count`` at most; returns their page ids, which are the caller's now."""
        return self._freed([tail for tail in self._tails if not tail.readers][:count])

    def _freed(self, tails: list[PartialPage]) -> np.ndarray:
        pages = np.array([tail.page for tail in tails], np.int64)
        for tail in tails:
            del self._tails[tail]
            tail.page = None
        return pages
