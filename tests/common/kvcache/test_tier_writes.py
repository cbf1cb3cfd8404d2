"""When pages of the prefix cache are copied to the host tier, and when they are free again; with copies that are late.
"""

from __future__ import annotations

import numpy as np
import pytest

from baton.common.config.server.tiers import WRITE_POLICIES
from baton.common.kvcache.cache_group import ABSENT, CacheGroup, SlidingWindow
from baton.common.kvcache.layout import KVLayout
from baton.common.kvcache.manager import KVCacheManager
from baton.common.kvcache.pool import KVPool
from baton.common.kvcache.tiers.base import TierContext
from baton.common.kvcache.tiers.host import HostTier
from baton.tests.helpers.late_copies import LateCopies

PAGE = 2


class Setup:
    """A cache with a host tier; a page's content is the last token of it, plus those before."""

    def __init__(self, policy: str, *, shared: bool = False, num_pages: int = 12, slots: int = 64):
        layout = KVLayout(num_kv_heads=1, head_dim=4, page_size=PAGE, dtype="float32", groups=(1, 1))
        self.pool = KVPool(layout, num_pages, "cpu")
        self.cache = KVCacheManager(num_pages, PAGE)
        made = []

        def copies(memory):
            made.append(LateCopies(context, memory))
            return made[0]

        context = TierContext(self.pool, slots * layout.page_bytes, "--hicache-size")
        self.tier = HostTier(context, copies)
        self.device = made[0]
        self.cache.attach_tier(self.tier, WRITE_POLICIES.get(policy)(), shared=shared)

    def ask(self, tokens, *, load=True):
        """Computes a prompt; returns the pages that were found in the cache, and in the tier."""
        ids = np.array(tokens, np.int32)
        table = self.cache.match_prefix(ids, len(ids) - 1)
        cached = table.num_cached_pages
        if not self.cache.allocate_slots(table, len(ids)):
            self.cache.release(table)
            return None
        self.cache.record_use(table, 0)
        keys = self.cache.tier_keys(table, ids, len(ids) - 1)
        if load and (count := self.tier.lookup(keys)):
            task = self.tier.load(keys[:count], table.ids[cached:cached + count])
            task.wait_on_device()
            self.tier.finish(task)
            self.cache.add_loaded(table, ids, count)
        for page in range(table.num_cached_pages):
            self.check(table.ids[page], content(ids, page))
        for page in range(table.num_cached_pages, len(ids) // PAGE):
            self.write(table.ids[page], content(ids, page))
        self.cache.release(table, ids)
        self.cache.check_integrity()
        self.tier.check_integrity()
        return cached, table.num_cached_pages - cached

    def write(self, page, value):
        for group in self.pool.groups:
            group[page] = value

    def check(self, page, value):
        assert all((group[page] == value).all() for group in self.pool.groups), "a page has other content"


def content(ids, page):
    return float(np.dot(ids[:(page + 1) * PAGE], np.arange(1, (page + 1) * PAGE + 1)))


FIRST, SECOND = [1, 2, 3, 4, 5], [7, 8, 9, 10, 11, 12, 13]


def test_write_through_copies_what_was_computed():
    setup = Setup("write_through")
    setup.ask(FIRST)
    assert setup.tier.num_pages == 2 and not setup.device.launched
    setup.cache.poll_tier()
    assert len(setup.device.launched) == 1
    setup.ask(FIRST)
    assert setup.tier.counters.stored == 2


def test_write_through_selective_copies_what_is_used_twice():
    setup = Setup("write_through_selective")
    setup.ask(FIRST)
    setup.ask(SECOND)
    assert setup.tier.num_pages == 0
    assert setup.ask([*FIRST, 6, 7, 8]) == (2, 0)
    assert setup.tier.num_pages == 2
    setup.cache._evict(12)
    assert setup.tier.num_pages == 2
    assert setup.ask(SECOND) == (0, 0) and setup.ask(FIRST) == (0, 2)


def test_write_back_copies_ahead_of_need():
    setup = Setup("write_back", num_pages=64, slots=100)
    for start in range(0, 1500, 50):
        setup.ask(list(range(start, start + 9)), load=False)
        setup.cache.poll_tier()
        setup.device.run()
    tier = setup.tier
    evicted = 64 - setup.cache.num_free < 120 and 30 * 4 - setup.cache.num_cached
    assert 0 < evicted <= tier.num_pages < 120, "some are ahead, not all"
    setup.cache._evict(1)
    assert not setup.device.launched, "the next one had been copied"


def test_a_page_is_overwritten_after_its_copy():
    """Without a poll: the eviction begins the copy, and the stream waits for it."""
    setup = Setup("write_back")
    setup.ask(FIRST)
    setup.ask(SECOND)
    assert setup.ask(list(range(20, 44))) == (0, 0)
    assert setup.ask(FIRST) == (0, 2)


def test_shared_pages_are_free_once_they_are_copied():
    setup = Setup("write_through", shared=True)
    cache = setup.cache
    setup.ask(FIRST)
    setup.ask(SECOND)
    cache._evict(12)
    assert (cache.num_free, cache.num_leaving, cache.num_cached) == (7, 5, 0)
    incoming = cache.match_incoming(np.arange(30, 50, dtype=np.int32))
    assert not cache.allocate_incoming(incoming, 20)
    cache.poll_tier()
    assert cache.num_leaving == 5
    setup.device.run()
    cache.poll_tier()
    assert cache.num_leaving == 0 and cache.allocate_incoming(incoming, 20)
    cache.release(incoming)
    cache.check_integrity()


def test_a_step_of_this_device_waits_for_shared_pages_as_a_last_resort():
    setup = Setup("write_back", shared=True)
    setup.ask(FIRST)
    setup.ask(SECOND)
    table = setup.cache.match_prefix(np.arange(30, 54, dtype=np.int32), 0)
    assert setup.cache.allocate_slots(table, 24) and not setup.device.launched
    setup.cache.release(table)


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("policy", WRITE_POLICIES.names)
def test_random_prompts_find_what_was_computed(policy, shared):
    rng = np.random.default_rng(3)
    setup = Setup(policy, shared=shared, num_pages=16, slots=20)
    found = 0
    for _ in range(800):
        begin = int(rng.integers(0, 6)) * 100
        prompt = [*range(begin, begin + int(rng.integers(3, 14))), int(rng.integers(0, 3))]
        answer = setup.ask(prompt)
        found += answer is not None and answer[1]
        match rng.integers(0, 4):
            case 0:
                setup.cache.poll_tier()
            case 1:
                setup.device.run_some(rng)
            case 2 if rng.integers(40) == 0:
                setup.cache.flush()
                assert setup.tier.num_pages == 0
    assert found > 50


def test_a_cache_without_a_tier_has_nothing_to_load():
    cache = KVCacheManager(8, PAGE)
    table, ids = cache.match_prefix(np.array(FIRST, np.int32), 4), np.array(FIRST, np.int32)
    assert cache.tier_keys(table, ids, 4) == [] == cache.keys_beyond_cache(ids, 4)
    cache.poll_tier()
    keys, pages = cache.computed_pages(cache.new_private_table(), ids)
    assert keys == [] and not len(pages)
    assert not cache.writes_windows and cache.num_leaving == 0
    assert not cache.leaves_window(cache.new_private_table(), 4)


def test_copies_without_the_draft_s_keys_and_values_are_dropped():
    setup, ids = Setup("write_through"), np.array(SECOND[:6], np.int32)
    table = setup.cache.match_prefix(ids, 6)
    assert setup.cache.allocate_slots(table, 6)
    setup.cache.commit(table, ids)
    keys, pages = setup.cache.computed_pages(table, ids)
    assert setup.tier.lookup(keys) == 3 == len(pages)
    setup.cache.open_draft_gap(table, 3)
    assert setup.tier.lookup(keys) == 1
    assert len(setup.cache.computed_pages(table, ids)[0]) == 1
    setup.cache.release(table)


def test_pages_for_a_peer_wait_until_those_that_leave_are_copied():
    setup, ids = Setup("write_back", shared=True, num_pages=4), np.array(SECOND, np.int32)
    setup.ask([*FIRST, 6, 7, 8])
    setup.device.run()
    table = setup.cache.match_incoming(ids)
    assert not setup.cache.allocate_incoming(table, len(ids)) and setup.cache.num_leaving == 4
    setup.device.run()
    setup.cache.poll_tier()
    assert setup.cache.num_leaving == 0 and setup.cache.allocate_incoming(table, len(ids))
    setup.cache.release(table)
    setup.cache.check_integrity()


def test_pages_of_a_window_are_loaded_after_those_that_are_cached():
    cache = KVCacheManager(16, PAGE, groups=[CacheGroup(SlidingWindow(6), 12, PAGE)])
    ids = np.array([*FIRST, *SECOND], np.int32)
    table = cache.match_prefix(ids[:5], 4)
    assert cache.allocate_incoming(table, 4)
    cache.commit(table, ids[:4])
    cache.release(table, ids[:4])
    for count, wanted in ((1, [True]), (4, [False, True, True, True])):
        table = cache.match_prefix(ids, len(ids))
        assert table.num_cached_pages == 2 and cache.allocate_slots(table, len(ids))
        pages = cache.allocate_loaded(table, count)
        assert pages is not None and np.array_equal(pages[0], table.ids[2:2 + count])
        assert (pages[1] != ABSENT).tolist() == wanted
        cache.release(table)
    cache.tier = Setup("write_through").tier
    table = cache.match_prefix(ids, len(ids))
    assert cache.computed_pages(table, ids[:4])[0] == [], "the table lacks the window's pages, and the tier has none"
    cache.release(table)
    hold = cache.groups[0].allocator.allocate(cache.groups[0].num_free)
    table = cache.match_prefix(ids, len(ids))
    assert cache.allocate_slots(table, len(ids)) and cache.allocate_loaded(table, 4) is None
    cache.groups[0].allocator.free(hold)
    cache.release(table)
    cache.check_integrity()


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("policy", ["write_through", "write_back"])
def test_pages_of_a_window_are_overwritten_after_their_copies(policy, shared):
    """They are evicted while the edges that they belong to stay; into shared ones peers write, once they are free."""
    layout = KVLayout(num_kv_heads=1, head_dim=4, page_size=PAGE, dtype="float32", groups=(1,))
    pool, window = KVPool(layout, 12, "cpu"), KVPool(layout, 5, "cpu")
    made = []

    def copies(memory):
        made.append(LateCopies(context, memory))
        return made[0]

    context = TierContext(pool, 64 * layout.page_bytes, "--hicache-size", further=(window,))
    cache = KVCacheManager(12, PAGE, groups=[CacheGroup(SlidingWindow(2), 5, PAGE)])
    cache.attach_tier(HostTier(context, copies), WRITE_POLICIES.get(policy)(), shared=shared)

    def compute(tokens):
        ids = np.array(tokens, np.int32)
        table = cache.match_prefix(ids, len(ids) - 1)
        assert cache.reserve(table, len(ids)) and cache.allocate_slots(table, len(ids))
        assert cache.allocate_chunk(table, 0, len(ids)) == len(ids)
        return table, ids

    table, ids = compute(FIRST[:4])
    for group in (*pool.groups, *window.groups):
        group[:] = 1.0
    cache.release(table, ids)
    cache.poll_tier()
    written_ahead = policy == "write_through"
    assert bool(made[0].launched) == written_ahead and cache.tier.num_pages == 2 * written_ahead
    table, _ = compute(SECOND)
    assert cache.tier.num_pages >= 1
    assert not made[0].launched, "the next step writes into pages that a copy is to read"
    cache.release(table)
    cache.check_integrity()
