"""A prefix cache whose pages depend on the token after them: every slot that a request reuses is its own."""

import numpy as np
import pytest

from baton.common.api.kv_events import Removed
from baton.common.api.namespace import SHARED, Namespace
from baton.common.engine.kv_event_publisher import PageRecorder
from baton.common.kvcache.cache_group import CacheGroup, SlidingWindow
from baton.common.kvcache.manager import KVCacheManager
from baton.common.kvcache.page_keys import namespace_key, page_keys
from baton.common.kvcache.prefix_cache import PrefixCache
from baton.common.kvcache.write_policies.write_back import WriteBack

PAGE = 2
SALTED = Namespace(salt="s")


def tokens(*ids):
    return np.array(ids, dtype=np.int32)


def pages(*ids):
    return np.array(ids, dtype=np.int64)


def slots_of(ids, start, stop):
    """The content of slots ``start`` to ``stop``: token, next token and position. ``ids`` has the token after the
    last."""
    positions = np.arange(start, stop)
    return (ids[start:stop].astype(np.int64) * 1000 + ids[start + 1:stop + 1]) * 1000 + positions


def test_a_page_is_found_only_before_the_token_that_it_was_computed_before():
    cache = PrefixCache(PAGE, lookahead=1)
    cache.insert(tokens(1, 2, 3, 4, 5), pages(10, 11))
    assert cache.match(tokens(1, 2, 3, 4, 5, 6))[1].tolist() == [10, 11]
    assert cache.match(tokens(1, 2, 3, 4, 9, 6))[1].tolist() == [10]
    assert cache.match(tokens(1, 2, 3, 4))[1].tolist() == [10]  # the token after the second is not known
    assert cache.match(tokens(1, 2, 9))[1].tolist() == []
    _, present = cache.insert(tokens(1, 2, 3, 4, 9), pages(20, 21))
    assert present == 1 and cache.match(tokens(1, 2, 3, 4, 9))[1].tolist() == [10, 21]
    assert cache.num_pages == 3
    cache.check_integrity()
    assert sorted(cache.evict(9)) == [10, 11, 21]


def test_a_page_is_published_once_the_token_after_it_is_known():
    cache = KVCacheManager(8, PAGE, lookahead=1)
    table = cache.match_prefix(tokens(1, 2, 3, 4), 3)
    assert cache.allocate_slots(table, 4)
    cache.commit(table, tokens(1, 2, 3, 4))
    assert table.num_published == 1
    cache.release(table, tokens(1, 2, 3, 4, 5))
    assert cache.num_cached == 2
    assert cache.match_incoming(tokens(1, 2, 3, 4)).count == 1
    assert cache.match_full_prompt(tokens(1, 2, 3, 4), None, next_token=5).count == 2
    assert cache.match_full_prompt(tokens(1, 2, 3, 4), None, next_token=6) is None


def test_keys_of_tiers_differ_with_the_token_after_the_page():
    root = namespace_key(SHARED)
    first = page_keys(root, tokens(1, 2, 3, 4, 5), PAGE, 1)
    assert len(first) == 2 and page_keys(root, tokens(1, 2, 3, 4), PAGE, 1) == first[:1]
    assert page_keys(root, tokens(1, 2, 3, 4, 6), PAGE, 1)[0] == first[0]
    assert page_keys(root, tokens(1, 2, 3, 4, 6), PAGE, 1)[1] != first[1]
    cache = PrefixCache(PAGE, lookahead=1)
    node, _ = cache.insert(tokens(1, 2, 3, 4, 5), pages(0, 1))
    assert cache.page_keys(node) == first and cache.keys_below(node, tokens(5, 6, 7)) == page_keys(
        first[-1], tokens(5, 6, 7), PAGE, 1)
    cache.match(tokens(1, 2, 3))  # splits an edge that has keys
    assert cache.page_keys(cache.match(tokens(1, 2, 3))[0]) == first[:1]


def test_equal_pages_before_different_tokens_are_one_page_to_subscribers():
    cache = PrefixCache(PAGE, lookahead=1)
    recorder = PageRecorder(cache)
    cache.listeners.append(recorder)
    cache.insert(tokens(1, 2, 3, 4, 5), pages(10, 11))
    older, _ = cache.insert(tokens(1, 2, 3, 4, 6), pages(20, 21))
    first, second = recorder.take()
    assert first.token_ids == [1, 2, 3, 4] and second.token_ids == [3, 4]
    assert first.hashes[1:] == second.hashes
    cache.lock(older)
    assert sorted(cache.evict(1)) == [11] and recorder.take() == []
    cache.unlock(older)
    cache.insert(tokens(7, 8, 9), pages(12))
    cache.match(tokens(7, 8, 9))
    cache.evict(1)
    removed = [event.hashes for event in recorder.take() if isinstance(event, Removed)]
    assert removed == [first.hashes[1:]]


