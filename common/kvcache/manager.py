"""The KV cache as schedulers see it: requests read cached pages, allocate fresh ones, and publish them.

Every page is free, allocated to exactly one request, or owned by the prefix cache:
``free + allocated + cached == total``. A request may *read* cached pages that it has locked.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..api.namespace import SHARED, Namespace
from .allocator import PageAllocator
from .partial_pages import PartialPage, PartialPages
from .prefix_cache import Node, PrefixCache


class PageTable:
    """Page table of one request (vLLM's block table): its page ids in token order.

    ``owned[i]`` is True where page i is allocated to the request and freed with it, False where the prefix cache owns
    it and ``node``'s lock protects it. A table without a ``node`` has nothing to do with the prefix cache.
    ``partial_page`` belongs to the cache too; it is the last page.
    """

    __slots__ = ("_ids", "_new", "_owned", "count", "node", "num_cached_pages", "num_published", "partial_page")

    def __init__(self, cached: np.ndarray, node: Node | None):
        self.count = len(cached)
        self._ids = np.empty(max(8, 2 * self.count), np.int64)
        self._ids[: self.count] = cached
        self._owned = np.zeros(len(self._ids), bool)
        self._new: list[int] = []  # the last pages, until the arrays are read
        self.node = node
        self.num_cached_pages = self.count
        self.num_published = self.count  # leading pages that the prefix cache has, these or equal ones
        self.partial_page: PartialPage | None = None

    def __repr__(self) -> str:
        owned = np.count_nonzero(self.owned)
        return f"PageTable({self.count} pages, {owned} owned, {self.num_cached_pages} cached at start)"

    @property
    def ids(self) -> np.ndarray:
        """Page ids [count] int64."""
        if self._new:
            self._write_new()
        return self._ids[: self.count]

    @property
    def owned(self) -> np.ndarray:
        """Ownership [count] bool."""
        if self._new:
            self._write_new()
        return self._owned[: self.count]

    def take_owned(self) -> tuple[np.ndarray, list[int]]:
        """Empty the table; returns the pages that are freed with the request, the newest in a list of their own."""
        new, self._new = self._new, []
        written, self.count = self.count - len(new), 0
        if self.num_published == 0 and self.partial_page is None:  # the prefix cache has none of them
            return self._ids[:written], new
        return self._ids[:written][self._owned[:written]], new

    def extend(self, ids: np.ndarray) -> None:
        if self._new:
            self._write_new()
        begin, self.count = self.count, self.count + len(ids)
        self._write(begin, ids)

    def append(self, page: int) -> None:
        """``extend`` by one page, which joins the arrays when they are read."""
        self._new.append(page)
        self.count += 1

    def _write_new(self) -> None:
        new, self._new = self._new, []
        self._write(self.count - len(new), new[0] if len(new) == 1 else new)

    def _write(self, begin: int, ids: np.ndarray | list[int] | int) -> None:
        """Write ``ids``, the pages from ``begin`` to ``count``."""
        end = self.count
        if end > len(self._ids):
            capacity = 2 * end
            self._ids = np.concatenate((self._ids, np.empty(capacity - len(self._ids), np.int64)))
            self._owned = np.concatenate((self._owned, np.zeros(capacity - len(self._owned), bool)))
        self._ids[begin:end] = ids
        self._owned[begin:end] = True


class KVCacheManager:
    """Page allocator and prefix cache of one rank. Torch-free and deterministic, so that the ranks of a
    tensor-parallel group, fed the same calls, have equal page tables."""

    def __init__(self, num_pages: int, page_size: int, prefix_cache: bool = True):
        self.page_size = page_size
        self.allocator = PageAllocator(num_pages)
        self.prefix_cache = PrefixCache(page_size) if prefix_cache else None
        self.partial_pages = PartialPages()
        self._num_allocated = 0

    def __repr__(self) -> str:
        return f"KVCacheManager(free {self.num_free}, allocated {self.num_allocated}, cached {self.num_cached})"

    @property
    def num_pages(self) -> int:
        return self.allocator.num_pages

    @property
    def num_free(self) -> int:
        return self.allocator.num_free

    @property
    def num_allocated(self) -> int:
        """Pages that requests own."""
        return self._num_allocated

    @property
    def num_cached(self) -> int:
        return (self.prefix_cache.num_pages if self.prefix_cache else 0) + len(self.partial_pages)

    @property
    def num_available(self) -> int:
        """Pages that could be allocated now, evicting what no request reads."""
        evictable = self.prefix_cache.num_evictable if self.prefix_cache else 0
        return self.num_free + evictable + self.partial_pages.num_evictable

    def pages_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.page_size)

    def match_prefix(self, tokens: np.ndarray, limit: int, namespace: Namespace = SHARED) -> PageTable:
        """A page table with the cached prefix of ``tokens`` (int32) in a namespace, of at most ``limit`` tokens, which
        it locks. What is committed from the table stays in that namespace."""
        if self.prefix_cache is None:
            return self.new_private_table()
        node, pages = self.prefix_cache.match(tokens[: limit // self.page_size * self.page_size], namespace)
        self.prefix_cache.lock(node)
        return PageTable(pages, node)

    def new_private_table(self) -> PageTable:
        """An empty page table that never enters the prefix cache: token ids do not identify what its pages contain."""
        return PageTable(np.empty(0, np.int64), None)

    def allocate_slots(self, table: PageTable, num_tokens: int) -> bool:
        """Extend ``table`` to cover ``num_tokens`` tokens; False, and no change, where pages are short."""
        missing = self.pages_for(num_tokens) - table.count
        if missing <= 0:
            return True
        if missing > self.num_available:
            return False
        if missing > self.num_free:
            assert self.prefix_cache is not None
            # An eviction walks the whole tree: take a little more than asked, so that not every step has to walk.
            self.allocator.free(self.prefix_cache.evict(max(missing - self.num_free, self.num_pages // 128)))
            self.allocator.free(self.partial_pages.evict(max(0, missing - self.num_free)))
        table.extend(self.allocator.allocate(missing))
        self._num_allocated += missing
        return True

    def append_pages(self, tables: Sequence[PageTable]) -> np.ndarray | None:
        """Append one page to each table; returns the pages in order. Returns None, and changes nothing, where too few
        are free: then call ``allocate_slots`` for one after the other, which evicts."""
        if len(tables) > self.num_free:
            return None
        pages = self.allocator.allocate(len(tables))
        for table, page in zip(tables, pages.tolist()):
            table.append(page)
        self._num_allocated += len(tables)
        return pages

    def commit(self, table: PageTable, tokens: np.ndarray) -> None:
        """Publish the full pages of ``tokens`` (int32, all computed) in the prefix cache.

        The page ids in ``table`` never change: a transfer may be reading them. Where the tree has equal pages already,
        the request keeps its own until it ends.
        """
        cache = self.prefix_cache
        count = len(tokens) // self.page_size
        if cache is None or table.node is None or count <= table.num_published:
            return
        first = table.num_published  # table.node covers the pages before
        node, present = cache.insert(tokens[first * self.page_size : count * self.page_size], table.ids[first:count],
                                     table.node)
        present += first
        cache.move_lock(table.node, node)
        table.node = node
        assert present <= count and table.owned[present:count].all(), \
            "pages entered the tree that the request did not own"
        table.owned[present:count] = False
        self._num_allocated -= count - present
        table.num_published = count

    def keep_partial_page(self, table: PageTable, tokens: np.ndarray) -> PartialPage | None:
        """Hand the last page of ``tokens`` (int32, all computed, all of the table's) to the cache where it is partly
        filled; the table still reads it. Returns None where the prompt ends with a full page. The full pages must
        be published already.
        """
        assert table.node is not None and table.count == self.pages_for(len(tokens)) and table.partial_page is None
        if len(tokens) % self.page_size == 0:
            return None
        assert table.owned[-1]
        table.owned[-1] = False
        self._num_allocated -= 1
        table.partial_page = self.partial_pages.add(int(table.ids[-1]))
        self.partial_pages.acquire(table.partial_page)
        return table.partial_page

    def match_full_prompt(self, tokens: np.ndarray, partial: PartialPage | None,
                          namespace: Namespace = SHARED) -> PageTable | None:
        """A page table of all pages of ``tokens`` (int32), ``partial`` the last; None where some were evicted."""
        rest = len(tokens) % self.page_size
        table = self.match_prefix(tokens, len(tokens), namespace)
        if table.count < len(tokens) // self.page_size or (rest and (partial is None or partial.page is None)):
            self.release(table)
            return None
        if rest:
            assert partial is not None and partial.page is not None
            table.extend(np.array([partial.page], np.int64))
            table.owned[-1] = False
            table.partial_page = partial
            self.partial_pages.acquire(partial)
        return table

    def drop_partial_page(self, partial: PartialPage) -> None:
        """Stop retaining a partial page; it becomes free with its last reader."""
        self.allocator.free(self.partial_pages.drop(partial))

    def is_cacheable(self, table: PageTable) -> bool:
        """True where the full pages of ``table`` may stay in the prefix cache."""
        return self.prefix_cache is not None and table.node is not None

    def release(self, table: PageTable, tokens: np.ndarray | None = None) -> None:
        """Free a table's pages. ``tokens``, where given, are the computed ones: their full pages stay in the cache."""
        self.release_all([(table, tokens)])

    def release_all(self, ending: Sequence[tuple[PageTable, np.ndarray | None]]) -> None:
        """``release`` one after the other; the allocator gets all freed pages in one call."""
        freed: list[np.ndarray] = []
        newest: list[int] = []
        for table, tokens in ending:
            if tokens is not None:
                self.commit(table, tokens)
            pages, new = table.take_owned()
            freed.append(pages)
            newest += new
            if self.prefix_cache is not None and table.node is not None:
                self.prefix_cache.unlock(table.node)
            if table.partial_page is not None:
                self.allocator.free(self.partial_pages.release(table.partial_page))
            table.node, table.partial_page = None, None
        freed = [*freed[::-1], np.array(newest, np.int64)]
        owned = np.concatenate(freed)
        self.allocator.free(owned)
        self._num_allocated -= len(owned)

    def flush(self) -> None:
        """Empty the prefix cache; the caller has made sure that no request has locked a node."""
        self.allocator.free(self.partial_pages.evict(len(self.partial_pages)))
        if self.prefix_cache is not None:
            self.allocator.free(self.prefix_cache.evict(self.prefix_cache.num_pages))
            assert self.prefix_cache.num_pages == 0, "the cache was flushed while requests read it"

    def tidy(self) -> None:
        """Sort the free pages, so that later requests get contiguous ones where possible; for idle moments."""
        self.allocator.tidy()

    def check_integrity(self) -> None:
        """Asserts ``free + allocated + cached == total`` and the tree's own counts. Cheap enough for idle moments."""
        if self.prefix_cache is not None:
            self.prefix_cache.check_integrity()
        assert self.num_free + self.num_allocated + self.num_cached == self.num_pages, repr(self)
