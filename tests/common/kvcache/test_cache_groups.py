"""Cache groups: page tables that begin behind a sliding window, prefix hits, eviction and reservations."""

from __future__ import annotations

import numpy as np
import pytest

from baton.common.kvcache.cache_group import ABSENT, CacheGroup, SlidingWindow
from baton.common.kvcache.manager import KVCacheManager

PAGE = 2


@pytest.mark.parametrize("window,page,computed,first", [
    (4, 2, 0, 0), (4, 2, 3, 0), (4, 2, 4, 0), (4, 2, 5, 1), (4, 2, 7, 2), (1, 2, 3, 1), (1, 2, 4, 2), (5, 4, 8, 1)])
def test_the_first_page_that_the_next_token_reads(window, page, computed, first):
    assert SlidingWindow(window).first_page(computed, page) == first


@pytest.mark.parametrize("window,present,usable", [
    (4, "", 0), (4, "1111", 4), (4, "0111", 4), (4, "0011", 4), (4, "0001", 0), (4, "1000", 1), (4, "1101110", 6),
    (4, "0000", 0), (1, "0000", 4), (3, "00010", 4), (40, "1110", 3), (40, "0111", 0)])
def test_the_longest_prefix_that_can_be_continued(window, present, usable):
    """With pages of two tokens, a window of four reads at most two pages before a page's first token."""
    there = np.array([c == "1" for c in present], bool)
    assert SlidingWindow(window).reusable_pages(there, 2) == usable


def brute_force(rule, present, page):
    return max(m for m in range(len(present) + 1) if present[rule.first_page(m * page, page):m].all())


def test_reusable_pages_agree_with_first_page():
    rng = np.random.default_rng(0)
    for _ in range(500):
        rule, page = SlidingWindow(int(rng.integers(1, 12))), int(rng.integers(1, 5))
        present = rng.random(rng.integers(0, 12)) < 0.7
        assert rule.reusable_pages(present, page) == brute_force(rule, present, page)
        for start in range(0, 40, page):
            assert start // page - rule.first_page(start, page) + 2 <= rule.max_pages(page)


def manager(num_pages=40, windowed=20, window=4, prefix_cache=True):
    return KVCacheManager(num_pages, PAGE, prefix_cache, [CacheGroup(SlidingWindow(window), windowed, PAGE)])


def tokens(*ids):
    return np.array(ids, np.int32)


def compute(cache, prompt, chunk=100, keep=True):
    """Computes a prompt; returns its table and how many tokens were cached."""
    table = cache.match_prefix(prompt, len(prompt) - 1)
    assert cache.reserve(table, len(prompt) + 8) and cache.allocate_slots(table, len(prompt))
    start = cached = table.num_cached_pages * PAGE
    while start < len(prompt):
        stop = cache.allocate_chunk(table, start, min(start + chunk, len(prompt)))
        assert stop > start
        if keep:
            cache.commit(table, prompt[:stop])
        start = stop
    return table, cached


def test_drafts_of_windows_take_no_pages_besides_their_slots():
    cache = manager()
    table, _ = compute(cache, tokens(*range(6)))
    before = table.groups[0].ids.copy()
    assert cache.stores_drafts and cache.allocate_drafts(table, 3) == 3
    cache.keep_accepted(table, 5, 2)
    assert np.array_equal(table.groups[0].ids, before)


