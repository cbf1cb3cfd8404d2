"""Policies that keep sessions and prefixes together: consistent_hash, least_loaded, cache_aware's bounds."""

from __future__ import annotations

import json
import tracemalloc
from collections import Counter
from collections.abc import Iterator
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.common.api.errors import ConfigError
from baton.common.api.kv_events import PromptPages
from baton.router.config.endpoint import Endpoint
from baton.router.config.policy import PolicyArgs
from baton.router.net.body import routing_fields
from baton.router.net.request import Request
from baton.router.policies import PolicySets, build, load_view
from baton.router.policies.base import Apply, Decision, Publish
from baton.router.policies.cache_aware import (
    BLOCK,
    MAX_BLOCKS,
    SHARDS,
    Branches,
    CacheAware,
    PrefixMemory,
    block_hashes,
    covered_bytes,
)
from baton.router.policies.consistent_hash import ConsistentHash
from baton.router.policies.least_loaded import LeastLoaded
from baton.router.policies.load_view import EXACT_UP_TO, LoadView
from baton.router.policies.power_of_two import PowerOfTwo
from baton.router.policies.round_robin import RoundRobin
from baton.router.policies.text_pages import TextPages, text_blocks
from baton.router.workers.registry import Worker


def workers(count: int, *loads: int) -> tuple[Worker, ...]:
    made = tuple(Worker(Endpoint.parse(f"http://w{i}:80")) for i in range(count))
    for worker, load in zip(made, loads):
        worker.load = load
    return made


def request(body: dict | None = None, *headers: bytes) -> Request:
    made = Request()
    made.headers = b"".join(headers)
    made.body = json.dumps(body or {}).encode()
    return made


def key_of(body: dict | None = None, *headers: bytes, header: str = "x-session-id") -> bytes:
    made = request(body, *headers)
    return ConsistentHash(header).read(made, routing_fields(made.body))


# ---------------------------------------------------------------------- least_loaded


def test_least_loaded_takes_the_least_loaded_and_equals_take_turns():
    pool, policy = workers(4, 3, 1, 1, 2), LeastLoaded()
    assert {policy.choose(pool, None).worker for _ in range(10)} == {pool[1], pool[2]}
    pool[1].load = pool[2].load = 9
    assert {policy.choose(pool, None).worker for _ in range(10)} == {pool[3]}


@settings(deadline=None)
@given(st.integers(EXACT_UP_TO + 1, 300), st.integers(0, 10**6))
def test_a_large_fleet_fills_evenly(count, seed):
    pool, view, rng = workers(count), LoadView(), Random(seed)
    for worker in pool:
        worker.load = rng.randrange(4)
    total = sum(worker.load for worker in pool)
    for _ in range(5 * count):
        view.refresh(pool)
        view.least_loaded({}).load += 1
    loads = [worker.load for worker in pool]
    assert sum(loads) == total + 5 * count
    assert max(loads) - min(loads) <= 2


def test_a_large_fleet_of_two_kinds_is_sorted_once_for_each(monkeypatch):
    """Requests alternate between the decode workers of either kind; one in ten is tried again elsewhere."""
    sorted_for: list[tuple[Worker, ...]] = []

    class Counted(load_view._Levels):
        def __init__(self, workers):
            sorted_for.append(workers)
            super().__init__(workers)

    monkeypatch.setattr(load_view, "_Levels", Counted)
    pool, view, rng = workers(200), LoadView(), Random(1)
    kinds = pool[:120], pool[50:]
    for number in range(1000):
        among = kinds[number % 2] if number % 10 else list(kinds[0][:-1])
        view.refresh(among)
        loads = [worker.load for worker in among]
        assert (view.min_load, view.max_load, view.total) == (min(loads), max(loads), sum(loads))
        view.least_loaded({}).load += 1
        rng.choice(pool).load += 1
    assert len(sorted_for) <= 3
    for _ in range(20):  # Workers come and go: who is of no use any more is followed no more.
        view.refresh(pool[:150] + workers(1))
    assert {len(worker.load_orders) for worker in pool} == {0, 1}
    assert len(view._known) <= 8


# ---------------------------------------------------------------------- consistent_hash

KEYS = [b"session-%d" % i for i in range(2000)]
SET = st.sets(st.integers(0, 19), min_size=1, max_size=20)


