"""Page allocator, prefix cache and manager: ownership of pages under any order of calls."""

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from baton.common.api.namespace import SHARED, Namespace
from baton.common.kvcache.allocator import PageAllocator
from baton.common.kvcache.layout import KVLayout, shape_of_group, split_layers
from baton.common.kvcache.manager import KVCacheManager
from baton.common.kvcache.page_keys import page_keys
from baton.common.kvcache.prefix_cache import PrefixCache
from baton.common.kvcache.write_policies.write_back import WriteBack

SALTED = Namespace(salt="s")


def tokens(*ids):
    return np.array(ids, dtype=np.int32)


def pages(*ids):
    return np.array(ids, dtype=np.int64)


class TestAllocator:
    def test_allocates_each_page_once(self):
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
        _, matched = cache.match(tokens(1, 2, 3, 4, 9, 9))
        assert matched.tolist() == [10, 11]
        _, matched = cache.match(tokens(1, 2, 3))
        assert matched.tolist() == [10]
        assert cache.num_pages == 3
        cache.check_integrity()

    def test_insert_reports_pages_already_cached(self):
        cache = PrefixCache(page_size=1)
        cache.insert(tokens(1, 2, 3), pages(10, 11, 12))
        _, present = cache.insert(tokens(1, 2, 7, 8), pages(20, 21, 22, 23))
        assert present == 2
        assert cache.match(tokens(1, 2, 7, 8))[1].tolist() == [10, 11, 22, 23]

    def test_locked_nodes_stay_and_the_oldest_are_evicted_first(self):
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

    def test_a_path_continues_below_a_node_that_was_split_meanwhile(self):
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


def test_releasing_many_equals_releasing_each():
    """Pages come out in the same order afterwards, and the same ones are cached."""
    results = []
    for together in (True, False):
        cache = KVCacheManager(num_pages=40, page_size=2)
        rng = np.random.default_rng(0)
        ending = []
        for i in range(6):
            prompt = tokens(*rng.integers(0, 2, 7))
            table = cache.match_prefix(prompt, 6) if i % 3 else cache.new_private_table()
            assert cache.allocate_slots(table, 9)
            ending.append((table, prompt if i % 2 else None))
        if together:
            cache.release_all(ending)
        else:
            for table, computed in ending:
                cache.release(table, computed)
        cache.check_integrity()
        assert cache.num_allocated == 0
        results.append((cache.num_cached, cache.allocator.allocate(cache.num_free).tolist()))
    assert results[0] == results[1]


def test_commit_keeps_page_ids_and_later_requests_share():
    cache = KVCacheManager(num_pages=16, page_size=2)
    prompt = tokens(1, 2, 3, 4, 5)
    first, second = cache.match_prefix(prompt, 4), cache.match_prefix(prompt, 4)
    assert cache.allocate_slots(first, 5) and cache.allocate_slots(second, 5)
    before = second.ids.tolist()
    cache.commit(first, prompt[:4])
    cache.commit(second, prompt[:4])
    assert second.ids.tolist() == before, "a transfer may be reading the pages of a live request"
    third = cache.match_prefix(prompt, 4)
    assert third.ids.tolist() == first.ids[:2].tolist()
    for table in (first, second, third):
        cache.release(table)
    assert (cache.num_free, cache.num_allocated, cache.num_cached) == (14, 0, 2)
    cache.flush()
    assert cache.num_free == 16


def test_allocation_evicts_and_refuses_without_change():
    cache = KVCacheManager(num_pages=4, page_size=1)
    old = cache.match_prefix(tokens(1, 2, 3), 0)
    assert cache.allocate_slots(old, 3)
    cache.release(old, tokens(1, 2, 3))
    new = cache.match_prefix(tokens(7, 8, 9, 10, 11), 0)
    assert not cache.allocate_slots(new, 5)
    assert cache.num_cached == 3 and new.count == 0
    assert cache.allocate_slots(new, 4) and cache.num_cached == 0
    cache.check_integrity()


