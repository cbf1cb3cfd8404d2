"""Decisions are cheap and memories bounded; a short run of tests/bench/router_decisions.py."""

from __future__ import annotations

import gc
import json
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.common.api.kv_events import Removed, Stored, page_hashes
from baton.router.config.policy import PolicyArgs
from baton.router.policies import build_all, token_pages
from baton.router.policies.cache_aware import BLOCK, CacheAware, PrefixMemory, block_hashes
from baton.router.policies.token_pages import MAX_NEW_SEGMENTS, TokenPages, split
from baton.router.workers import kv_index as kv_index_module
from baton.router.workers.kv_index import MAX_MATCHED_WORKERS, KVIndex
from baton.router.workers.roles import WORKER_ROLES
from baton.router.workers.worker_sets import EMPTY_SET, WorkerSets
from baton.tests.bench.router_decisions import decisions, fleet, memory

PAGE = 16


def ids(seed: int, count: int) -> list[int]:
    rng = Random(seed)
    return [rng.randrange(128_000) for _ in range(count)]


def listed(tokens: list[int], separator: str = ", ") -> bytes:
    """As ``RoutingFields.routing_text`` gives it."""
    return ("[" + separator.join(map(str, tokens))).encode()


def hashes_of(pages: TokenPages, tokens: list[int]) -> list[int]:
    return [value for _, run in pages.runs(split(listed(tokens)), PAGE) for value in run]


# ---------------------------------------------------------------------- the whole


@pytest.mark.parametrize("pairs", [False, True], ids=["whole", "pairs"])
@pytest.mark.parametrize("kind", ["text", "token ids"])
@pytest.mark.parametrize("policy", ["cache_aware", "cache_exact"])
def test_a_thousand_workers_are_chosen_among_in_less_than_a_millisecond(policy, kind, pairs):
    result = decisions(policy, 1000, 5_000, kind, pairs, 90, known=30)
    assert result["cpu_us"]["p50"] < 1000, result


@pytest.mark.parametrize("policy", ["cache_aware", "cache_exact"])
def test_memory_stays_below_its_bound(policy):
    """150 prompts an entry would be noise; the count of what is remembered is exact."""
    result = memory(policy, 4, "text", False, 300)
    assert result["most_nodes"] <= (300 * 16 if policy == "cache_aware" else 4 * 2048)
    assert result["grown_mb"] < 100


# ---------------------------------------------------------------------- token ids


@given(st.lists(st.integers(1, 700), min_size=1, max_size=4), st.sampled_from([1, 16, 64]),
       st.sampled_from([",", ", "]))