@settings(max_examples=30, deadline=None)
@given(SET, SET)
def test_sessions_move_only_where_workers_come_or_go(before, after):
    """However the workers change, a session moves only off one that left or onto one that joined."""
    pool = workers(20)
    policy = ConsistentHash()
    homes = {key: policy.choose(tuple(pool[i] for i in sorted(before)), key).worker for key in KEYS[:300]}
    for key, home in homes.items():
        now = policy.choose(tuple(pool[i] for i in sorted(after)), key).worker
        stayed = pool.index(home) in after
        assert now is home or not stayed or pool.index(now) in after - before


def test_sessions_are_spread_and_a_join_moves_its_share():
    pool, policy = workers(10), ConsistentHash()
    nine = pool[:9]
    homes = {key: policy.choose(nine, key).worker for key in KEYS}
    shares = Counter(homes.values())
    assert len(shares) == 9
    assert max(shares.values()) < 1.5 * len(KEYS) / 9
    moved = [key for key in KEYS if policy.choose(pool, key).worker is not homes[key]]
    assert 0.05 < len(moved) / len(KEYS) < 0.17
    assert {policy.choose(pool, key).worker for key in moved} == {pool[9]}
    assert all(policy.choose(nine, key).worker is homes[key] for key in KEYS)


def test_routers_agree_and_a_failed_worker_moves_no_other_session():
    pool = workers(5)
    one, other = ConsistentHash(), ConsistentHash()
    for key in KEYS[:200]:
        home = one.choose(pool, key).worker
        assert other.choose(pool[::-1], key).worker is home
        rest = [worker for worker in pool if worker is not home]
        assert one.choose(rest, key).worker is not home
        assert one.choose(pool, key).worker is home
        failed = pool[0] if home is not pool[0] else pool[1]
        assert one.choose([worker for worker in pool if worker is not failed], key).worker is home


@pytest.mark.parametrize(("body", "headers", "key"), [
    ({"user": "u"}, [b"X-Session-Id:  s \r\n"], b"s"),
    ({"user": "u", "session_params": {"id": "p"}}, [], b"p"),
    ({"user": "u", "prompt_cache_key": "c"}, [b"x-session-idle: no\r\n"], b"c"),
    ({"user": 7}, [], b"7"),
    ({"user": ["a"]}, [], b""),
    ({"messages": []}, [], b""),
])
def test_what_names_a_session(body, headers, key):
    assert key_of(body, *headers) == key


def test_the_header_that_names_a_session_can_be_chosen():
    assert key_of({}, b"X-Tenant: t\r\n", header="X-Tenant") == b"t"
    with pytest.raises(ConfigError):
        PolicyArgs(hash_header="a: b")


def test_requests_without_a_session_go_to_the_least_loaded():
    pool, policy = workers(3, 2, 0, 2), ConsistentHash()
    assert policy.choose(pool, b"") == Decision(pool[1], "no_session")


async def test_sessions_stay_over_http(worker, start_router, chat, request_to):
    mocks = [await worker() for _ in range(4)]
    made = await start_router(*mocks, policy="consistent_hash")
    for i in range(12):
        for _ in range(2):
            await chat(made, user=f"user-{i}")
    by_user = {json.loads(body)["user"]: mock for mock in mocks for body in mock.bodies}
    assert len(set(by_user.values())) > 1
    assert all(len([b for b in by_user[u].bodies if json.loads(b)["user"] == u]) == 2 for u in by_user)


# ---------------------------------------------------------------------- cache_aware


def test_memory_of_distinct_prompts_is_bounded_in_bytes():
    """A tenth of the case that counts (50,000 prompts of 4 KB: tests/bench/router_decisions.py), at 2 MB a worker."""
    pool, policy = workers(4), CacheAware(max_tree_size=2**21)
    rng = Random(1)
    tracemalloc.start()
    sizes = []
    for i in range(5000):
        policy.choose(pool, block_hashes(rng.randbytes(4096)))
        if i % 500 == 499:
            sizes.append(tracemalloc.get_traced_memory()[0])
    tracemalloc.stop()
    assert len(policy.memory) <= 4 * 2**21 // BLOCK
    assert max(sizes) < 5e6  # of 20 MB of text