def test_appending_a_page_each_equals_one_by_one():
    """Also where a table's arrays are full; where too few pages are free nothing changes, nor is anything evicted."""
    one, other = (KVCacheManager(num_pages=26, page_size=1) for _ in range(2))
    cached = one.match_prefix(tokens(1, 2), 0)
    assert one.allocate_slots(cached, 2)
    one.release(cached, tokens(1, 2))
    assert other.allocate_slots(other.new_private_table(), 2)
    tables, others = ([cache.new_private_table() for _ in range(2)] for cache in (one, other))
    for count in range(1, 13):
        assert one.append_pages(tables) is not None and all(other.allocate_slots(table, count) for table in others)
    for table, expected in zip(tables, others):
        assert table.ids.tolist() == expected.ids.tolist() and table.owned.all() and table.count == 12
    assert one.num_allocated == 24 and one.num_free == 0 and one.append_pages(tables) is None
    assert one.num_allocated == 24 and one.num_cached == 2 and tables[0].count == 12
    for table in tables:
        one.release(table)
    one.check_integrity()


class TestPartialPages:
    def computed(self, cache, count):
        table = cache.match_prefix(np.arange(count, dtype=np.int32), 0)
        assert cache.allocate_slots(table, count)
        cache.commit(table, np.arange(count, dtype=np.int32))
        return table

    def test_a_full_prompt_matches_again_until_memory_is_needed(self):
        cache, prompt = KVCacheManager(8, page_size=2), np.arange(5, dtype=np.int32)
        table = self.computed(cache, 5)
        ids = table.ids.tolist()
        partial = cache.keep_partial_page(table, prompt)
        cache.release(table)
        assert (cache.num_allocated, cache.num_cached, cache.num_available) == (0, 3, 8)
        again = cache.match_full_prompt(prompt, partial)
        assert again.ids.tolist() == ids and cache.num_allocated == 0
        cache.release(again)
        other = cache.new_private_table()
        assert cache.allocate_slots(other, 14) and partial.page is not None  # the tree is evicted first
        cache.release(other)
        assert cache.match_full_prompt(prompt, partial) is None
        other = cache.new_private_table()
        assert cache.allocate_slots(other, 16) and partial.page is None
        cache.drop_partial_page(partial)
        cache.release(other)
        cache.check_integrity()
        assert cache.num_free == 8

    def test_a_partial_page_outlives_its_drop_while_it_is_read(self):
        cache, prompt = KVCacheManager(4, page_size=2), np.arange(3, dtype=np.int32)
        table = self.computed(cache, 3)
        partial = cache.keep_partial_page(table, prompt)
        again = cache.match_full_prompt(prompt, partial)
        cache.drop_partial_page(partial)
        for one in (table, again):
            assert partial.page is not None and not cache.allocate_slots(cache.new_private_table(), 6)
            cache.release(one)
        assert partial.page is None and cache.num_free == 3
        cache.check_integrity()

    def test_a_prompt_of_full_pages_has_no_partial_page(self):
        cache, prompt = KVCacheManager(4, page_size=2), np.arange(4, dtype=np.int32)
        table = self.computed(cache, 4)
        assert cache.keep_partial_page(table, prompt) is None
        cache.release(table)
        again = cache.match_full_prompt(prompt, None)
        assert again.count == 2
        cache.release(again)
        cache.flush()
        assert cache.num_free == 4 and cache.match_full_prompt(prompt, None) is None


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
        self.content = {}  # by page: the namespace and tokens that it was last allocated for

    @rule(prompt=st.lists(st.integers(0, 2), min_size=1, max_size=14), salt=st.sampled_from(["", "a", "b"]))
    def begin(self, prompt, salt):
        ids = tokens(*prompt)
        table = self.cache.match_prefix(ids, len(ids) - 1, Namespace(salt))
        content = [(salt, tuple(prompt[:2 * i + 2])) for i in range(len(ids))]
        assert [self.content[page] for page in table.ids.tolist()] == content[:table.count]
        if self.cache.allocate_slots(table, len(ids)):
            self.content |= dict(zip(table.ids.tolist(), content))
            self.live.append((table, ids))
        else:
            self.cache.release(table)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def commit(self, data):
        table, ids = data.draw(st.sampled_from(self.live))
        before = table.ids.tolist()
        self.cache.commit(table, ids[: data.draw(st.integers(0, len(ids)))])
        assert table.ids.tolist() == before

    @precondition(lambda self: self.live)
    @rule(data=st.data(), keep=st.booleans())
    def end(self, data, keep):
        table, ids = self.live.pop(data.draw(st.integers(0, len(self.live) - 1)))
        self.cache.release(table, ids if keep else None)

    @invariant()
    def every_page_has_one_owner(self):
        self.cache.check_integrity()
        owned = [page for table, _ in self.live for page in table.ids[table.owned]]
        assert len(set(owned)) == len(owned) == self.cache.num_allocated

    def teardown(self):
        for table, _ in self.live:
            self.cache.release(table)
        self.cache.flush()
        self.cache.tidy()
        assert self.cache.allocator.allocate(24).tolist() == list(range(24))