def test_pages_behind_the_window_are_given_back():
    cache = manager(prefix_cache=False)
    group, = cache.groups
    cache.tidy()
    table, _ = compute(cache, tokens(*range(20)), chunk=4)
    own, = table.groups
    assert own.end == 10 and own.first == group.first_page(12) == 4
    for length in range(21, 60):  # the step of token ``length - 2`` may be in flight
        assert cache.allocate_next(table, length)
        own, = table.groups
        assert own.first <= group.first_page(length - 2) and own.end == -(-length // PAGE)
        assert len(own.ids) <= 4 // PAGE + 1 or length < 23
    cache.check_integrity()
    assert group.num_allocated == 3 and table.count == 30
    cache.release(table)
    cache.check_integrity()
    assert group.num_free == group.num_pages and group.num_reserved == group.num_in_tables == 0


def test_a_hit_ends_where_the_windows_pages_are_there():
    cache = manager()
    group, = cache.groups
    prompt = tokens(*range(16))
    table, _ = compute(cache, prompt)
    cache.release(table, prompt)
    assert group.num_cached == 8
    cache.prefix_cache.evict_from_group(0, 3)  # of one edge the first pages go first
    hit = cache.match_prefix(prompt, 16)
    assert hit.num_cached_pages == 8 and hit.groups[0].first == 6 and len(hit.groups[0].ids) == 2
    cache.release(hit)
    assert cache.match_prefix(prompt, 9).num_cached_pages == 0  # page 3 is there, page 2 is not
    assert cache.match_prefix(prompt, 10).num_cached_pages == 5
    cache.check_integrity()


def test_a_branch_off_a_shared_prompt_hits_and_missing_pages_enter_again():
    cache = manager()
    group, = cache.groups
    shared = list(range(10))
    first, second = tokens(*shared, 20, 21, 22, 23, 24, 25), tokens(*shared, 30, 31, 32)
    table, _ = compute(cache, first, chunk=6)
    cache.release(table, first)
    table, cached = compute(cache, second)
    assert cached == 10
    cache.release(table, second)
    cache.prefix_cache.evict_from_group(0, 100)
    assert group.num_cached == 0 and cache.num_cached == 9
    table, cached = compute(cache, second)
    assert cached == 0 and table.owned[:6].all()  # the tree has equal pages of the first group
    cache.release(table, second)
    assert group.num_cached == 6
    table, cached = compute(cache, second)
    assert cached == 12
    cache.release(table, second)
    cache.check_integrity()


def test_pages_that_a_request_reads_are_not_evicted():
    cache = manager()
    group, = cache.groups
    prompt = tokens(*range(12))
    table, _ = compute(cache, prompt)
    assert group.num_available == group.num_free  # it may still read all of them
    cache.allocate_chunk(table, 12, 12)
    cache.allocate_chunk(table, 12, 12)
    assert group.num_read == len(table.groups[0].ids) == 2
    cache.prefix_cache.evict_from_group(0, 100)
    assert group.num_cached == 2
    with pytest.raises(AssertionError, match="while a request reads it"):
        group.free_cached(table.groups[0].ids)
    cache.release(table)
    cache.flush()
    cache.check_integrity()
    assert group.num_free == group.num_pages


def test_received_prompts_have_the_pages_of_their_last_window():
    cache = manager()
    group, = cache.groups
    prompt = tokens(*range(17))
    table = cache.match_incoming(prompt)
    assert cache.reserve(table, 30) and cache.allocate_incoming(table, 17)
    own, = table.groups
    assert (own.first, own.end, own.cached_end, table.count) == (7, 9, 7, 9)
    cache.commit(table, prompt)
    assert group.num_cached == 1 and cache.num_cached == 8
    again = cache.match_incoming(tokens(*range(16), 50, 51, 52, 53))  # pages 8 and 9 are fresh, and all that is read
    assert again.num_cached_pages == 8 and cache.allocate_incoming(again, 20)
    own, = again.groups
    assert (own.first, own.end, own.cached_end) == (8, 10, 8)
    equal = cache.match_incoming(prompt)
    assert equal.groups[0].cached_end == 8 and cache.allocate_incoming(equal, 17)
    assert equal.groups[0].ids[0] == table.groups[0].ids[0] and equal.groups[0].owned.tolist() == [False, True]
    assert cache.match_prefix(prompt, 16).num_cached_pages == 0  # page 6 was not received
    private = cache.new_private_table(17)
    assert cache.allocate_incoming(private, 17) and private.groups[0].first == 7
    whole = cache.match_incoming(tokens(*range(16), 50, 51, 52, 53))  # of which nothing is missing
    cache.commit(again, tokens(*range(16), 50, 51, 52, 53))
    cache.release(whole)
    whole = cache.match_incoming(tokens(*range(16), 50, 51, 52, 53))
    assert cache.allocate_incoming(whole, 20) and whole.ids.tolist() == again.ids.tolist() and not whole.owned.any()
    assert not cache.allocate_incoming(whole, 80) and cache.allocate_incoming(whole, 20)
    for each in (table, again, equal, private, whole):
        cache.release(each)
    cache.check_integrity()
    assert manager(prefix_cache=False).match_incoming(prompt).groups[0].first == 7


def test_a_table_moves_to_where_swapped_tokens_end():
    cache = manager()
    prompt = tokens(*range(16))
    table, _ = compute(cache, prompt[:6])
    cache.release(table, prompt[:6])
    table = cache.match_prefix(prompt, 16)
    assert table.num_cached_pages == 3 and cache.allocate_incoming(table, 15)
    own, = table.groups
    assert (own.first, own.end, table.count) == (6, 8, 8) and own.owned.all()
    cache.release(table)
    cache.check_integrity()


def test_full_prompts_with_a_partial_page():
    cache = manager()
    group, = cache.groups
    prompt = tokens(*range(11))
    table, _ = compute(cache, prompt)
    partial = cache.keep_partial_page(table, prompt)
    again = cache.match_full_prompt(prompt, partial)
    assert again.ids.tolist() == table.ids.tolist() and again.groups[0].ids[-1] == table.groups[0].ids[-1]
    assert again.groups[0].end == 6
    cache.release(table)
    cache.release(again)
    cache.check_integrity()
    assert group.num_read == 0 and group.num_cached == 6
    filler = cache.match_prefix(tokens(*range(50, 90)), 39)
    assert cache.reserve(filler, 40) and cache.allocate_slots(filler, 40)
    assert cache.allocate_chunk(filler, 0, 40) == 40  # all pages of the group: the partial one goes as well
    assert partial.page is None and group.num_cached == 0 and cache.match_full_prompt(prompt, partial) is None
    cache.release(filler)
    cache.check_integrity()


def test_reservations_and_short_chunks():
    """Four pages keep any request of a window of four tokens in motion; a long step takes what is left beyond the
    others' reservations."""
    cache = manager(num_pages=200, windowed=12)
    group, = cache.groups
    assert group.bound_for(1000) == 4 and group.bound_for(3) == 2
    tables = [cache.match_prefix(tokens(*range(i, i + 50)), 49) for i in (0, 100, 200)]
    assert all(cache.reserve(table, 60) and cache.allocate_slots(table, 50) for table in tables)
    assert not cache.reserve(cache.match_prefix(tokens(1, 2), 1), 8)
    assert cache.allocate_chunk(tables[0], 0, 50) == 8
    assert cache.allocate_chunk(tables[1], 0, 50) == 8 and cache.allocate_chunk(tables[2], 0, 50) == 8
    assert cache.allocate_chunk(tables[0], 8, 50) == 8  # the step before may be in flight
    assert cache.allocate_chunk(tables[0], 8, 50) == 12
    cache.release(tables[1])
    assert cache.allocate_chunk(tables[0], 12, 50) == 20
    assert not cache.allocate_incoming(cache.new_private_table(9), 9)
    for table in (tables[0], tables[2]):
        cache.release(table)
    cache.check_integrity()


def test_decode_waits_for_pages_of_all_groups():
    cache = manager(num_pages=6, windowed=5, window=2)
    group, = cache.groups
    table = cache.match_prefix(tokens(*range(4)), 3)
    assert cache.reserve(table, 8) and cache.allocate_slots(table, 4) and cache.allocate_chunk(table, 0, 4) == 4
    taken = group.allocator.allocate(3)
    group.num_allocated += 3
    assert cache.append_pages([table]) is None and not cache.allocate_next(table, 5) and table.count == 2
    group.allocator.free(taken)
    group.num_allocated -= 3
    assert cache.append_pages([table]).tolist() == table.ids[2:].tolist() and table.groups[0].end == table.count == 3
    assert cache.allocate_next(table, 7) and cache.allocate_next(table, 8) and table.groups[0].end == 4
    cache.release(table)
    cache.check_integrity()


class Memory:
    """What the pages contain: for each, the tokens up to the end of its last token that was written."""

    def __init__(self, cache):
        self.cache = cache
        self.pages = [[None] * cache.num_pages, *([None] * group.num_pages for group in cache.groups)]
        self.in_flight: set[int] = set()
        group, = cache.groups
        free = group.allocator.free

        def checked(ids):
            assert self.in_flight.isdisjoint(ids.tolist()), "a page was freed that the step in flight reads"
            free(ids)

        group.allocator.free = checked

    def step(self, table, prompt, start, stop):
        """Writes the tokens, then checks all that they read."""
        group, (own,) = self.cache.groups[0], table.groups
        for page in range(start // PAGE, -(-stop // PAGE)):
            content = tuple(prompt[:min(stop, (page + 1) * PAGE)].tolist())
            self.pages[0][table.ids[page]] = self.pages[1][own.ids[page - own.first]] = content
        first = group.first_page(start)
        self.in_flight = set(own.span(first, -(-stop // PAGE)).tolist())
        for page in range(-(-stop // PAGE)):
            content = tuple(prompt[:min(stop, (page + 1) * PAGE)].tolist())
            assert self.pages[0][table.ids[page]] == content
            assert page < first or self.pages[1][own.ids[page - own.first]] == content


@pytest.mark.parametrize("seed", range(8))
def test_random_branching_prompts_read_what_was_computed_from_their_tokens(seed):
    """Prompts of two tokens' alphabet branch everywhere; chunks, decode steps, prompts that are received, eviction in
    each group by shortage, with another process that may write into any free page."""
    rng = np.random.default_rng(seed)
    window = int(rng.integers(1, 10))
    cache = manager(num_pages=60, windowed=-(-window // 2) + 10, window=window)
    memory = Memory(cache)
    live: list[list] = []  # table, tokens, computed
    hits = 0
    for _ in range(600):
        kind = rng.integers(0, 5)
        if kind == 0 and len(live) < 4:
            prompt = rng.integers(0, 2, rng.integers(2, 24)).astype(np.int32)
            received = rng.random() < 0.4
            table = cache.match_incoming(prompt) if received else cache.match_prefix(prompt, len(prompt) - 1)
            allocate = cache.allocate_incoming if received else cache.allocate_slots
            if not cache.reserve(table, 60) or not allocate(table, len(prompt)):
                cache.release(table)
                continue
            start = table.num_cached_pages * PAGE
            hits += start > 0
            if received:
                own, = table.groups
                for page in range(table.count):
                    content = tuple(prompt[:(page + 1) * PAGE].tolist())
                    if page >= table.num_cached_pages:
                        memory.pages[0][table.ids[page]] = content
                    if page >= own.cached_end:
                        memory.pages[1][own.ids[page - own.first]] = content
                cache.commit(table, prompt)
                start = len(prompt)
            live.append([table, prompt, start])
        elif live and kind in (1, 2, 3):
            entry = live[rng.integers(len(live))]
            table, text, start = entry
            if start < len(text):
                stop = cache.allocate_chunk(table, start, min(len(text), start + int(rng.integers(1, 9))))
                if stop > start:
                    memory.step(table, text, start, stop)
                    cache.commit(table, text[:stop])
                    entry[2] = stop
                else:  # nothing is launched, so that the step in flight ends
                    memory.in_flight = set()
            elif len(text) < 60:
                text = np.append(text, rng.integers(0, 2)).astype(np.int32)
                if cache.allocate_next(table, len(text)):
                    memory.step(table, text, start, start + 1)
                    entry[1:] = text, start + 1
        elif live and kind == 4 and rng.random() < 0.5:
            memory.in_flight = set()
            table, text, start = live.pop(rng.integers(len(live)))
            cache.release(table, text[:start] if rng.random() < 0.8 else None)
        cache.check_integrity()
    assert hits > 10
    memory.in_flight = set()
    for table, _, _ in live:
        cache.release(table)
    cache.flush()
    cache.check_integrity()
    assert cache.num_free == cache.num_pages and cache.groups[0].num_free == cache.groups[0].num_pages


def test_gauges_are_of_further_groups():
    assert KVCacheManager(4, PAGE).group_gauges == {}
    cache = manager()
    table, _ = compute(cache, tokens(*range(6)))
    assert cache.group_gauges == {
        "swa_token_usage": pytest.approx(0.15), "swa_kv_pages_free": 17, "swa_kv_pages_allocated": 0,
        "swa_kv_pages_cached": 3}
    cache.release(table)
    assert str(cache.groups[0].rule) == "a sliding window of 4 tokens"


def test_every_page_of_a_lacking_edge_is_absent():
    cache = manager()
    node, _ = cache.prefix_cache.insert(tokens(1, 2, 3, 4), np.array([0, 1]))
    assert (cache.prefix_cache.group_pages(node, 0, 0, 2) == ABSENT).all()
    assert len(cache.prefix_cache.group_pages(node, 0, 2, 2)) == 0