class Simulation:
    """Requests of few different tokens, the slots of whose pages hold what ``slots_of`` says; each reads all of its
    slots when it is computed, and takes pages from the cache, from a tier, and from other requests' beginnings."""

    def __init__(self, seed, groups):
        self.rng = np.random.default_rng(seed)
        self.cache = KVCacheManager(24, PAGE, groups=groups, lookahead=1)
        self.cache.attach_tier(self, WriteBack(), shared=False) if not groups else None
        self.slots = np.full((24, PAGE), -1)
        self.stored = {}
        self.num_reused = self.num_loaded = 0

    def check_integrity(self): ...

    def store(self, keys, page_ids):
        self.stored.update(zip(keys, self.slots[page_ids].copy()))

    def write(self, table, ids, start, stop):
        positions = np.arange(start, stop)
        self.slots[table.ids[positions // PAGE], positions % PAGE] = slots_of(ids, start, stop)

    def check(self, table, ids, count):
        """The first ``count`` slots are right."""
        assert np.array_equal(self.slots[table.ids].reshape(-1)[:count], slots_of(ids, 0, count))

    def begin(self, namespace):
        """A request whose prompt is computed or comes from elsewhere; returns its tokens and page table."""
        ids = self.rng.integers(1, 3, self.rng.integers(2, 14)).astype(np.int32)
        incoming, length = self.rng.integers(0, 4) == 0, len(ids)
        limit = length if incoming else int(self.rng.integers(0, length))
        table = (self.cache.match_incoming(ids, namespace) if incoming else
                 self.cache.match_prefix(ids, limit, namespace))
        if not self.cache.reserve(table, 24) or not self.allocate(table, length, incoming):
            self.cache.release(table)
            return None
        for key in self.cache.tier_keys(table, ids, limit):
            if key not in self.stored:
                break
            self.slots[table.ids[table.num_cached_pages]] = self.stored[key]
            self.cache.add_loaded(table, ids, 1)
            self.num_loaded += 1
        found = table.num_cached_pages * PAGE
        self.num_reused += found
        ids = np.append(ids, np.int32(self.rng.integers(1, 3)))  # the first token
        self.check(table, ids, found)
        self.slots[table.ids[found // PAGE:]] = -1
        self.write(table, ids, found, length)
        self.cache.commit(table, ids[:length])
        return ids, table

    def allocate(self, table, length, incoming):
        if incoming:
            return self.cache.allocate_incoming(table, length, 1)
        return (self.cache.allocate_slots(table, length)
                and self.cache.allocate_chunk(table, table.num_cached_pages * PAGE, length) == length)

    def run(self, steps):
        running = []
        for _ in range(steps):
            if len(running) < 3 and (begun := self.begin((SHARED, SALTED)[self.rng.integers(0, 2)])) is not None:
                running.append(begun)
            ids, table = running.pop(int(self.rng.integers(0, len(running))))
            if len(ids) < 20 and self.rng.integers(0, 3) and self.cache.allocate_next(table, len(ids)):
                ids = np.append(ids, np.int32(self.rng.integers(1, 3)))
                self.write(table, ids, len(ids) - 2, len(ids) - 1)
                running.append((ids, table))
            else:
                self.check(table, ids, len(ids) - 1)
                self.cache.release(table, ids if self.rng.integers(0, 4) else None)
            self.cache.check_integrity()


@pytest.mark.parametrize("windowed", [False, True])
def test_reused_slots_are_right_in_any_order_of_requests(windowed):
    for seed in range(6):
        simulation = Simulation(seed, [CacheGroup(SlidingWindow(3), 20, PAGE)] if windowed else [])
        simulation.run(400)
        assert simulation.num_reused > (20 if windowed else 100) and (windowed or simulation.num_loaded > 10)


def test_at_most_a_page_less_is_found_than_without_lookahead():
    rng = np.random.default_rng(0)
    plain, ahead = KVCacheManager(4096, PAGE), KVCacheManager(4096, PAGE, lookahead=1)
    fewer = 0
    for _ in range(300):
        ids = rng.integers(1, 3, rng.integers(2, 14)).astype(np.int32)
        counts = []
        for cache in (plain, ahead):
            table = cache.match_prefix(ids, len(ids) - 1)
            counts.append(table.count)
            assert cache.allocate_slots(table, len(ids))
            cache.release(table, ids)
        assert counts[0] - 1 <= counts[1] <= counts[0]
        fewer += counts[0] > counts[1]
    assert 0 < fewer < 150