TestManagerMachine = ManagerMachine.TestCase
TestManagerMachine.settings = settings(max_examples=30, stateful_step_count=30, deadline=None)


def test_pages_of_tables_released_together_come_out_in_runs():
    """Those that were appended one by one, alternating between the tables, come last."""
    cache = KVCacheManager(8, 16, prefix_cache=False)
    tables = [cache.new_private_table() for _ in range(2)]
    assert all(cache.allocate_slots(table, 3 * 16) for table in tables)
    assert cache.append_pages(tables).tolist() == [6, 7]
    cache.release_all([(table, None) for table in tables])
    cache.check_integrity()
    assert cache.num_free == 8 and not any(len(table.ids) for table in tables)
    again = [cache.new_private_table() for _ in range(2)]
    assert all(cache.allocate_slots(table, 3 * 16) for table in again)
    assert [table.ids.tolist() for table in again] == [[3, 4, 5], [0, 1, 2]]
    assert cache.append_pages(again).tolist() == [6, 7]


class Recorder:
    """Pages that entered and left the tree."""

    def __init__(self):
        self.changes = []
        self.namespaces = []

    def stored(self, node, parent, pages, tokens):
        self.namespaces.append(node.namespace)
        self.changes.append((parent, pages.tolist(), tokens.tolist()))

    def removed(self, namespace, pages):
        self.namespaces.append(namespace)
        self.changes.append(pages.tolist())


def test_every_listener_sees_every_page_that_enters_and_leaves():
    cache = PrefixCache(page_size=1)
    recorder, other = Recorder(), Recorder()
    cache.listeners += [recorder, other]
    cache.insert(tokens(1, 2), pages(10, 11))
    cache.insert(tokens(1, 2, 3), pages(20, 21, 12))
    assert recorder.changes == [(None, [10, 11], [1, 2]), (11, [12], [3])]
    assert [(edge.parent, edge.pages.tolist()) for edge in cache.edges()] == [(None, [10, 11]), (11, [12])]
    assert cache.evict(1).tolist() == [12] and recorder.changes[2:] == [[12]]
    cache.insert(tokens(1, 2), pages(30, 31), cache.match(tokens(1), SALTED)[0])
    assert recorder.changes[3:] == [(None, [30, 31], [1, 2])] and other.changes == recorder.changes
    assert cache.evict(4).tolist() == [10, 11, 30, 31]
    assert recorder.namespaces == [SHARED] * 3 + [SALTED, SHARED, SALTED] == other.namespaces


def test_namespaces_never_share_a_page():
    """The same tokens under two salts and none: each namespace finds its own pages, and leaves with its last one."""
    cache = KVCacheManager(16, page_size=2)
    prompt, namespaces = tokens(1, 2, 3, 4), (SHARED, SALTED, Namespace(extra_key="x"))
    for count in (0, 2):
        owned = []
        for namespace in namespaces:
            table = cache.match_prefix(prompt, 4, namespace)
            assert table.num_cached_pages == count and cache.allocate_slots(table, 4)
            owned.append(table.ids.tolist())
            cache.release(table, prompt)
            cache.check_integrity()
        assert len({page for ids in owned for page in ids}) == 6
    tables = [cache.match_prefix(prompt, 4, namespace) for namespace in namespaces]
    assert [table.ids.tolist() for table in tables] == owned
    cache.release(tables[0])
    cache.release(tables[2])
    evicted = cache.prefix_cache.evict(6)
    assert sorted(evicted.tolist()) == sorted(owned[0] + owned[2])
    cache.allocator.free(evicted)
    cache.release(tables[1])
    cache.check_integrity()
    cache.flush()
    assert repr(cache.prefix_cache) == "PrefixCache(0 pages in 0 namespaces, 0 locked)"


