"""The KV cache as schedulers see it: requests borrow cached pages, get fresh ones, and hand them on.

Every page is free, held by exactly one request, or owned by the prefix cache:
``free + held + cached == total``. A request may *read* cached pages that it has locked.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from .allocator import PageAllocator
from .partial_pages import PartialPage, PartialPages
from .prefix_cache import Node, PrefixCache


class PageTable:
    """One request's pages, in token order.

    ``own[i]`` tells whether page i is held by the request (and freed with it) or owned by the prefix cache,
    where ``node``'s lock keeps it. A hold without a ``node`` has nothing to do with the prefix cache. ``tail`` is the
    cache's too, and the last page.
    """

    __slots__ = ("_ids", "_new", "_own", "count", "node", "num_cached_pages", "num_published", "tail")

    def __init__(self, cached: np.ndarray, node: Node | None):
        self.count = len(cached)
        self._ids = np.empty(max(8, 2 * self.count), np.int64)
        self._ids[: self.count] = cached
        self._own = np.zeros(len(self._ids), bool)
        self._new: list[int] = []  # the last pages, until somebody looks
        self.node = node
        self.num_cached_pages = self.count
        self.num_published = self.count  # leading pages that the prefix cache has, these or equal ones
        self.tail: PartialPage | None = None

    def __repr__(self) -> str:
        return f"PageTable({self.count} pages, {self.num_own} own, {self.num_cached_pages} cached at start)"

    @property
    def ids(self) -> np.ndarray:
        if self._new:
            self._place()
        return self._ids[: self.count]

    @property
    def own(self) -> np.ndarray:
        if self._new:
            self._place()
        return self._own[: self.count]

    @property
    def num_own(self) -> int:
        return int(np.count_nonzero(self.own))

    def take_own(self) -> tuple[np.ndarray, list[int]]:
        """The pages that are freed with the request, the newest of them apart; nothing is left of the hold."""
        new, self._new = self._new, []
        placed, self.count = self.count - len(new), 0
        if self.num_published == 0 and self.tail is None:  # the prefix cache has none of them
            return self._ids[:placed], new
        return self._ids[:placed][self._own[:placed]], new

    def extend(self, ids: np.ndarray) -> None:
        if self._new:
            self._place()
        begin, self.count = self.count, self.count + len(ids)
        self._put(begin, ids)

    def add(self, page: int) -> None:
        """``extend`` by one page, which is put with the others when somebody looks."""
        self._new.append(page)
        self.count += 1

    def _place(self) -> None:
        new, self._new = self._new, []
        self._put(self.count - len(new), new[0] if len(new) == 1 else new)

    def _put(self, begin: int, ids: np.ndarray | list[int] | int) -> None:
        """``ids`` are the pages from ``begin`` to ``count``."""
        end = self.count
        if end > len(self._ids):
            capacity = 2 * end
            self._ids = np.concatenate((self._ids, np.empty(capacity - len(self._ids), np.int64)))
            self._own = np.concatenate((self._own, np.zeros(capacity - len(self._own), bool)))
        self._ids[begin:end] = ids
        self._own[begin:end] = True


class KVCacheManager:
    """Page allocator and prefix cache of one rank. Torch-free and deterministic, so that the ranks of a
    tensor-parallel group, fed the same calls, hold equal page tables."""

    def __init__(self, num_pages: int, page_size: int, prefix_cache: bool = True):
        self.page_size = page_size
        self.allocator = PageAllocator(num_pages)
        self.prefix_cache = PrefixCache(page_size) if prefix_cache else None
        self.tails = PartialPages()
        self._num_held = 0

    def __repr__(self) -> str:
        return f"KVCacheManager(free {self.num_free}, held {self.num_held}, cached {self.num_cached})"

    @property
    def num_pages(self) -> int:
        return self.allocator.num_pages

    @property
    def num_free(self) -> int:
        return self.allocator.num_free

    @property
    def num_held(self) -> int:
        return self._num_held

    @property
    def num_cached(self) -> int:
        return (self.prefix_cache.num_pages if self.prefix_cache else 0) + len(self.tails)

    @property
    def num_available(self) -> int:
        """Pages that could be allocated now, evicting what no request reads."""
        evictable = self.prefix_cache.num_evictable if self.prefix_cache else 0
        return self.num_free + evictable + self.tails.num_evictable

    def pages_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.page_size)

    def begin(self, tokens: np.ndarray, limit: int) -> PageTable:
        """Borrow the cached prefix of ``tokens`` (int32), of at most ``limit`` tokens, and lock it."""
        if self.prefix_cache is None:
            return self.begin_private()
        node, pages = self.prefix_cache.match(tokens[: limit // self.page_size * self.page_size])
        self.prefix_cache.lock(node)
        return PageTable(pages, node)

    def begin_private(self) -> PageTable:
        """A hold whose pages never enter the prefix cache: its tokens do not tell what is in them."""
        return PageTable(np.empty(0, np.int64), None)

    def grow(self, hold: PageTable, num_tokens: int) -> bool:
        """Give ``hold`` pages for ``num_tokens`` tokens in all; False, and no change, where memory lacks."""
        missing = self.pages_for(num_tokens) - hold.count
        if missing <= 0:
            return True
        if missing > self.num_available:
            return False
        if missing > self.num_free:
            assert self.prefix_cache is not None
            # An eviction walks the whole tree: take a little more than asked, so that not every step has to walk.
            self.allocator.free(self.prefix_cache.evict(max(missing - self.num_free, self.num_pages // 128)))
            self.allocator.free(self.tails.evict(max(0, missing - self.num_free)))
        hold.extend(self.allocator.allocate(missing))
        self._num_held += missing
        return True

    def add_page_each(self, holds: Sequence[PageTable]) -> np.ndarray | None:
        """Give each hold one page more, and return these in order; None, and no change, where so many are not free:
        then ``grow`` them one after the other, which evicts."""
        if len(holds) > self.num_free:
            return None
        pages = self.allocator.allocate(len(holds))
        for hold, page in zip(holds, pages.tolist()):
            hold.add(page)
        self._num_held += len(holds)
        return pages

    def commit(self, hold: PageTable, tokens: np.ndarray) -> None:
        """Publish the full pages of ``tokens`` (int32, all computed) in the prefix cache.

        Page ids of ``hold`` never change: a transfer may be reading them. Where the tree has equal pages already,
        the request keeps its own until it ends.
        """
        cache = self.prefix_cache
        count = len(tokens) // self.page_size
        if cache is None or hold.node is None or count <= hold.num_published:
            return
        first = hold.num_published  # hold.node stands for the pages before
        node, present = cache.insert(tokens[first * self.page_size : count * self.page_size], hold.ids[first:count],
                                     hold.node)
        present += first
        cache.move_lock(hold.node, node)
        hold.node = node
        assert present <= count and hold.own[present:count].all(), "pages entered the tree that the request did not own"
        hold.own[present:count] = False
        self._num_held -= count - present
        hold.num_published = count

    def keep_tail(self, hold: PageTable, tokens: np.ndarray) -> PartialPage | None:
        """Leave the last page of ``tokens`` (int32, all computed, all of the hold's), where it is partly filled, to the
        cache; the hold goes on reading it. None where the prompt ends with a full page. The full ones were published.
        """
        assert hold.node is not None and hold.count == self.pages_for(len(tokens)) and hold.tail is None
        if len(tokens) % self.page_size == 0:
            return None
        assert hold.own[-1]
        hold.own[-1] = False
        self._num_held -= 1
        hold.tail = self.tails.add(int(hold.ids[-1]))
        self.tails.read(hold.tail)
        return hold.tail

    def begin_whole(self, tokens: np.ndarray, tail: PartialPage | None) -> PageTable | None:
        """Borrow all pages of ``tokens`` (int32), the last being ``tail``; None where some were evicted meanwhile."""
        rest = len(tokens) % self.page_size
        hold = self.begin(tokens, len(tokens))
        if hold.count < len(tokens) // self.page_size or (rest and (tail is None or tail.page is None)):
            self.release(hold)
            return None
        if rest:
            assert tail is not None and tail.page is not None
            hold.extend(np.array([tail.page], np.int64))
            hold.own[-1] = False
            hold.tail = tail
            self.tails.read(tail)
        return hold

    def drop_tail(self, tail: PartialPage) -> None:
        """Nobody will ask for it again; its page is free once nobody reads it."""
        self.allocator.free(self.tails.drop(tail))

    def publishes(self, hold: PageTable) -> bool:
        """Whether the full pages of ``hold`` may stay in the prefix cache."""
        return self.prefix_cache is not None and hold.node is not None

    def release(self, hold: PageTable, tokens: np.ndarray | None = None) -> None:
        """End a hold. ``tokens``, where given, are the computed ones: their full pages stay in the cache."""
        self.release_each([(hold, tokens)])

    def release_each(self, ending: Sequence[tuple[PageTable, np.ndarray | None]]) -> None:
        """``release`` one after the other; what is free by it is entered at once."""
        freed: list[np.ndarray] = []
        newest: list[int] = []
        for hold, tokens in ending:
            if tokens is not None:
                self.commit(hold, tokens)
            pages, new = hold.take_own()
            freed.append(pages)
            newest += new
            if self.prefix_cache is not None and hold.node is not None:
                self.prefix_cache.unlock(hold.node)
            if hold.tail is not None:
                self.allocator.free(self.tails.done(hold.tail))
            hold.node, hold.tail = None, None
        freed = [*freed[::-1], np.array(newest, np.int64)]
        own = np.concatenate(freed)
        self.allocator.free(own)
        self._num_held -= len(own)

    def flush(self) -> None:
        """Empty the prefix cache; the caller has made sure that no request holds a lock."""
        self.allocator.free(self.tails.evict(len(self.tails)))
        if self.prefix_cache is not None:
            self.allocator.free(self.prefix_cache.evict(self.prefix_cache.num_pages))
            assert self.prefix_cache.num_pages == 0, "the cache was flushed while requests read it"

    def tidy(self) -> None:
        """Have later requests get neighbouring pages where possible; for idle moments."""
        self.allocator.tidy()

    def check_integrity(self) -> None:
        """Asserts ``free + held + cached == total`` and the tree's own counts. Cheap enough for idle moments."""
        if self.prefix_cache is not None:
            self.prefix_cache.check_integrity()
        assert self.num_free + self.num_held + self.num_cached == self.num_pages, repr(self)