def test_eviction_forgets_what_is_not_seen_again():
    pool, policy = workers(2), CacheAware(max_tree_size=400 * BLOCK, eviction_interval=60)
    repeated = Random(1).randbytes(10 * BLOCK)
    dropped = [Random(seed).randbytes(50 * BLOCK) for seed in (2, 3, 4)]
    policy.sweep(0.0)
    policy.choose(pool, block_hashes(repeated))
    for prompt in dropped:
        policy.choose(pool, block_hashes(prompt))
    for now in (30.0, 59.0):
        policy.sweep(now)
    assert len(policy.memory) == 160
    for now in (60.0, 120.0, 180.0):
        policy.choose(pool, block_hashes(repeated))
        for seed in range(3):
            policy.choose(pool, block_hashes(Random(int(now) + seed).randbytes(50 * BLOCK)))
        policy.sweep(now)
    assert policy.choose(pool, block_hashes(dropped[0])).reason == "cache_miss"
    assert policy.choose(pool, block_hashes(repeated)).reason == "cache_hit"


def test_a_nearly_empty_memory_forgets_nothing():
    pool, policy = workers(2), CacheAware(eviction_interval=1)
    prompt = Random(1).randbytes(4096)
    policy.choose(pool, block_hashes(prompt))
    for now in range(10):
        policy.sweep(float(now))
    assert policy.choose(pool, block_hashes(prompt)).reason == "cache_hit"


def test_a_long_system_prompt_does_not_bind_all_chats_to_one_worker():
    """95 % of each prompt is shared: far above the threshold, and no load difference of 32 is ever reached."""
    pool, policy = workers(4), CacheAware()
    system = Random(0).randbytes(19 * BLOCK)
    for i in range(1, 81):
        policy.choose(pool, block_hashes(system + Random(i).randbytes(BLOCK))).worker.load += 1
    assert min(worker.load for worker in pool) >= 16


def test_a_conversation_stays_although_its_worker_is_busier():
    pool, policy = workers(2), CacheAware()
    talk = Random(0).randbytes(8 * BLOCK)
    home = policy.choose(pool, block_hashes(talk)).worker
    home.load += 20
    for turn in range(6):
        talk += Random(turn + 1).randbytes(BLOCK)
        assert policy.choose(pool, block_hashes(talk)) == Decision(home, "cache_hit")


async def test_chats_that_share_a_system_prompt_spread_over_http(worker, start_router, request_to, script):
    """Each chat waits for its answer, as on a real worker: forty at once end up on all four workers."""
    import asyncio

    mocks = [await worker(script.stream("x", pause=0.5)) for _ in range(4)]
    made = await start_router(*mocks, policy="cache_aware")
    system = {"role": "system", "content": "You are helpful. " * 400}
    await asyncio.gather(*(request_to(made, "POST", "/v1/chat/completions", {
        "messages": [system, {"role": "user", "content": f"question {i}"}]}) for i in range(40)))
    assert min(len(mock.posts) for mock in mocks) >= 5, [len(mock.posts) for mock in mocks]


def test_shards_share_the_capacity():
    hashes = block_hashes(Random(3).randbytes(BLOCK * 256))
    assert {value % SHARDS for value in hashes} == set(range(SHARDS))

# ---------------------------------------------------------------------- simple policies


@pytest.mark.parametrize("name", ["random", "power_of_two", "round_robin", "least_loaded", "prefix_hash", "cache_aware",
                                  "cache_exact"])
def test_an_only_worker_gets_every_request(name):
    (only,), policy = workers(1), build(name, PolicyArgs(), Random(1))
    made = request({"prompt": "x"})
    assert policy.choose((only,), policy.read(made, routing_fields(made.body))).worker is only


def test_power_of_two_never_takes_the_most_loaded():
    pool, policy = workers(3, 5, 1, 9), PowerOfTwo(Random(1))
    assert {policy.choose(pool, None).worker for _ in range(50)} == {pool[0], pool[1]}


class Joined:
    """Replication with another process that is the test: ``sent`` is what was published, ``apply`` what would apply
    the other's records, by channel."""

    def __init__(self, counter: Iterator[int] | None = None) -> None:
        self.apply: list[Apply] = []
        self.sent: list[tuple[int, int, int, list[int]]] = []
        self._counter = counter

    def channel(self, apply: Apply) -> Publish:
        self.apply.append(apply)
        number = len(self.apply) - 1
        return lambda subject, value, words: self.sent.append((number, subject, value, list(words)))

    def counter(self) -> Iterator[int] | None:
        return self._counter

    def pass_on(self, other: Joined) -> None:
        """Gives the other process all that was published, once."""
        for number, subject, value, words in self.sent:
            other.apply[number](words, subject, value)
        self.sent.clear()