def test_a_namespace_returns_while_a_request_still_reads_its_empty_root():
    """Two requests match a namespace without pages; it comes with the first, leaves, and comes again with the other."""
    cache = KVCacheManager(8, page_size=1)
    first, second = (cache.match_prefix(tokens(1, 2), 2, SALTED) for _ in range(2))
    assert cache.allocate_slots(first, 2) and cache.allocate_slots(second, 2)
    cache.release(first, tokens(1, 2))
    cache.flush()
    cache.commit(second, tokens(1, 2))
    third = cache.match_prefix(tokens(1, 2), 2, SALTED)
    assert third.ids.tolist() == second.ids.tolist()
    cache.release_all([(second, None), (third, None)])
    assert cache.match_prefix(tokens(1, 2), 2).count == 0
    cache.check_integrity()


def test_a_node_that_is_read_stays_when_its_last_child_is_evicted():
    cache = PrefixCache(page_size=1)
    above, _ = cache.insert(tokens(1), pages(10))
    cache.insert(tokens(1, 2), pages(10, 11))
    cache.lock(above)
    assert cache.evict(2).tolist() == [11] and cache.match(tokens(1, 2))[1].tolist() == [10]
    cache.unlock(above)
    assert cache.evict(2).tolist() == [10] and cache.num_pages == 0
    cache.check_integrity()


def test_an_empty_tree_evicts_nothing():
    cache = PrefixCache(page_size=1)
    assert cache.evict(5).tolist() == [] and cache.version == 0
    assert cache.match(tokens(1))[1].tolist() == []
    cache.check_integrity()


def test_appended_pages_join_the_table_however_it_is_read():
    cache = KVCacheManager(8, page_size=1)
    tables = [cache.new_private_table() for _ in range(3)]
    for _ in range(2):
        assert cache.append_pages(tables) is not None
    assert tables[0].ids.tolist() == [0, 3]
    assert tables[1].owned.tolist() == [True, True]
    assert cache.allocate_slots(tables[2], 3) and tables[2].ids.tolist() == [2, 5, 6]
    assert cache.allocate_slots(tables[2], 2) and tables[2].count == 3  # It has them already.


def test_without_a_prefix_cache_nothing_is_shared():
    cache = KVCacheManager(4, page_size=1, prefix_cache=False)
    table = cache.match_prefix(tokens(1, 2), 2)
    assert cache.allocate_slots(table, 2) and not cache.is_cacheable(table)
    cache.commit(table, tokens(1, 2))
    cache.release(table, tokens(1, 2))
    cache.flush()
    cache.check_integrity()
    assert (cache.num_free, cache.num_cached) == (4, 0)


def test_a_tidied_cache_hands_out_pages_in_runs():
    cache = KVCacheManager(4, page_size=1)
    tables = [cache.new_private_table() for _ in range(4)]
    assert all(cache.allocate_slots(table, 1) for table in tables)
    for table in tables:
        cache.release(table)
    cache.tidy()
    again = cache.new_private_table()
    assert cache.allocate_slots(again, 4) and again.ids.tolist() == [0, 1, 2, 3]


class RecordingTier:
    """Keeps keys alone, and says what it was asked. Its copies end when somebody waits for them."""

    def __init__(self):
        self.keys, self.waits, self.num_pages, self.done = {}, 0, 0, True

    def store(self, keys, page_ids):
        assert len(keys) == len(page_ids)
        self.keys.update(zip(keys, page_ids.tolist()))
        self.done = False
        return self

    def wait(self):
        self.waits += 1
        self.done = True

    def wait_on_device(self, group=None):
        self.done = True

    def flush(self): ...

    def poll(self): ...

    def check_integrity(self): ...

    def clear(self):
        self.keys.clear()


