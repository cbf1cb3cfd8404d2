"""Eviction policies: what they evict first, by examples and against a search of the whole tree."""

import random

import numpy as np
import pytest

from baton.common.api.errors import ConfigError
from baton.common.config.server.cache import EVICTION_POLICIES
from baton.common.kvcache.eviction.base import EvictionQueue, Usage, make_order
from baton.common.kvcache.manager import KVCacheManager
from baton.common.kvcache.prefix_cache import PrefixCache

CONFIGS = {"slru": '{"protected_threshold": 3}', "tlru": '{"threshold": 6, "next_prompt_estimate": 2}'}


def order_of(policy):
    return make_order(policy, CONFIGS.get(policy, "{}"))


def tokens(*ids):
    return np.array(ids, np.int32)


def by_search(cache, order, count):
    """The pages that leave, the first leaf first: the tree is searched for each."""
    children, nodes = {}, list(cache._nodes())
    for node in nodes:
        children.setdefault(node.parent, set()).add(node)
    gone, pages = set(), []
    while len(pages) < count:
        leaves = [node for node in nodes if node not in gone and not node.locks and not children.get(node)]
        if not leaves:
            break
        first = min(leaves, key=lambda node: order.rank(node.usage))
        gone.add(first)
        children[first.parent].discard(first)
        pages += first.pages.tolist()
    return pages


@pytest.mark.parametrize("policy", EVICTION_POLICIES.names)
def test_evictions_are_those_of_a_search_through_the_whole_tree(policy):
    rng, order = random.Random(5), order_of(policy)
    cache, locked, free, evicted = PrefixCache(2, order=order), [], list(range(400)), 0
    for step in range(1500):
        prompt = tokens(*(rng.randrange(3) for _ in range(2 * rng.randint(1, 12))))
        what = rng.random()
        if what < 0.4 and len(free) > len(prompt):
            node, matched = cache.match(prompt)
            ids = [free.pop() for _ in range(len(prompt) // 2)]
            ids[:len(matched)] = matched
            _, present = cache.insert(prompt[len(matched) * 2:], np.array(ids[len(matched):], np.int64), node,
                                      rng.randrange(3))
            assert not present
            free = sorted({*range(400)} - {page for edge in cache.edges() for page in edge.pages.tolist()})
        elif what < 0.6:
            node, _ = cache.match(prompt)
            cache.lock(node)
            cache.record_use(node, rng.randrange(3))
            locked.append(node)
        elif what < 0.8 and locked:
            cache.unlock(locked.pop(rng.randrange(len(locked))))
        else:
            expected = by_search(cache, order, count := rng.randint(1, 40))
            assert cache.evict(count).tolist() == expected, step
            evicted += len(expected)
            free += expected
        cache.check_integrity()
    assert evicted > 1000


def filled(policy, config="{}"):
    """Three prompts of two pages of one token, read once, three times, and once."""
    cache = KVCacheManager(6, 1, order=make_order(policy, config))
    for prompt in ((1, 2), (3, 4), (3, 4), (3, 4), (5, 6)):
        table = cache.match_prefix(tokens(*prompt), 2)
        cache.record_use(table, priority=prompt[0] == 1)
        assert cache.allocate_slots(table, 2)
        cache.release(table, tokens(*prompt))
    return cache


@pytest.mark.parametrize("policy, order", [
    ("lru", [1, 3, 5]),  # as they came
    ("lfu", [1, 5, 3]),  # the one that was read three times last
    ("slru", [1, 5, 3]),
    ("priority", [3, 5, 1]),  # the urgent one last
])
def test_policies_evict_in_their_order(policy, order):
    cache = filled(policy)
    for first in order:
        assert cache.match_prefix(tokens(first), 1).count == 1 or policy == "lru"
        cache = filled(policy)
        for gone in order[:order.index(first) + 1]:
            cache.allocator.free(cache.prefix_cache.evict(1))
            assert len(cache.prefix_cache.match(tokens(gone))[1]) == 0
        left = [prompt for prompt in (1, 3, 5) if len(cache.prefix_cache.match(tokens(prompt))[1])]
        assert left == sorted(order[order.index(first) + 1:])


def test_tail_optimized_lru_takes_no_more_of_a_conversation_than_the_next_turn_computes_in_time():
    """Conversations of 8 pages in chunks of one: the last 3 may go, those of all conversations before any other."""
    cache = PrefixCache(1, order=make_order("tlru", '{"threshold": 4, "next_prompt_estimate": 1}'))
    for talk in (100, 200):
        node = None
        for turn in range(8):
            node, _ = cache.insert(tokens(talk + turn), np.array([talk + turn]), node)
    assert [cache.evict(1).tolist() for _ in range(8)] == [
        [107], [106], [105], [207], [206], [205], [104], [103]]


def test_an_item_that_was_used_meanwhile_waits_its_new_turn():
    queue, usages = EvictionQueue(order_of("lru")), {name: Usage(last_used=turn) for turn, name in enumerate("abcd")}
    for name, usage in usages.items():
        queue.put(name, usage)
    usages["a"].last_used = 9
    queue.discard("c")
    queue.discard("never there")
    assert len(queue) == 3 and "c" not in queue and "a" in queue
    assert [queue.pop() for _ in range(3)] == ["b", "d", "a"]
    with pytest.raises(IndexError):
        queue.pop()


def test_a_queue_forgets_stale_places():
    queue, usage = EvictionQueue(order_of("lru")), Usage()
    for turn in range(10_000):
        usage.last_used = turn
        queue.put("one", usage)
    assert len(queue._heap) <= 66 and queue.pop() == "one"
    queue.put("one", usage)
    queue.clear()
    assert len(queue) == 0


@pytest.mark.parametrize("policy, config, message", [
    ("lru", '{"threshold": 1}', "has no setting 'threshold': leave it out"),
    ("slru", '{"threshold": 1}', "has no setting 'threshold', only protected_threshold"),
    ("slru", '{"protected_threshold": 1}', "must be at least 2, not 1"),
    ("slru", '{"protected_threshold": true}', "must be a number from 0 on, not True"),
    ("tlru", "{}", "tlru needs --radix-eviction-policy-config"),
    ("tlru", '{"threshold": 5, "next_prompt_estimate": 5}', "the first above the second"),
    ("tlru", "[]", "must be a JSON object"),
])
def test_settings_that_make_no_sense_are_refused(policy, config, message):
    with pytest.raises(ConfigError, match=message):
        make_order(policy, config)
