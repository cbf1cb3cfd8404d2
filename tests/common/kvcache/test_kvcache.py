"""Page allocator, prefix cache and manager: ownership of pages under any order of calls."""

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from baton.common.kvcache.allocator import PageAllocator
from baton.common.kvcache.layout import KVLayout, shape_of_group, split_layers
from baton.common.kvcache.manager import KVCacheManager
from baton.common.kvcache.prefix_cache import PrefixCache


def tokens(*ids):
    return np.array(ids, dtype=np.int32)


def pages(*ids):
    return np.array(ids, dtype=np.int64)


class TestAllocator:
    def test_hands_out_each_page_once(self):
        allocator = PageAllocator(8)
        taken = np.concatenate((allocator.allocate(3), allocator.allocate(5)))
        assert sorted(taken) == list(range(8)) and allocator.num_free == 0

    def test_pages_come_in_runs(self):
        allocator = PageAllocator(16)
        first, second = allocator.allocate(4), allocator.allocate(4)
        assert first.tolist() == [0, 1, 2, 3] and second.tolist() == [4, 5, 6, 7]
        allocator.free(first)
        assert allocator.allocate(4).tolist() == [0, 1, 2, 3]
        allocator.free(second)
        allocator.free(first)
        allocator.tidy()
        assert allocator.allocate(16).tolist() == list(range(16))

    def test_double_free_is_caught(self):
        allocator = PageAllocator(4)
        ids = allocator.allocate(2)
        allocator.free(ids)
        with pytest.raises(AssertionError, match="freed twice"):
            allocator.free(ids)

    def test_one_page_named_twice_is_caught(self):
        allocator = PageAllocator(4)
        page = allocator.allocate(1)
        with pytest.raises(AssertionError, match="named twice"):
            allocator.free(np.concatenate((page, page)))


class TestPrefixCache:
    def test_match_is_page_aligned_and_splits_edges(self):
        cache = PrefixCache(page_size=2)
        cache.insert(tokens(1, 2, 3, 4, 5, 6), pages(10, 11, 12))
        _, found = cache.match(tokens(1, 2, 3, 4, 9, 9))
        assert found.tolist() == [10, 11]
        _, found = cache.match(tokens(1, 2, 3))
        assert found.tolist() == [10]
        assert cache.num_pages == 3
        cache.check_integrity()

    def test_insert_reports_what_was_there(self):
        cache = PrefixCache(page_size=1)
        cache.insert(tokens(1, 2, 3), pages(10, 11, 12))
        _, present = cache.insert(tokens(1, 2, 7, 8), pages(20, 21, 22, 23))
        assert present == 2
        assert cache.match(tokens(1, 2, 7, 8))[1].tolist() == [10, 11, 22, 23]

    def test_locked_nodes_stay_and_the_oldest_go_first(self):
        cache = PrefixCache(page_size=1)
        cache.insert(tokens(1, 2), pages(0, 1))
        cache.insert(tokens(3, 4), pages(2, 3))
        node, _ = cache.insert(tokens(5, 6), pages(4, 5))
        cache.lock(node)
        cache.match(tokens(1, 2))
        assert sorted(cache.evict(1)) == [2, 3]
        assert sorted(cache.evict(99)) == [0, 1]
        assert cache.num_evictable == 0 and cache.num_pages == 2
        cache.unlock(node)
        assert sorted(cache.evict(99)) == [4, 5]
        cache.check_integrity()

    def test_a_path_goes_on_below_a_node_that_was_cut_meanwhile(self):
        cache = PrefixCache(page_size=1)
        node, _ = cache.insert(tokens(1, 2, 3), pages(10, 11, 12))
        cache.lock(node)
        cache.insert(tokens(1, 2, 9), pages(20, 21, 22))  # cuts the edge
        below, present = cache.insert(tokens(4, 5), pages(13, 14), node)
        assert present == 0 and cache.match(tokens(1, 2, 3, 4, 5))[1].tolist() == [10, 11, 12, 13, 14]
        again, present = cache.insert(tokens(4, 6), pages(30, 31), node)
        assert present == 1 and cache.match(tokens(1, 2, 3, 4, 6))[1].tolist() == [10, 11, 12, 13, 31]
        cache.move_lock(node, below)
        assert sorted(cache.evict(99)) == [22, 31] and cache.num_pages == cache.num_locked == 5
        cache.check_integrity()
        cache.unlock(below)
        assert sorted(cache.evict(99)) == [10, 11, 12, 13, 14] and cache.num_locked == 0


