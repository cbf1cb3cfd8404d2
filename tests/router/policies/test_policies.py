"""Policies that keep sessions and prefixes together: consistent_hash, least_loaded, cache_aware's bounds."""

from __future__ import annotations

import json
import tracemalloc
from collections import Counter
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.common.api.errors import ConfigError
from baton.router.config.endpoint import Endpoint
from baton.router.config.policy import PolicyArgs
from baton.router.net.body import routing_fields
from baton.router.net.request import Request
from baton.router.policies import load_view
from baton.router.policies.base import Decision
from baton.router.policies.cache_aware import BLOCK, SHARDS, CacheAware, block_hashes
from baton.router.policies.consistent_hash import ConsistentHash
from baton.router.policies.least_loaded import LeastLoaded
from baton.router.policies.load_view import EXACT_UP_TO, LoadView
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
