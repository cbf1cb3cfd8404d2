"""Partial pages: last, partly filled pages of prompts that outlive their request.

The radix tree keeps whole pages. The rest of a prompt is retained here while another attempt may want all of it again;
such pages belong to the cache like the tree's, and are evicted when memory is needed and no request reads them.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from .cache_group import CacheGroup


class PartialPage:
    """One page with the number of its readers. ``retained`` until it is dropped; ``page`` is None once evicted.
    ``group_pages`` are those of the same tokens in the further groups."""

    __slots__ = ("group_pages", "page", "readers", "retained")

    def __init__(self, page: int, group_pages: Sequence[int] = ()):
        self.page: int | None = page
        self.group_pages = group_pages
        self.readers = 0
        self.retained = True

    def __repr__(self) -> str:
        return f"PartialPage(page {self.page}, {self.readers} readers{'' if self.retained else ', dropped'})"


class PartialPages:
    """All partial pages of one cache, oldest first. A page leaves when it is neither retained nor read."""

    def __init__(self, groups: Sequence[CacheGroup] = ()) -> None:
        self._groups = groups
        self._pages: dict[PartialPage, None] = {}
        self._num_read = 0

    def __len__(self) -> int:
        return len(self._pages)

    @property
    def num_evictable(self) -> int:
        return len(self._pages) - self._num_read

    def add(self, page: int, group_pages: Sequence[int] = ()) -> PartialPage:
        partial = PartialPage(page, group_pages)
        self._pages[partial] = None
        return partial

    def acquire(self, partial: PartialPage) -> None:
        """Add a reader."""
        assert partial.page is not None, "a partial page was read after its eviction"
        self._num_read += not partial.readers
        partial.readers += 1

    def release(self, partial: PartialPage) -> np.ndarray:
        """Remove a reader; returns the page ids that now belong to the caller."""
        assert partial.readers > 0
        partial.readers -= 1
        self._num_read -= not partial.readers
        return self._remove([partial] if not partial.retained and not partial.readers else [])

    def drop(self, partial: PartialPage) -> np.ndarray:
        """Stop retaining the page; returns the page ids that now belong to the caller."""
        partial.retained = False
        return self._remove([partial] if not partial.readers and partial.page is not None else [])

    def evict(self, count: int) -> np.ndarray:
        """Evict the oldest unread pages, ``count`` at most; returns their ids, which now belong to the caller."""
        return self._remove([partial for partial in self._pages if not partial.readers][:count])

    def _remove(self, partials: list[PartialPage]) -> np.ndarray:
        pages = np.array([partial.page for partial in partials], np.int64)
        for partial in partials:
            del self._pages[partial]
            partial.page = None
            for group, page in zip(self._groups, partial.group_pages):
                group.free_cached(np.array([page]))
        return pages

    def cached_in_group(self, index: int) -> np.ndarray:
        """Ids of all pages of a further group."""
        return np.array([partial.group_pages[index] for partial in self._pages], np.int64)