def test_releasing_many_is_releasing_each():
    """Pages come out in the same order afterwards, and the same ones are cached."""
    found = []
    for together in (True, False):
        cache = KVCacheManager(num_pages=40, page_size=2)
        rng = np.random.default_rng(0)
        ending = []
        for i in range(6):
            prompt = tokens(*rng.integers(0, 2, 7))
            hold = cache.begin(prompt, 6) if i % 3 else cache.begin_private()
            assert cache.grow(hold, 9)
            ending.append((hold, prompt if i % 2 else None))
        if together:
            cache.release_each(ending)
        else:
            for hold, computed in ending:
                cache.release(hold, computed)
        cache.check_integrity()
        assert cache.num_held == 0
        found.append((cache.num_cached, cache.allocator.allocate(cache.num_free).tolist()))
    assert found[0] == found[1]


def test_commit_keeps_page_ids_and_later_requests_share():
    cache = KVCacheManager(num_pages=16, page_size=2)
    prompt = tokens(1, 2, 3, 4, 5)
    first, second = cache.begin(prompt, 4), cache.begin(prompt, 4)
    assert cache.grow(first, 5) and cache.grow(second, 5)
    before = second.ids.tolist()
    cache.commit(first, prompt[:4])
    cache.commit(second, prompt[:4])
    assert second.ids.tolist() == before, "a transfer may be reading the pages of a live request"
    third = cache.begin(prompt, 4)
    assert third.ids.tolist() == first.ids[:2].tolist()
    for hold in (first, second, third):
        cache.release(hold)
    assert (cache.num_free, cache.num_held, cache.num_cached) == (14, 0, 2)
    cache.flush()
    assert cache.num_free == 16


def test_grow_evicts_and_refuses_without_change():
    cache = KVCacheManager(num_pages=4, page_size=1)
    old = cache.begin(tokens(1, 2, 3), 0)
    assert cache.grow(old, 3)
    cache.release(old, tokens(1, 2, 3))
    new = cache.begin(tokens(7, 8, 9, 10, 11), 0)
    assert not cache.grow(new, 5)
    assert cache.num_cached == 3 and new.count == 0
    assert cache.grow(new, 4) and cache.num_cached == 0
    cache.check_integrity()


def test_a_page_each_as_one_by_one():
    """Also where a hold's arrays have no room left; where fewer are free nothing changes, nor is anything evicted."""
    one, other = (KVCacheManager(num_pages=26, page_size=1) for _ in range(2))
    kept = one.begin(tokens(1, 2), 0)
    assert one.grow(kept, 2)
    one.release(kept, tokens(1, 2))
    assert other.grow(other.begin_private(), 2)
    holds, others = ([cache.begin_private() for _ in range(2)] for cache in (one, other))
    for count in range(1, 13):
        assert one.add_page_each(holds) is not None and all(other.grow(hold, count) for hold in others)
    for hold, wanted in zip(holds, others):
        assert hold.ids.tolist() == wanted.ids.tolist() and hold.own.all() and hold.count == 12
    assert one.num_held == 24 and one.num_free == 0 and one.add_page_each(holds) is None
    assert one.num_held == 24 and one.num_cached == 2 and holds[0].count == 12
    for hold in holds:
        one.release(hold)
    one.check_integrity()


class TestTails:
    def computed(self, cache, count):
        hold = cache.begin(np.arange(count, dtype=np.int32), 0)
        assert cache.grow(hold, count)
        cache.commit(hold, np.arange(count, dtype=np.int32))
        return hold

    def test_a_prompt_is_had_whole_again_until_memory_is_needed(self):
        cache, prompt = KVCacheManager(8, page_size=2), np.arange(5, dtype=np.int32)
        hold = self.computed(cache, 5)
        ids = hold.ids.tolist()
        tail = cache.keep_tail(hold, prompt)
        cache.release(hold)
        assert (cache.num_held, cache.num_cached, cache.num_available) == (0, 3, 8)
        again = cache.begin_whole(prompt, tail)
        assert again.ids.tolist() == ids and cache.num_held == 0
        cache.release(again)
        other = cache.begin_private()
        assert cache.grow(other, 14) and tail.page is not None  # the tree gives first
        cache.release(other)
        assert cache.begin_whole(prompt, tail) is None
        other = cache.begin_private()
        assert cache.grow(other, 16) and tail.page is None
        cache.drop_tail(tail)
        cache.release(other)
        cache.check_integrity()
        assert cache.num_free == 8

    def test_a_tail_that_is_read_outlives_its_end(self):
        cache, prompt = KVCacheManager(4, page_size=2), np.arange(3, dtype=np.int32)
        hold = self.computed(cache, 3)
        tail = cache.keep_tail(hold, prompt)
        again = cache.begin_whole(prompt, tail)
        cache.drop_tail(tail)
        for one in (hold, again):
            assert tail.page is not None and not cache.grow(cache.begin_private(), 6)
            cache.release(one)
        assert tail.page is None and cache.num_free == 3
        cache.check_integrity()

    def test_a_prompt_of_whole_pages_has_no_tail(self):
        cache, prompt = KVCacheManager(4, page_size=2), np.arange(4, dtype=np.int32)
        hold = self.computed(cache, 4)
        assert cache.keep_tail(hold, prompt) is None
        cache.release(hold)
        again = cache.begin_whole(prompt, None)
        assert again.count == 2
        cache.release(again)
        cache.flush()
        assert cache.num_free == 4 and cache.begin_whole(prompt, None) is None