@pytest.mark.parametrize("shared", [False, True])
def test_evicted_pages_go_to_the_tier_under_keys_of_their_content(shared):
    """A prompt finds the keys of its pages wherever edges were split, and after all of them have left."""
    cache, tier = KVCacheManager(8, page_size=2), RecordingTier()
    cache.attach_tier(tier, WriteBack(), shared=shared)
    prompts = tokens(1, 2, 3, 4, 5, 6), tokens(1, 2, 3, 4, 7, 8)
    contents = {}
    for prompt in prompts:
        table = cache.match_prefix(prompt, 6, SALTED)
        assert cache.allocate_slots(table, 6)
        contents |= {page: prompt[:2 * i + 2].tolist() for i, page in enumerate(table.ids.tolist())}
        cache.release(table, prompt)
        full = cache.new_private_table()
        assert cache.tier_keys(full, prompt, 6) == []
        for length in (6, 2):  # the second one splits an edge that has keys
            cache.prefix_cache.page_keys(cache.prefix_cache.match(prompt[:length], SALTED)[0])
    other = cache.match_prefix(tokens(9, 9), 0)
    assert cache.allocate_slots(other, 16) and cache.num_cached == 0
    assert tier.waits == shared
    cache.release(other)
    stored = {key: contents[page] for key, page in tier.keys.items()}
    assert sorted(stored.values()) == [prompts[0][:count].tolist() for count in (2, 4, 6)] + [prompts[1].tolist()]
    for prompt in prompts:
        table = cache.match_prefix(prompt, 6, SALTED)
        keys = cache.tier_keys(table, prompt, 5)
        assert [stored[key] for key in keys] == [prompt[:2].tolist(), prompt[:4].tolist()]
        assert not set(cache.tier_keys(cache.match_prefix(prompt, 6), prompt, 6)) & set(tier.keys)
        assert cache.allocate_slots(table, 6)
        cache.add_loaded(table, prompt, 2)
        assert table.num_cached_pages == 2 and cache.tier_keys(table, prompt, 6) == page_keys(keys[-1], prompt[4:], 2)
        cache.release(table, prompt)
        cache.check_integrity()
        cache._evict(8)
        assert set(stored) == set(tier.keys) and bool(cache.num_leaving) == shared
        cache.check_integrity()
        tier.done = True
        cache.poll_tier()
        assert not cache.num_leaving
    cache.flush()
    assert not tier.keys and cache.num_cached == 0


def test_nothing_is_stored_where_nothing_can_be_evicted():
    cache, tier = KVCacheManager(4, page_size=1), RecordingTier()
    cache.attach_tier(tier, WriteBack(), shared=True)
    table = cache.match_prefix(tokens(1, 2, 3), 0)
    assert cache.allocate_slots(table, 3)
    cache.commit(table, tokens(1, 2))
    assert cache.keep_partial_page(table, tokens(1, 2, 3)) is None
    assert not cache.allocate_slots(table, 5) and cache.tier_keys(table, tokens(1, 2, 3), 3)
    cache._evict(1)
    assert not tier.keys and not tier.waits


@pytest.mark.parametrize("cached", [False, True])
def test_pages_past_the_prompt_are_given_back(cached):
    cache = KVCacheManager(8, 4)
    tokens = np.arange(9, dtype=np.int32)
    table = cache.match_prefix(tokens, 8)
    assert cache.allocate_slots(table, 9) and cache.allocate_slots(table, 17)
    if cached:
        cache.commit(table, tokens)
    pages = table.ids[:3].tolist()
    cache.trim(table, 9)
    cache.trim(table, 12)
    assert (table.count, table.ids.tolist(), cache.num_free) == (3, pages, 5)
    assert cache.keep_partial_page(table, tokens) is not None if cached else True
    cache.release(table)
    cache.check_integrity()


def test_pages_of_other_weights_stay_with_their_readers_alone():
    cache = KVCacheManager(8, 2)
    told = []

    class Listener:
        def stored(self, *_): ...

        def removed(self, *_): ...

        def weights_changed(self, weights):
            told.append(weights)

    cache.prefix_cache.listeners.append(Listener())
    read, left = tokens(1, 2, 3, 4), tokens(5, 6, 7, 8)
    for prompt in (read, left):
        table = cache.match_prefix(prompt, 0)
        assert cache.allocate_slots(table, 4)
        cache.release(table, prompt)
    reader = cache.match_prefix(read, 4)
    assert (reader.count, cache.num_cached) == (2, 4)
    cache.change_weights("new")
    assert told == ["new"] and cache.num_cached == 2
    cache.release(reader)
    cache.check_integrity()
    KVCacheManager(8, 2, prefix_cache=False).change_weights("new")
