"""The KV cache as schedulers see it: requests read cached pages, allocate fresh ones, and publish them.

Every page is free, allocated to exactly one request, or owned by the prefix cache:
``free + allocated + cached == total``, in each cache group. A request may *read* cached pages that it has locked.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from ..api.namespace import SHARED, Namespace
from .allocator import PageAllocator
from .cache_group import ABSENT, CacheGroup, GroupTable
from .page_keys import PageKey, namespace_key, page_keys
from .partial_pages import PartialPage, PartialPages
from .prefix_cache import Node, PrefixCache
from .tier_writes import TierWrites

if TYPE_CHECKING:
    from .eviction.base import EvictionOrder
    from .tiers.base import KVTier
    from .write_policies.base import WritePolicy


class PageTable:
    """Page tables of one request (vLLM's block tables): its page ids in token order, and its tables in the further
    cache groups, ``groups``.

    ``owned[i]`` is True where page i is allocated to the request and freed with it, False where the prefix cache owns
    it and ``node``'s lock protects it. A table without a ``node`` has nothing to do with the prefix cache.
    ``partial_page`` belongs to the cache too; it is the last page. ``draft_gap``: the first token whose keys and values
    the draft model's pool lacks; None where it has all. ``priority``: how urgent the request is, larger first.
    """

    __slots__ = ("_ids", "_new", "_owned", "count", "draft_gap", "groups", "node", "num_cached_pages", "num_published",
                 "partial_page", "priority")

    def __init__(self, cached: np.ndarray, node: Node | None, groups: Sequence[GroupTable] = ()):
        self.groups = groups
        self.count = len(cached)
        self._ids = np.empty(max(8, 2 * self.count), np.int64)
        self._ids[: self.count] = cached
        self._owned = np.zeros(len(self._ids), bool)
        self._new: list[int] = []  # the last pages, until the arrays are read
        self.node = node
        self.num_cached_pages = self.count
        self.num_published = self.count  # leading pages that the prefix cache has, these or equal ones
        self.partial_page: PartialPage | None = None
        self.draft_gap: int | None = None
        self.priority = 0

    def __repr__(self) -> str:
        owned = np.count_nonzero(self.owned)
        return f"PageTable({self.count} pages, {owned} owned, {self.num_cached_pages} cached at start)"

    def covers(self, num_pages: int) -> bool:
        """Returns whether the table has the first ``num_pages`` pages in all groups. Further groups have no pages for
        drafts where those are not stored with their tokens."""
        return self.count >= num_pages and all(own.end >= num_pages for own in self.groups)

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

    def cut(self, count: int) -> np.ndarray:
        """Remove the pages after the first ``count``, which the request owns; returns them."""
        removed = self.ids[count:].copy()
        assert self.owned[count:].all()
        self.count = count
        return removed

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

    def __init__(self, num_pages: int, page_size: int, prefix_cache: bool = True, groups: Sequence[CacheGroup] = (),
                 lookahead: int = 0, order: EvictionOrder | None = None):
        """``num_pages`` of the first cache group, whose layers read all tokens; ``groups`` are the further ones, with
        pages of the same number of tokens. ``lookahead``: tokens after a page on which its content depends. ``order``:
        the prefix cache's eviction policy."""
        self.page_size = page_size
        self.lookahead = lookahead
        self.allocator = PageAllocator(num_pages)
        self.groups = groups
        self.prefix_cache = PrefixCache(page_size, groups, lookahead, order) if prefix_cache else None
        self.partial_pages = PartialPages(groups)
        self.tier: KVTier | None = None
        self.zero_pages: Callable[[int, np.ndarray], None] | None = None  # of a cache group, on the device
        self._writes: TierWrites | None = None
        self._num_allocated = 0
        self._without_draft: np.ndarray | None = None  # [pages] bool of cached pages, once there is any

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

    def attach_tier(self, tier: KVTier, policy: WritePolicy, *, shared: bool, alone: bool = True) -> None:
        """Keep pages of the prefix cache in ``tier``, as ``policy`` says. ``shared``: not only this device's stream
        writes into free pages (transfers do), so that a page is freed only after it was copied; unless ``alone``, on
        all ranks."""
        assert self.prefix_cache is not None
        self.tier = tier
        self._writes = TierWrites(tier, policy, self.prefix_cache, self.allocator, shared=shared, alone=alone,
                                  has_draft=self._has_draft, groups=self.groups)

    @property
    def writes_windows(self) -> bool:
        """True where pages of further groups are copied to a tier, and all would be."""
        return self._writes is not None and any(group.is_in_every_page for group in self.groups)

    @property
    def loads_any_prefix(self) -> bool:
        """True where what a tier can load of a few pages says whether it has any of more."""
        return all(group.is_in_every_page for group in self.groups)

    def leaves_window(self, table: PageTable, num_tokens: int) -> bool:
        """True where a page that is not published is about to leave a further group, with ``num_tokens`` computed."""
        return table.node is not None and any(
            group.first_page(num_tokens + 2 * self.page_size) > table.num_published for group in self.groups)

    def poll_tier(self, min_copied: Callable[[Callable[[], int]], int] = lambda own: own()) -> None:
        """Advance copies to and from the tier, and free pages that have been copied; once a step. ``min_copied``
        returns the minimum of a number over all ranks."""
        if (writes := self._writes) is not None:
            writes.poll()
            if writes.num_leaving:
                writes.free_copied(min_copied(lambda: writes.num_copied))

    @property
    def num_leaving(self) -> int:
        """Pages that are free once a tier has copied them."""
        return 0 if self._writes is None else self._writes.num_leaving

    def match_prefix(self, tokens: np.ndarray, limit: int, namespace: Namespace = SHARED) -> PageTable:
        """A page table with the cached prefix of ``tokens`` (int32) in a namespace, of at most ``limit`` tokens, which
        it locks. What is committed from the table stays in that namespace."""
        if self.prefix_cache is None:
            return self.new_private_table()
        node, pages = self.prefix_cache.match(tokens[: limit // self.page_size * self.page_size + self.lookahead],
                                              namespace)
        return self._table_of(node, pages, len(pages) * self.page_size)

    def match_incoming(self, tokens: np.ndarray, namespace: Namespace = SHARED) -> PageTable:
        """``match_prefix`` of a prompt that comes from another engine and is not computed here: a further group's table
        begins with the first page that is read after the prompt, and its cached pages may end before the others'. Pages
        without the draft model's keys and values come from the other engine, too."""
        if self.prefix_cache is None:
            return self.new_private_table(len(tokens))
        node, pages = self.prefix_cache.match_first_group(tokens, namespace)
        if (drafted := self._num_with_draft(pages)) < len(pages):
            node, pages = self.prefix_cache.match_first_group(tokens[:drafted * self.page_size + self.lookahead],
                                                              namespace)
        return self._table_of(node, pages, len(tokens))

    def _table_of(self, node: Node, pages: np.ndarray, num_tokens: int) -> PageTable:
        """A page table with the pages of a cached prefix, which it locks. ``num_tokens`` are not computed here."""
        assert self.prefix_cache is not None
        self.prefix_cache.lock(node)
        table = PageTable(pages, node, [GroupTable(group) for group in self.groups])
        if (drafted := self._num_with_draft(pages)) < len(pages):
            table.draft_gap = drafted * self.page_size
        for index, (group, own) in enumerate(zip(self.groups, table.groups)):
            first = group.first_page(num_tokens)
            ids = self.prefix_cache.group_pages(node, index, first, len(pages))
            absent = np.flatnonzero(ids == ABSENT)
            group.begin(own, first, ids[:absent[0]] if len(absent) else ids)
        return table

    def _num_with_draft(self, pages: np.ndarray) -> int:
        """Returns how many of the first of cached ``pages`` have the draft model's keys and values."""
        if self._without_draft is None or not (lacking := self._without_draft[pages]).any():
            return len(pages)
        return int(lacking.argmax())

    def _has_draft(self, pages: np.ndarray) -> np.ndarray:
        """[n] bool: which of cached ``pages`` have the draft model's keys and values."""
        if self._without_draft is None:
            return np.ones(len(pages), bool)
        present: np.ndarray = ~self._without_draft[pages]
        return present

    @property
    def has_draft_gaps(self) -> bool:
        """True once cached pages have lacked the draft model's keys and values."""
        return self._without_draft is not None

    def open_draft_gap(self, table: PageTable, num_tokens: int) -> None:
        """Record that the draft model's pool has the keys and values of only the first ``num_tokens`` tokens of
        ``table``, whose pages may have been published."""
        table.draft_gap = num_tokens
        first = num_tokens // self.page_size
        self._note_draft_gap(table, first, table.num_published)
        if self._writes is not None and table.node is not None:
            self._writes.draft_lost(table.node, first)

    def close_draft_gap(self, table: PageTable) -> None:
        """Record that the draft model's pool has the keys and values of all computed tokens of ``table``."""
        table.draft_gap = None
        if self._without_draft is not None:
            self._without_draft[table.ids] = False

    def new_private_table(self, num_tokens: int = 0) -> PageTable:
        """An empty page table that never enters the prefix cache: token ids do not identify what its pages contain.
        ``num_tokens`` are not computed here."""
        table = PageTable(np.empty(0, np.int64), None, [GroupTable(group) for group in self.groups])
        for group, own in zip(self.groups, table.groups):
            group.begin(own, group.first_page(num_tokens), table.ids)
        return table

    def allocate_slots(self, table: PageTable, num_tokens: int, *, waits: bool = True) -> bool:
        """Extend ``table`` to cover ``num_tokens`` tokens; False, and no change of it, where pages are short. With
        ``waits`` those that a tier is copying are waited for; else they count once it has."""
        missing = self.pages_for(num_tokens) - table.count
        if missing <= 0:
            return True
        if missing > self.num_available + (self.num_leaving if waits else 0):
            return False
        if missing > self.num_free:
            assert self.prefix_cache is not None
            self._evict(missing - self.num_free - self.num_leaving)
            self.allocator.free(self.partial_pages.evict(max(0, missing - self.num_free - self.num_leaving)))
            if missing > self.num_free:
                assert self._writes is not None
                if not waits:
                    return False
                self._writes.reclaim(missing)
        table.extend(self.allocator.allocate(missing))
        self._num_allocated += missing
        return True

    def _evict(self, count: int) -> None:
        """Free ``count`` pages of the prefix cache, or all that no request reads; a tier keeps their content. With
        transfers, some may be free later."""
        assert self.prefix_cache is not None
        if self._writes is not None:
            self._writes.evict(count)
        else:
            self.allocator.free(self.prefix_cache.evict(count))

    def record_use(self, table: PageTable, priority: int) -> None:
        """Count the request of ``table`` as a reader of its cached pages, and of those that it commits later."""
        table.priority = priority
        if self.prefix_cache is not None and table.node is not None:
            self.prefix_cache.record_use(table.node, priority)
            if self._writes is not None:
                self._writes.reused(table.node)

    def tier_keys(self, table: PageTable, tokens: np.ndarray, limit: int) -> list[PageKey]:
        """The keys of the full pages of the first ``limit`` ``tokens`` (int32) that the prefix cache did not have when
        ``table`` was made: the tier may have them. Empty without a tier."""
        if self.tier is None or table.node is None:
            return []
        assert self.prefix_cache is not None
        first, end = table.num_cached_pages, limit // self.page_size
        return self.prefix_cache.keys_below(table.node, tokens[first * self.page_size:
                                                               end * self.page_size + self.lookahead])

    def keys_beyond_cache(self, tokens: np.ndarray, limit: int, namespace: Namespace = SHARED) -> list[PageKey]:
        """The keys of the full pages of the first ``limit`` ``tokens`` (int32) that the prefix cache does not have now.
        Empty without a tier."""
        if self.tier is None or self.prefix_cache is None:
            return []
        covered = tokens[:limit // self.page_size * self.page_size + self.lookahead]
        node, pages = self.prefix_cache.match(covered, namespace)
        return self.prefix_cache.keys_below(node, covered[len(pages) * self.page_size:])

    def computed_pages(self, table: PageTable, tokens: np.ndarray) -> tuple[list[PageKey], np.ndarray]:
        """The keys and ids of the full pages of ``table`` that ``tokens`` (int32, all computed) fill, those that a tier
        may keep; none where content is not known by tokens."""
        if table.node is None:
            return [], np.empty(0, np.int64)
        keys = page_keys(namespace_key(table.node.namespace), tokens, self.page_size, self.lookahead)
        count = len(keys)
        if self.groups:  # whose pages the table lacks: only those that the tier has
            assert self.tier is not None
            count = self.tier.lookup(keys)
        if table.draft_gap is not None:
            count = min(count, table.draft_gap // self.page_size)
        count = self._num_with_draft(table.ids[:count])
        return keys[:count], table.ids[:count].copy()

    def allocate_loaded(self, table: PageTable, num_pages: int) -> np.ndarray | None:
        """Pages [cache groups, n] for ``num_pages`` that a tier fills, after those that ``table``, which has the first
        group's, found in the prefix cache. In further groups only those that later tokens read, ABSENT for the others.
        None, and no change, where a further group's are short."""
        first, end = table.num_cached_pages, table.num_cached_pages + num_pages
        firsts = [group.first_page(end * self.page_size) for group in self.groups]
        if not all(self._free_in_group(index, end - max(begin, own.end))
                   for index, (own, begin) in enumerate(zip(table.groups, firsts))):
            return None
        rows = [table.ids[first:end]]
        for group, own, begin in zip(self.groups, table.groups, firsts):
            group.drop_before(own, begin)
            if not len(own.ids):
                own.first = own.unread = begin
            group.extend(own, end)
            rows.append(np.full(num_pages, ABSENT, np.int64))
            loaded = max(first, own.first)
            rows[-1][loaded - first:] = own.span(loaded, end)
        return np.stack(rows)

    def add_loaded(self, table: PageTable, tokens: np.ndarray, num_pages: int) -> None:
        """Publish ``num_pages`` pages of ``tokens`` (int32), after those that ``table`` found in the prefix cache: a
        tier has filled them."""
        count = table.num_cached_pages + num_pages
        self.commit(table, tokens[:count * self.page_size + self.lookahead])
        table.num_cached_pages = count
        for own in table.groups:
            own.cached_end = max(own.cached_end, min(count, own.end))

    def reserve(self, table: PageTable, max_tokens: int) -> bool:
        """Reserve pages of further groups for a request of at most ``max_tokens`` tokens; False where other requests
        have reserved them."""
        bounds = [group.bound_for(max_tokens) for group in self.groups]
        if any(group.num_reserved + bound > group.num_pages for group, bound in zip(self.groups, bounds)):
            return False
        for group, own, bound in zip(self.groups, table.groups, bounds):
            group.reserve(own, bound)
        return True

    def allocate_incoming(self, table: PageTable, num_tokens: int, num_next: int = 0) -> bool:
        """``allocate_slots`` in all groups, for ``num_tokens`` tokens that come from elsewhere, of which further groups
        need those that the tokens after them read, and for the ``num_next`` tokens after them."""
        count = self.pages_for(num_tokens + num_next)
        for group, own in zip(self.groups, table.groups):
            group.drop_before(own, first := group.first_page(num_tokens))
            if not len(own.ids):
                own.first = own.unread = first
        if not all(self._free_in_group(index, count - own.end) for index, own in enumerate(table.groups)):
            return False
        if not self.allocate_slots(table, num_tokens + num_next, waits=False):
            return False
        for group, own in zip(self.groups, table.groups):
            group.extend(own, count)
        return True

    def allocate_chunk(self, table: PageTable, start: int, stop: int) -> int:
        """Give further groups the pages of the tokens ``start`` to ``stop``, which the next step computes, or of fewer
        where pages are short; returns where these end. The table has their pages of the first group. At most the step
        of the last call may be in flight."""
        for index, (group, own) in enumerate(zip(self.groups, table.groups)):
            group.drop_unread(own, start)
            stop = group.extend_for_chunk(own, start, stop, partial(self._free_in_group, index))
        return stop

    def allocate_next(self, table: PageTable, num_tokens: int, num_drafts: int = 0) -> bool:
        """Extend ``table`` in all groups by the page of the next token, the last of ``num_tokens`` but for the drafts
        after it, where it has none; False where pages are short."""
        for index, (group, own) in enumerate(zip(self.groups, table.groups)):
            count = self.pages_for(num_tokens if group.stores_drafts else num_tokens - num_drafts)
            if own.end < count:
                group.make_room(own, num_tokens - num_drafts - 1)
                if not self._free_in_group(index, count - own.end):
                    return False
                group.extend(own, count)
        return self.allocate_slots(table, num_tokens)

    def allocate_drafts(self, table: PageTable, num_drafts: int) -> int:
        """Allocate what drafts of the next step take besides the slots of their tokens; returns for how many of
        ``num_drafts`` there is room."""
        for index, (group, own) in enumerate(zip(self.groups, table.groups)):
            num_drafts = group.allocate_drafts(own, num_drafts, partial(self._free_in_group, index))
        return num_drafts

    def keep_accepted(self, table: PageTable, start: int, accepted: int) -> None:
        """Record that the first ``accepted`` drafts after the token at position ``start`` are tokens, once the step
        that verified them has run."""
        for group, own in zip(self.groups, table.groups):
            group.keep_accepted(own, start, accepted)

    @property
    def stores_drafts(self) -> bool:
        """True where drafts need no more than the slots of their tokens."""
        return all(group.stores_drafts for group in self.groups)

    def _free_in_group(self, index: int, count: int) -> bool:
        """Evict until ``count`` pages of a further group are free; False, and no change, where that is impossible."""
        group = self.groups[index]
        if count <= group.num_free:
            return True
        if count > group.num_available:
            return False
        assert self.prefix_cache is not None
        if self._writes is not None:
            self._writes.evict_from_group(index, count - group.num_free)
        else:
            self.prefix_cache.evict_from_group(index, count - group.num_free)
        while count > group.num_free:
            self.allocator.free(self.partial_pages.evict(1))
        return True

    def trim(self, table: PageTable, num_tokens: int) -> None:
        """Free the pages after those of ``num_tokens`` tokens, which no step reads or writes any more. The table has no
        further groups."""
        if table.count > (count := self.pages_for(num_tokens)) and not table.groups:
            removed = table.cut(count)
            self.allocator.free(removed)
            self._num_allocated -= len(removed)

    def append_pages(self, tables: Sequence[PageTable]) -> np.ndarray | None:
        """Append one page to each table, in all groups; returns the first group's in order. Returns None, and changes
        nothing, where too few are free: then call ``allocate_next`` for one after the other, which evicts."""
        if len(tables) > self.num_free or any(len(tables) > group.num_free for group in self.groups):
            return None
        pages = self.allocator.allocate(len(tables))
        for table, page in zip(tables, pages.tolist()):
            table.append(page)
        for index, group in enumerate(self.groups):
            for table in tables:
                own = table.groups[index]
                group.make_room(own, (table.count - 1) * self.page_size)
                group.extend(own, table.count)
        self._num_allocated += len(tables)
        return pages

    def commit(self, table: PageTable, tokens: np.ndarray) -> None:
        """Publish the full pages of ``tokens`` (int32) in the prefix cache: all are computed but the lookahead, without
        which, as long as it is unknown, the last page may not be published.

        The page ids in ``table`` never change: a transfer may be reading them. Where the tree has equal pages already,
        the request keeps its own until it ends.
        """
        cache = self.prefix_cache
        count = (len(tokens) - self.lookahead) // self.page_size
        if cache is None or table.node is None:
            return
        if count <= table.num_published:
            if count == table.num_published:
                self._publish_groups(table)
            return
        first = table.num_published  # table.node covers the pages before
        node, present = cache.insert(tokens[first * self.page_size : count * self.page_size + self.lookahead],
                                     table.ids[first:count], table.node, table.priority)
        present += first
        cache.move_lock(table.node, node)
        table.node = node
        assert present <= count and table.owned[present:count].all(), \
            "pages entered the tree that the request did not own"
        table.owned[present:count] = False
        self._num_allocated -= count - present
        if table.draft_gap is not None or self._without_draft is not None:
            self._note_draft_gap(table, present, count)
        table.num_published = count
        self._publish_groups(table)
        if self._writes is not None and count > present:
            self._writes.committed(node, count - present)

    def _note_draft_gap(self, table: PageTable, first: int, end: int) -> None:
        """Record which of the pages ``first`` to ``end`` of ``table``, which enter the prefix cache, lack the draft
        model's keys and values."""
        if self._without_draft is None:
            self._without_draft = np.zeros(self.num_pages, bool)
        gap = end if table.draft_gap is None else table.draft_gap // self.page_size
        self._without_draft[table.ids[first:end]] = np.arange(first, end) >= gap

    def _publish_groups(self, table: PageTable) -> None:
        """Hand pages of further groups to the tree, where it lacks them on the path to ``table.node``."""
        for index, (group, own) in enumerate(zip(self.groups, table.groups)):
            assert self.prefix_cache is not None and table.node is not None
            for before, edge in self.prefix_cache.edges_from(table.node, own.first, table.num_published):
                if group.give_to_cache(own, before, edge.group_pages[index]):
                    self.prefix_cache.add_to_group(edge, index)
                    if self._writes is not None and not group.is_in_every_page:
                        self._writes.completed(edge)

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
        table.partial_page = self.partial_pages.add(
            int(table.ids[-1]), [group.give_last_to_cache(own) for group, own in zip(self.groups, table.groups)])
        self.partial_pages.acquire(table.partial_page)
        return table.partial_page

    def match_full_prompt(self, tokens: np.ndarray, partial: PartialPage | None, namespace: Namespace = SHARED,
                          next_token: int = 0) -> PageTable | None:
        """A page table of all pages of ``tokens`` (int32), which ``next_token`` follows, ``partial`` the last; None
        where some were evicted."""
        rest = len(tokens) % self.page_size
        table = self.match_prefix(np.append(tokens, np.int32(next_token)), len(tokens), namespace)
        if table.count < len(tokens) // self.page_size or (rest and (partial is None or partial.page is None)):
            self.release(table)
            return None
        if rest:
            assert partial is not None and partial.page is not None
            table.extend(np.array([partial.page], np.int64))
            table.owned[-1] = False
            table.partial_page = partial
            self.partial_pages.acquire(partial)
            for group, own, page in zip(self.groups, table.groups, partial.group_pages):
                group.read(own, page)
        return table

    def drop_partial_page(self, partial: PartialPage) -> None:
        """Stop retaining a partial page; it becomes free with its last reader."""
        self.allocator.free(self.partial_pages.drop(partial))

    def is_cacheable(self, table: PageTable) -> bool:
        """True where the full pages of ``table`` may stay in the prefix cache."""
        return self.prefix_cache is not None and table.node is not None

    def scrub(self, table: PageTable) -> None:
        """Zero the pages that are freed with a request: attention reads whole pages and masks by weight, so that NaN
        in them would reach the requests that get them next."""
        if self.zero_pages is not None:
            self.zero_pages(0, table.ids[table.owned])
            for index, own in enumerate(table.groups):
                self.zero_pages(index + 1, own.ids[own.owned])

    def release(self, table: PageTable, tokens: np.ndarray | None = None) -> None:
        """Free a table's pages. ``tokens``, where given, are as in ``commit``: their full pages stay in the cache."""
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
            for group, own in zip(self.groups, table.groups):
                group.release(own)
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
        """Empty the prefix cache and its tier; the caller has made sure that no request has locked a node."""
        self.drop_unread()
        if self.prefix_cache is not None:
            assert self.prefix_cache.num_pages == 0, "the cache was flushed while requests read it"

    def change_weights(self, weights: str) -> None:
        """Empty the prefix cache and its tier, but for pages that requests read: these stay in the namespaces of other
        weights than ``weights``, where no later request looks."""
        self.drop_unread()
        if self.prefix_cache is not None:
            for listener in self.prefix_cache.listeners:
                listener.weights_changed(weights)

    def drop_unread(self) -> None:
        """Empty the prefix cache and its tier, but for pages that requests read."""
        if self.tier is not None:
            self.tier.clear()
        self.allocator.free(self.partial_pages.evict(len(self.partial_pages)))
        if self.prefix_cache is not None:
            self.allocator.free(self.prefix_cache.evict(self.prefix_cache.num_pages))

    @property
    def group_gauges(self) -> dict[str, float]:
        """Pages of the further cache groups, those with a sliding window (swa) and those with a state (mamba), for the
        engine's report."""
        gauges: dict[str, float] = {}
        for name in dict.fromkeys(group.name for group in self.groups):
            free, allocated, cached, available, total = (
                sum(getattr(group, count) for group in self.groups if group.name == name)
                for count in ("num_free", "num_allocated", "num_cached", "num_available", "num_pages"))
            gauges |= {f"{name}_token_usage": 1 - available / total, f"{name}_kv_pages_free": free,
                       f"{name}_kv_pages_allocated": allocated, f"{name}_kv_pages_cached": cached}
        return gauges

    def tidy(self) -> None:
        """Sort the free pages, so that later requests get contiguous ones where possible; for idle moments."""
        self.allocator.tidy()
        for group in self.groups:
            group.allocator.tidy()

    def check_integrity(self) -> None:
        """Asserts ``free + allocated + cached == total`` and the tree's own counts. Cheap enough for idle moments."""
        if self.prefix_cache is not None:
            self.prefix_cache.check_integrity()
        if self.tier is not None:
            self.tier.check_integrity()
        assert self.num_free + self.num_leaving + self.num_allocated + self.num_cached == self.num_pages, repr(self)
        for index, group in enumerate(self.groups):
            cached = [self.partial_pages.cached_in_group(index)]
            if self.prefix_cache is not None:
                cached.append(self.prefix_cache.cached_in_group(index))
            group.check_integrity(cached)