@pytest.mark.parametrize("layers, page_bytes, expected", [
    (32, 64 * 1024, (16, 16)), (7, 10, (7,)), (5, 1 << 20, (1, 1, 1, 1, 1)), (36, 48 * 1024, (18, 18))])
def test_layer_groups_make_descriptors_of_about_a_mebibyte(layers, page_bytes, expected):
    assert split_layers(layers, page_bytes) == expected


def test_layout_locates_layers():
    layout = KVLayout((3, 2), num_kv_heads=2, head_dim=4, page_size=16, dtype="bfloat16")
    assert [layout.locate(i) for i in range(5)] == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1)]
    assert layout.page_bytes == 5 * 2 * 2 * 16 * 4 * 2
    with pytest.raises(IndexError):
        layout.locate(5)


def test_a_latent_is_one_vector_a_token():
    """DeepSeek-V3's 61 layers in bfloat16: 1,152 bytes of a token and layer."""
    layout = KVLayout((31, 30), num_kv_heads=1, head_dim=512 + 64, page_size=16, dtype="bfloat16", form="latent")
    assert layout.layer_page_bytes == 16 * 1152 and layout.page_bytes == 61 * 16 * 1152
    assert shape_of_group(layout, 1, 7) == (7, 30, 1, 1, 16, 576)


class ManagerMachine(RuleBasedStateMachine):
    """Requests begin, grow, publish and end in any order; no page may have two owners, none may be lost."""

    def __init__(self):
        super().__init__()
        self.cache = KVCacheManager(num_pages=24, page_size=2)
        self.live = []

    @rule(prompt=st.lists(st.integers(0, 2), min_size=1, max_size=14))
    def begin(self, prompt):
        ids = tokens(*prompt)
        hold = self.cache.begin(ids, len(ids) - 1)
        if self.cache.grow(hold, len(ids)):
            self.live.append((hold, ids))
        else:
            self.cache.release(hold)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def commit(self, data):
        hold, ids = data.draw(st.sampled_from(self.live))
        before = hold.ids.tolist()
        self.cache.commit(hold, ids[: data.draw(st.integers(0, len(ids)))])
        assert hold.ids.tolist() == before

    @precondition(lambda self: self.live)
    @rule(data=st.data(), keep=st.booleans())
    def end(self, data, keep):
        hold, ids = self.live.pop(data.draw(st.integers(0, len(self.live) - 1)))
        self.cache.release(hold, ids if keep else None)

    @invariant()
    def every_page_has_one_owner(self):
        self.cache.check_integrity()
        held = [page for hold, _ in self.live for page in hold.ids[hold.own]]
        assert len(set(held)) == len(held) == self.cache.num_held

    def teardown(self):
        for hold, _ in self.live:
            self.cache.release(hold)
        self.cache.flush()
        self.cache.tidy()
        assert self.cache.allocator.allocate(24).tolist() == list(range(24))


TestManagerMachine = ManagerMachine.TestCase
TestManagerMachine.settings = settings(max_examples=30, stateful_step_count=30, deadline=None)


def test_pages_of_holds_that_end_together_come_out_in_runs():
    """Those that they grew by one by one, in turn with each other, come last."""
    cache = KVCacheManager(8, 16, prefix_cache=False)
    holds = [cache.begin_private() for _ in range(2)]
    assert all(cache.grow(hold, 3 * 16) for hold in holds)
    assert cache.add_page_each(holds).tolist() == [6, 7]
    cache.release_each([(hold, None) for hold in holds])
    cache.check_integrity()
    assert cache.num_free == 8 and not any(len(hold.ids) for hold in holds)
    again = [cache.begin_private() for _ in range(2)]
    assert all(cache.grow(hold, 3 * 16) for hold in again)
    assert [hold.ids.tolist() for hold in again] == [[3, 4, 5], [0, 1, 2]]
    assert cache.add_page_each(again).tolist() == [6, 7]