@pytest.mark.parametrize("policy", [LeastLoaded(), RoundRobin(), ConsistentHash()])
def test_processes_that_count_together_take_turns(policy):
    pool = workers(3)
    policy.replicate(Joined(iter([1, 5, 9])))
    assert [policy.choose(pool, b"").worker for _ in range(3)] == [pool[1], pool[2], pool[0]]
    policy.replicate(Joined())  # This one's processes count for themselves: the counter stays.
    with pytest.raises(StopIteration):
        policy.choose(pool, b"")


def test_prefixes_that_another_process_sent_are_known():
    pool, here, there = workers(3), CacheAware(), CacheAware()
    joined, other = Joined(), Joined()
    here.replicate(joined)
    there.replicate(other)
    prompt = block_hashes(Random(1).randbytes(20 * BLOCK))
    home = here.choose(pool, prompt).worker
    joined.pass_on(other)
    assert there.choose(pool, prompt) == Decision(home, "cache_hit")
    assert there.choose(pool, prompt[:3]).worker is home
    assert all(record[0] == 0 for record in other.sent)  # What it took in is not published again.
    assert len(other.sent) == 2


def test_texts_that_another_process_learnt_are_known():
    here, there = TextPages(1000), TextPages(1000)
    joined, other = Joined(), Joined()
    here.replicate(joined)
    there.replicate(other)
    blocks = text_blocks(b"x" * 2000)
    here.learn(blocks, 2000, PromptPages(4, 16, [(2, 22), (4, 44)]))
    joined.pass_on(other)
    assert there.knows(blocks) and there.pages_of(blocks)[-1] == (4, 44)
    assert there.pages_of(blocks) == here.pages_of(blocks)
    cut, known = text_blocks(b"y" * 2000), len(there)
    other.apply[0]([4, 16, *cut[:3]], 2000, len(cut))  # The last words of a long record are lost.
    assert not there.knows(cut) and len(there) == known


# ---------------------------------------------------------------------- loads


def test_equal_loads_are_passed_in_rotation_and_the_last_falls_back_to_the_first():
    pool, view = workers(3, 0, 0, 1), LoadView()
    assert [view.next_least_loaded(pool, number) for number in range(3)] == [pool[0], pool[1], pool[0]]


def test_a_large_fleet_s_least_loaded_comes_first_without_reading_all():
    pool, view = workers(EXACT_UP_TO + 1), LoadView()
    assert view.next_least_loaded(pool, 0) is pool[0]
    for worker in pool[:-1]:
        worker.load = 2
    assert view.next_least_loaded(pool, 0) is pool[-1]
    pool[-1].load = 7
    view.refresh(pool)
    assert (view.min_load, view.max_load, view.total) == (2, 7, 2 * EXACT_UP_TO + 7)
    pool[-1].load = 1
    view.refresh(pool)
    assert (view.min_load, view.max_load) == (1, 2)
    assert view.some_least_loaded(1, {}) == [pool[-1]]
    view.close()
    assert not any(worker.load_orders for worker in pool)


# ---------------------------------------------------------------------- policies of each model


def test_each_model_has_its_policies_and_loses_them_with_its_workers():
    sets, pool = PolicySets({"regular": "cache_aware"}, PolicyArgs(), Random(1)), workers(EXACT_UP_TO + 1)
    built = []
    sets.on_build = lambda group, policies: built.append((group, policies))
    model = sets.of("a")
    assert sets.of("a") is model and sets.of(None) is sets.common and built == [("a", model)]
    assert model["regular"].max_blocks == sets.common["regular"].max_blocks == MAX_BLOCKS // 2
    model["regular"].choose(pool, [1])
    assert all(worker.load_orders for worker in pool)
    sets.sweep(0.0, ["a"])
    assert sets.of("a") is model
    sets.sweep(1.0, [])
    assert not any(worker.load_orders for worker in pool)
    assert sets.common["regular"].max_blocks == MAX_BLOCKS
    assert sets.of("a") is not model


def test_models_share_the_kv_index_of_cache_exact_but_not_its_texts():
    sets = PolicySets({"prefill": "cache_exact", "decode": "round_robin"}, PolicyArgs(), Random(1))
    common, model = sets.common["prefill"], sets.of("a")["prefill"]
    assert model is not common and model.kv_index is common.kv_index and model.texts is not common.texts
    assert model.max_blocks == common.max_blocks == MAX_BLOCKS // 4
    sets.sweep(0.0, ["a"])  # round_robin has nothing to do