def test_a_prompt_that_grows_comes_to_the_pages_of_its_tokens(steps, page_size, separator):
    pages, tokens = TokenPages(), ids(1, sum(steps))
    for step in range(1, len(steps) + 1):
        now = tokens[:sum(steps[:step])]
        segments = split(listed(now, separator))
        for _ in range(1 + len(segments.keys) // MAX_NEW_SEGMENTS):  # Each call continues where the one before ended.
            runs = list(pages.runs(segments, page_size))
        want = page_hashes(now, page_size)
        assert [value for _, run in runs for value in run] == want
        assert [end for end, _ in runs] == [sum(len(run) for _, run in runs[:i + 1]) for i in range(len(runs))]


def test_a_long_prompt_is_hashed_over_several_decisions(monkeypatch):
    hashed = []
    monkeypatch.setattr(token_pages, "chained", lambda *args: hashed.append(1) or real(*args))
    real = page_hashes.__globals__["chained"]
    pages, tokens = TokenPages(), ids(2, 20_000)
    segments = split(listed(tokens))
    *_, last = pages.runs(segments, PAGE)
    assert len(hashed) == MAX_NEW_SEGMENTS
    assert last[0] == 20_000 // PAGE  # a worker that has this much is assumed to have all
    seen = len(hashes_of(pages, tokens))
    assert len(hashed) == 2 * MAX_NEW_SEGMENTS
    assert len(hashes_of(pages, tokens)) > seen


def test_a_worker_that_has_all_hashed_pages_is_assumed_to_have_the_rest():
    kv_index, pages, tokens = KVIndex(), TokenPages(), ids(3, 8_000)
    hashes = page_hashes(tokens, PAGE)
    kv_index.apply(1, [Stored(hashes, None, (), PAGE)])
    kv_index.apply(2, [Stored(hashes[:5], None, (), PAGE)])
    assert kv_index.match(pages.runs(split(listed(tokens)), PAGE)) == {1: 500, 2: 5}


def test_old_segments_are_forgotten():
    pages = TokenPages(max_segments=20)
    for seed in range(50):
        hashes_of(pages, ids(seed, 600))
    assert 0 < len(pages) <= 20


@pytest.mark.parametrize("text", ["[1, 2.5", "[1" + ", 2" * 600 + ', "a"', "[9999999999", "[1,[2]", "[1, null"])
def test_a_list_that_holds_more_than_ids_ends_there(text):
    runs = list(TokenPages().runs(split(text.encode()), 1))
    assert all(isinstance(value, int) for _, run in runs for value in run)


# ---------------------------------------------------------------------- what many workers have


def test_of_very_many_workers_some_are_matched_others_each_time():
    kv_index, hashes = KVIndex(), page_hashes(ids(4, 320), PAGE)
    for worker in range(1000):
        kv_index.apply(worker, [Stored(hashes[:10], None, (), PAGE)])
    kv_index.apply(7, [Stored(hashes[10:], hashes[9], (), PAGE)])
    named = set()
    for _ in range(100):
        result = kv_index.match([(20, hashes)])
        assert result.pop(7) == 20
        assert len(result) <= MAX_MATCHED_WORKERS
        assert set(result.values()) == {10}
        named |= set(result)
    assert len(named) > 500


def test_large_memories_are_not_walked_by_the_garbage_collector():
    kv_index, prefixes = KVIndex(), PrefixMemory()
    for worker in range(3):
        kv_index.apply(worker, [Stored(page_hashes(ids(5, 320), PAGE), None, (), PAGE)])
        prefixes.record([1, 2, 3], worker, 1000)
    assert not gc.is_tracked(kv_index._workers_of)
    assert not any(gc.is_tracked(shard.blocks) for shard in prefixes._young)


def test_sets_of_workers_are_kept_while_they_are_used():
    kv_index, hashes = KVIndex(), page_hashes(ids(6, 160), PAGE)
    for worker in range(50):
        kv_index.apply(worker, [Stored(hashes, None, (), PAGE)])
    assert len(kv_index._sets) <= 50 + 2  # one for each alone, the one of all, the empty one: none of those between
    for worker in range(50):
        kv_index.apply(worker, [Removed(hashes)])
    assert len(kv_index) == 0
    assert len(kv_index._sets) <= 51


@given(st.lists(st.tuples(st.booleans(), st.frozensets(st.integers(0, 4), min_size=2)), max_size=60))
def test_numbers_of_sets_are_used_again(steps):
    sets, taken = WorkerSets(), []
    for take, workers in steps:
        if take:
            taken.append((sets.acquire(workers), workers))
        elif taken:
            sets.release(taken.pop(0)[0])
        assert all(sets.by_number[number] == workers for number, workers in taken)
        assert len(sets) == 1 + len({workers for _, workers in taken})
    assert sets.by_number[EMPTY_SET] == frozenset()


def test_memory_of_a_thousand_workers_is_bounded_in_all():
    pool, policy, rng = fleet(1000), CacheAware(max_blocks=2048), Random(1)
    for _ in range(400):
        policy.choose(pool, block_hashes(rng.randbytes(10 * BLOCK)))
    assert len(policy.memory) <= 2048


def test_pages_of_all_workers_are_bounded(monkeypatch):
    monkeypatch.setattr(kv_index_module, "MAX_PAGES", 30)
    kv_index = KVIndex()
    for worker in range(4):
        kv_index.apply(worker, [Stored(page_hashes(ids(worker, 160), PAGE), None, (), PAGE)])
    assert len(kv_index) == 30
    assert kv_index.sizes == {0: 10, 1: 10, 2: 10, 3: 0}
    kv_index.clear(0)
    kv_index.apply(3, [Stored(page_hashes(ids(3, 160), PAGE), None, (), PAGE)])
    assert kv_index.sizes[3] == 10


def test_both_roles_of_pairs_share_the_bound():
    policies = build_all(dict.fromkeys(WORKER_ROLES, "cache_aware"), PolicyArgs(), Random(1))
    assert policies["prefill"].max_blocks + policies["decode"].max_blocks == policies["regular"].max_blocks


def test_a_system_prompt_held_by_all_is_served_by_all():
    """Each of 300 workers gets its share, though only some of them are compared."""
    pool, policy = fleet(300), CacheAware(cache_threshold=0.1)
    system = json.dumps("x" * 4000).encode()
    for worker in pool:
        policy.memory.record(block_hashes(system), worker.id, 10**6)
    for number in range(900):
        policy.choose(pool, block_hashes(system + Random(number).randbytes(600))).worker.load += 1
    assert sum(worker.load > 0 for worker in pool) > 250
    assert max(worker.load for worker in pool) <= 9


def test_pages_longer_than_all_that_one_decision_reads_come_later():
    pages, tokens = TokenPages(), ids(7, 4_000)
    runs = [list(pages.runs(split(listed(tokens)), 2_000)) for _ in range(20)]
    assert runs[0] == [] and [value for _, run in runs[-1] for value in run] == page_hashes(tokens, 2_000)


def test_the_number_of_a_released_set_is_used_again():
    sets = WorkerSets()
    first = sets.acquire(frozenset((1, 2)))
    sets.release(first)
    assert sets.acquire(frozenset((3, 4))) == first and sets.by_number[first] == {3, 4}
    assert sets.acquire(frozenset((1, 2))) != first


def test_sets_that_become_equal_when_a_worker_leaves_keep_their_numbers():
    sets = WorkerSets()
    one, other = sets.acquire(frozenset((1, 2, 9))), sets.acquire(frozenset((1, 2)))
    sets.remove_worker(9)
    assert sets.by_number[one] == sets.by_number[other] == {1, 2}
    for number in (one, other):
        sets.release(number)
        assert sets.by_number[number] == frozenset()
    assert len(sets) == 1
