"""Copies of the prefix cache's pages to its tier: which, by the write policy, and when the pages are free again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from .allocator import PageAllocator
from .cache_group import ABSENT, CacheGroup
from .page_keys import PageKey
from .prefix_cache import Node, PrefixCache

if TYPE_CHECKING:
    from .tiers.base import KVTier, TierTask
    from .write_policies.base import WritePolicy

AHEAD_SHARE = 1 / 32
"""Of the pool's pages, free or copied and next to be evicted, that policies which write ahead keep ready."""


class TierWrites:
    """Writes of one prefix cache. Without further groups no call waits for a copy but ``reclaim``.

    With ``shared`` memory not only this device's stream writes into free pages (transfers do): a page whose copy is in
    flight when it is evicted is *leaving*, and free once that is complete on all ranks. Otherwise it is free at once,
    and the stream waits before it overwrites the page. Pages of further groups do not leave: with shared memory their
    copies are waited for; most have ended long before.
    """

    def __init__(self, tier: KVTier, policy: WritePolicy, cache: PrefixCache, allocator: PageAllocator, *,
                 shared: bool, alone: bool, has_draft: Callable[[np.ndarray], np.ndarray],
                 groups: Sequence[CacheGroup] = ()):
        """``alone``: no other rank has to free the same pages in the same step. ``has_draft``: [n] bool of pages, those
        with the draft model's keys and values. The others are not copied. ``groups``: the further cache groups."""
        self._tier = tier
        self._policy = policy
        self._cache = cache
        self._allocator = allocator
        self._shared, self._alone = shared, alone
        self._has_draft = has_draft
        self._required = [0, *(number for number, group in enumerate(groups, 1) if group.is_in_every_page)]
        self._leaving: list[tuple[TierTask, np.ndarray]] = []
        self._num_ahead = 0  # pages that were copied ahead and are still there, about
        self._num_left = 0  # times that leaving pages became free
        self.num_leaving = 0

    def committed(self, node: Node, count: int) -> None:
        """The last ``count`` pages of ``node`` have entered the cache."""
        if self._policy.at_commit(node.usage):
            self._store(self._cache.page_keys(node)[-count:], pages_of(node)[:, -count:])

    def completed(self, edge: Node) -> None:
        """Pages of ``edge`` that the cache has had got one of a further group."""
        if self._policy.at_commit(edge.usage):
            self._store(self._cache.page_keys(edge), pages_of(edge))

    def reused(self, node: Node) -> None:
        """One more request reads the path to ``node``."""
        nodes = []
        step: Node | None = node
        while step is not None and step.parent is not None:
            if self._policy.at_reuse(step.usage):
                nodes.append(step)
            step = step.parent
        for step in reversed(nodes):
            self._store(self._cache.page_keys(step), pages_of(step))

    def draft_lost(self, node: Node, first: int) -> None:
        """The draft model's keys and values are not in the pages from ``first`` on of the path to ``node``: copies that
        were made of them are not whole."""
        keys: list[PageKey] = []
        step: Node | None = node
        while step is not None and step.parent is not None:
            keys = [*self._cache.page_keys(step), *keys]
            step = step.parent
        self._tier.free(keys[first:])

    def evict(self, count: int) -> None:
        """Free ``count`` pages of the cache, or all that no request reads; as far as the policy wants it, the tier
        keeps their content."""
        kept: list[Node] = []

        def on_evicted(node: Node) -> None:
            if self._policy.at_eviction(node.usage):
                self._cache.page_keys(node)  # while it has a parent
                kept.append(node)

        pages = self._cache.evict(count, on_evicted)
        self._num_ahead = max(0, self._num_ahead - len(pages))
        task = None
        if kept:
            task = self._store([key for node in kept for key in node.keys or ()],
                               np.concatenate([pages_of(node) for node in kept], 1))
        if task is None or (task.done and (self._alone or not self._shared)):
            self._allocator.free(pages)
        elif self._shared and self._cache.has_groups:
            task.wait()
            self._allocator.free(pages)
        elif self._shared:
            self._tier.flush()
            self._leaving.append((task, pages))
            self.num_leaving += len(pages)
        else:
            task.wait_on_device()
            self._allocator.free(pages)

    def evict_from_group(self, index: int, count: int) -> None:
        """Free ``count`` pages of a further group, or all that no request reads; as far as the policy wants it, the
        tier keeps their content and that of the same tokens' pages in the other groups."""
        keys: list[PageKey] = []
        pages: list[np.ndarray] = []

        def on_freed(node: Node, places: np.ndarray) -> None:
            if self._policy.at_eviction(node.usage):
                own = self._cache.page_keys(node)
                keys.extend(own[place] for place in places.tolist())
                pages.append(pages_of(node)[:, places])

        self._cache.evict_from_group(index, count, on_freed)
        task = self._store(keys, np.concatenate(pages, 1)) if keys else None
        if task is not None and not task.done:
            if self._shared:
                task.wait()
            else:
                task.wait_on_device()

    def poll(self) -> None:
        """Once a step, before its launch: start what ``flush`` of the step before has left, and advance the copies."""
        if self._policy.ahead:
            self._write_ahead()
        self._tier.flush()
        self._tier.poll()

    @property
    def num_copied(self) -> int:
        """Counts evictions with leaving pages, those whose pages are free or could be for this rank; it grows."""
        copied = next((i for i, (task, _) in enumerate(self._leaving) if not task.done), len(self._leaving))
        return self._num_left + copied

    def free_copied(self, count: int) -> None:
        """Free the pages of the first evictions, ``count`` since the beginning: the minimum of ``num_copied``."""
        while self._num_left < count:
            self._free_first()

    def reclaim(self, num_free: int) -> None:
        """Wait until ``num_free`` pages are free, as far as leaving ones make that many."""
        while self._leaving and self._allocator.num_free < num_free:
            self._leaving[0][0].wait()
            self._free_first()

    def _free_first(self) -> None:
        _, pages = self._leaving.pop(0)
        self._allocator.free(pages)
        self.num_leaving -= len(pages)
        self._num_left += 1

    def _write_ahead(self) -> None:
        wanted = int(self._allocator.num_pages * AHEAD_SHARE)
        ready = self._allocator.num_free + self.num_leaving + self._num_ahead
        if ready > wanted // 2 or self._num_ahead >= self._cache.num_evictable:
            return
        nodes = self._cache.next_evicted(wanted - self._allocator.num_free - self.num_leaving)
        self._num_ahead = sum(len(node.pages) for node in nodes)
        for node in nodes:
            self._store(self._cache.page_keys(node), pages_of(node))

    def _store(self, keys: Sequence[PageKey], pages: np.ndarray) -> TierTask | None:
        """Store whole pages: those of [cache groups, n] that lack nothing, but of groups that are not in every page."""
        whole = self._has_draft(pages[0]) & (pages[self._required] != ABSENT).all(0)
        if not whole.all():
            keys, pages = [key for key, kept in zip(keys, whole.tolist()) if kept], pages[:, whole]
        if not len(keys):
            return None
        return self._tier.store(keys, pages if len(pages) > 1 else pages[0])


def pages_of(node: Node) -> np.ndarray:
    """The pages of an edge [cache groups, n]."""
    return np.stack([node.pages, *node.group_pages])