# ---------------------------------------------------------------------- cache_aware's choices


def test_the_share_of_a_prompt_that_is_cached():
    pool, policy = workers(3), CacheAware()
    prompt = block_hashes(Random(1).randbytes(20 * BLOCK))
    assert policy.cached_share(pool, prompt) == policy.cached_share(pool, []) == 0.0
    home = policy.choose(pool, prompt[:15]).worker
    assert policy.cached_share(pool, prompt) == 0.75
    assert policy.cached_share(pool, prompt[:15]) == 1.0
    assert policy.cached_share(pool, [*prompt[:4], *block_hashes(Random(2).randbytes(20 * BLOCK))]) == 0.0
    home.load = 9  # More than the least by over a quarter of the difference that is called imbalance.
    assert policy.cached_share(pool, prompt) == 0.0
    home.load = 100
    assert policy.cached_share(pool, prompt) == 0.0


def test_a_prompt_of_no_text_goes_to_the_least_loaded():
    pool, policy = workers(2, 5, 0), CacheAware()
    assert policy.choose(pool, []) == Decision(pool[1], "cache_miss")
    assert len(policy.memory) == 0


def test_loads_far_apart_overrule_the_cache():
    pool, policy = workers(2), CacheAware()
    prompt = block_hashes(b"x" * 4 * BLOCK)
    home = policy.choose(pool, prompt).worker
    home.load = 40
    (other,) = {*pool} - {home}
    assert policy.choose(pool, prompt) == Decision(other, "balance")


def test_branches_are_remembered_in_two_generations(monkeypatch):
    monkeypatch.setattr(Branches, "CAPACITY", 4)
    branches = Branches()
    assert [branches.note(1) for _ in range(4)] == [False, False, True, True]
    for end in (2, 3, 4):
        assert not branches.note(end)
    assert branches.note(1)  # in the old generation
    for end in (5, 6, 7, 8):
        branches.note(end)
    assert not branches.note(1)


def test_lengths_of_blocks_follow_the_levels():
    assert len(block_hashes(b"x" * (16 * 1024 + 10))) == 64  # less than a block of the second level
    assert len(block_hashes(b"x" * (64 * 1024 + 10))) == 64 + 48
    assert len(block_hashes(b"x" * (64 * 1024 + 4096))) == 64 + 48 + 1
    assert covered_bytes(64 + 48 + 2) == 64 * 1024 + 2 * 4096
    assert block_hashes(b"") == []


def test_a_prefix_of_an_old_generation_gets_a_further_worker():
    memory = PrefixMemory()
    memory.record([1, 2], 5, 1000)
    memory.record([1], 6, 1000)
    memory.age()
    memory.record([1, 2], 7, 1000)
    assert memory.longest_match([1, 2], frozenset((5, 6, 7))) == (frozenset((5, 7)), 2)
    assert memory.longest_match([1], frozenset((6, 7))) == (frozenset((6, 7)), 1)


def test_a_ring_learns_workers_that_a_retry_names_first():
    pool, policy = workers(3), ConsistentHash()
    home = policy.choose([*pool], b"a").worker
    assert policy.choose(pool, b"a") == Decision(home, "session")


def test_a_body_that_is_no_object_names_no_session():
    assert ConsistentHash().read(request(), None) == b""


def test_a_large_fleet_s_least_load_falls_with_one_worker():
    pool, view = workers(EXACT_UP_TO + 1), LoadView()
    for worker in pool:
        worker.load = 2
    view.refresh(pool)
    pool[3].load = 1
    assert view.next_least_loaded(pool, 0) is pool[3] and (view.min_load, view.max_load) == (1, 2)


def test_a_page_that_two_blocks_end_with_is_named_once():
    texts, blocks = TextPages(1000), text_blocks(b"x" * 600)
    texts.learn(blocks, 600, PromptPages(10, 16, [(1, 11), (10, 110)]))
    assert texts.pages_of(blocks) == [(1, 11), (10, 110)]


@pytest.mark.parametrize("pages", [PromptPages(0, 16, [(1, 1)]), PromptPages(4, 16, []), PromptPages(4, 16, [(0, 1)])])
def test_a_record_without_pages_teaches_nothing(pages):
    texts, blocks = TextPages(1000), text_blocks(b"x" * 600)
    texts.learn(blocks, 600, pages)
    assert len(texts) == 0 and texts.bytes_per_page == 64.0
