"""The policies that have sglang-router's names: consistent_hashing, manual, bucket, prefix_hash."""

from __future__ import annotations

import json
from collections import Counter
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.common.api.errors import ConfigError, WorkerUnavailable
from baton.router.config.endpoint import Endpoint
from baton.router.config.policy import PolicyArgs
from baton.router.net.body import routing_fields
from baton.router.net.request import Request
from baton.router.policies.base import Decision
from baton.router.policies.bucket import Bucket, _RecentBytes
from baton.router.policies.consistent_hashing import ConsistentHashing
from baton.router.policies.manual import KeyTable, Manual
from baton.router.policies.prefix_hash import PrefixHash
from baton.router.workers.registry import Worker


def workers(count: int) -> tuple[Worker, ...]:
    return tuple(Worker(Endpoint.parse(f"http://w{index}:80")) for index in range(count))


def asked(policy, headers: str = "", authorization: bytes = b"", **body):
    """Returns what the policy reads of a request."""
    made = Request(headers=headers.encode(), authorization=authorization, body=json.dumps(body).encode())
    return policy.read(made, routing_fields(made.body))


def key(name: str) -> str:
    return f"X-SMG-Routing-Key: {name}\r\n"


# ---------------------------------------------------------------------- consistent_hashing


def test_hashing_goes_by_target_then_key_then_what_the_client_always_shows():
    pool, policy = workers(8), ConsistentHashing(Random(1))
    assert [policy.choose(pool, asked(policy, f"X-SMG-Target-Worker: {at}\r\n" + key("a"))).worker
            for at in range(8)] == [*pool]
    for name in range(20):
        both = asked(policy, key(str(name)) + "Cookie: x\r\n", b"Bearer k")
        assert policy.choose(pool, both).worker is policy.choose(pool, asked(policy, key(str(name)))).worker
    for shown in ((f"X-Forwarded-For: {at}\r\n", b"") for at in range(3)):
        assert len({policy.choose(pool, asked(policy, *shown)).worker for _ in range(5)}) == 1
    assert len({policy.choose(pool, asked(policy, "", b"Bearer a")).worker for _ in range(5)}) == 1
    assert len({policy.choose(pool, asked(policy, "Cookie: a\r\n")).worker for _ in range(5)}) == 1
    assert len({policy.choose(pool, asked(policy)).worker for _ in range(50)}) > 3


@pytest.mark.parametrize("target", ["8", "-1", "x", "1" * 5000])
def test_a_target_that_is_none_of_the_workers_is_refused(target):
    policy = ConsistentHashing(Random(1))
    with pytest.raises(WorkerUnavailable, match="is none of the 8 available workers"):
        policy.choose(workers(8), asked(policy, f"X-SMG-Target-Worker: {target}\r\n"))


def test_only_keys_of_a_worker_that_is_away_move():
    pool, policy = workers(5), ConsistentHashing(Random(1))
    keys = [asked(policy, key(str(at))) for at in range(100)]
    homes = [policy.choose(pool, subject).worker for subject in keys]
    for subject, home in zip(keys, homes):
        now = policy.choose(pool[1:], subject).worker
        assert now is home or home is pool[0]


# ---------------------------------------------------------------------- manual


def test_manual_keys_stay_whoever_joins_and_return_to_who_comes_back():
    pool, policy = workers(6), Manual(Random(1))
    homes = {name: policy.choose(pool[:2], asked(policy, key(name))).worker for name in map(str, range(40))}
    assert {*homes.values()} == {*pool[:2]}
    for name, home in homes.items():
        assert policy.choose(pool, asked(policy, key(name))).worker is home
    away = tuple(worker for worker in pool if worker is not pool[0])
    for name, home in homes.items():
        moved = policy.choose(away, asked(policy, key(name)))
        assert (moved.worker is home) is (home is not pool[0])
        assert policy.choose(away, asked(policy, key(name))).worker is moved.worker
    for name, home in homes.items():
        assert policy.choose(pool, asked(policy, key(name))).worker is home


def test_manual_without_a_key_goes_anywhere():
    pool, policy = workers(4), Manual(Random(1))
    assert {policy.choose(pool, asked(policy)).worker for _ in range(60)} == {*pool}
    assert not len(policy.table)


def test_manual_deals_keys_evenly_in_any_order():
    pool, orders = workers(3), set()
    for seed in range(20):
        policy = Manual(Random(seed))
        given = [policy.choose(pool, asked(policy, key(str(at)))).worker for at in range(9)]
        assert all({*given[at:at + 3]} == {*pool} for at in (0, 3, 6))
        orders.add(tuple(given[:3]))
    assert len(orders) == 6


def test_manual_assigns_by_load_and_by_keys():
    pool = workers(3)
    for worker, load in zip(pool, (5, 1, 9)):
        worker.load = load
    by_load, by_group = Manual(Random(1), mode="min_load"), Manual(Random(1), mode="min_group")
    assert by_load.choose(pool, asked(by_load, key("a"))).worker is pool[1]
    given = Counter(by_group.choose(pool, asked(by_group, key(str(at)))).worker for at in range(9))
    assert [*given.values()] == [3, 3, 3]


def test_manual_forgets_idle_keys():
    pool, policy = workers(2), Manual(Random(1), max_idle=100, eviction_interval=10)
    for now, name in ((0, "a"), (90, "b"), (95, "a")):
        policy.sweep(now)
        policy.choose(pool, asked(policy, key(name)))
    policy.sweep(191)
    assert len(policy.table) == 1
    policy.sweep(202)
    assert len(policy.table) == 0
    assert not policy.table.groups


def test_manual_keys_are_bounded(monkeypatch):
    monkeypatch.setattr("baton.router.policies.manual.MAX_KEYS", 10)
    table = KeyTable()
    for number in range(50):
        table.assign(number, 1)
    assert len(table) == table.groups[1] == 10
    assert table.find(0) == () and table.find(49) == (1,)


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 4), st.booleans()), max_size=60))
def test_keys_of_each_worker_are_counted(steps):
    table = KeyTable()
    for number, worker_id, new in steps:
        table.assign(number, worker_id, new=new)
        expected = Counter(worker for entry in table._entries.values() for worker in entry.workers)
        assert expected == table.groups
        assert all(len(entry.workers) <= 2 for entry in table._entries.values())


def test_tables_that_hear_of_each_other_prefer_the_same_worker():
    one, other = KeyTable(), KeyTable()
    one.assign(7, 1), other.assign(7, 2)
    one.assign(7, 2), other.assign(7, 1)
    assert one.find(7) == other.find(7) == (1, 2)


# ---------------------------------------------------------------------- bucket


def test_buckets_part_lengths_by_the_bytes_that_came():
    pool, policy = workers(2), Bucket(Random(1), balance_abs_threshold=10**9)
    assert policy.choose(pool, b"x" * 100).worker is pool[0]
    assert policy.choose(pool, b"x" * 3000).worker is pool[1]
    for _ in range(100):  # 10 KB in short prompts, 90 in the middle, 95 in long ones
        for size in (100, 900, 950):
            policy.choose(pool, b"x" * size)
    policy.sweep(1.0)
    (bound,) = policy.bounds
    assert bound == 900
    assert policy.choose(pool, b"x" * 900).worker is pool[0]
    assert policy.choose(pool, b"x" * 901).worker is pool[1]


def test_buckets_balance_what_drifts_apart_until_it_is_long_ago():
    pool, policy = workers(2), Bucket(Random(1), balance_abs_threshold=250, balance_rel_threshold=1.5, interval=5)
    chosen = [policy.choose(pool, b"x" * 100).worker for _ in range(6)]
    assert chosen[:3] == [pool[0]] * 3
    assert chosen[3] is pool[1]
    for now in (1.0, 7.0):
        policy.sweep(now)
    assert policy._work.bytes == [0, 0]


def test_buckets_follow_the_fleet():
    pool, policy = workers(5), Bucket(Random(1), balance_abs_threshold=10**9)
    for size in range(1, 500):
        policy.choose(pool, b"x" * size)
    policy.sweep(1.0)
    assert len(policy.bounds) == 4 and policy.bounds == sorted(policy.bounds)
    policy.choose(pool[:3], b"x")
    assert len(policy.bounds) == 2
    assert policy.choose([pool[4]], b"x").worker is pool[4]  # what is left for a retry
    assert len(policy.bounds) == 2


@settings(max_examples=50)
@given(st.lists(st.tuples(st.integers(0, 6), st.integers(-5, 50)), max_size=400))
def test_the_heaps_of_buckets_are_right(steps):
    work = _RecentBytes(7)
    for index, size in steps:
        work.add(index, size)
        assert work.bytes[work.least_index] == min(work.bytes)
        assert work.most == max(work.bytes)


# ---------------------------------------------------------------------- prefix_hash


def test_prompts_that_begin_alike_go_to_one_worker():
    pool, policy = workers(6), PrefixHash(token_count=8)
    for beginning in ("a" * 40, "b" * 40, "c" * 40):
        chosen = {policy.choose(pool, asked(policy, prompt=beginning + tail)).worker for tail in ("", "x", "yy" * 500)}
        assert len(chosen) == 1
    ids = {policy.choose(pool, asked(policy, input_ids=[*range(8), *tail])).worker for tail in ([], [1], [2, 3] * 90)}
    assert len(ids) == 1
    spread = {policy.choose(pool, asked(policy, prompt=str(at).zfill(3) * 9)).worker for at in range(60)}
    assert len(spread) == 6


def test_a_worker_with_too_much_to_do_passes_prefixes_on():
    pool, policy = workers(4), PrefixHash(load_factor=1.25)
    subject = asked(policy, prompt="x" * 2000)
    home = policy.choose(pool, subject).worker
    home.load = 3
    moved = policy.choose(pool, subject)
    assert moved.worker is not home and moved.reason == "balance"
    for worker in pool:
        worker.load = 3
    assert policy.choose(pool, subject).worker is home


@pytest.mark.parametrize("count", [3, 300])
def test_prefixes_of_a_fleet_of_any_size(count):
    pool, policy = workers(count), PrefixHash()
    for at in range(5 * count):
        policy.choose(pool, asked(policy, prompt="same beginning" * 100 + str(at))).worker.load += 1
    assert sum(worker.load for worker in pool) == 5 * count
    assert max(worker.load for worker in pool) <= 5 * 1.25 + 3


def test_manual_keys_that_another_process_assigned_are_known():
    records = []

    class Joined:
        def channel(self, apply):
            self.apply = apply
            return lambda worker_id, new, words: records.append((words, worker_id, new))

    pool, here, there = workers(2), Manual(Random(1)), Manual(Random(2))
    joined = Joined()
    here.replicate(Joined())
    there.replicate(joined)
    homes = {name: here.choose(pool, name).worker for name in (b"a", b"b", b"c")}
    for record in records[:]:
        joined.apply(*record)
    assert {name: there.choose(pool, name).worker for name in homes} == homes
    assert len(records) == 3  # Keys that were known are not published again.
    joined.apply([], pool[0].id, 1)  # a record that lost its words
    assert len(there.table) == 3


def test_a_key_assigned_again_counts_once():
    table = KeyTable()
    for _ in range(2):
        table.assign(7, 1)
    assert table.find(7) == (1,) and table.groups == {1: 1}


def test_manual_keys_with_no_limit_of_age_stay():
    pool, policy = workers(2), Manual(Random(1), max_idle=0)
    home = policy.choose(pool, b"a").worker
    policy.sweep(10.0**9)
    assert policy.choose(pool, b"a") == Decision(home, "session")


def test_manual_deals_no_key_to_a_worker_that_left():
    pool, policy = workers(3), Manual(Random(1))
    policy.choose(pool, b"a")
    assert {policy.choose(pool[:1], b"%d" % at).worker for at in range(5)} == {pool[0]}


def test_buckets_sample_more_lengths_than_they_keep(monkeypatch):
    monkeypatch.setattr("baton.router.policies.bucket._SAMPLE_SIZE", 50)
    pool, policy = workers(2), Bucket(Random(1), balance_abs_threshold=10**9)
    for at in range(2000):
        policy.choose(pool, b"x" * (10 if at < 1000 else 1000))
    assert len(policy._lengths) == 50
    assert 10 < policy._lengths.count(1000) < 40
    policy.sweep(1.0)
    assert policy.bounds == [1000]
    policy.sweep(2.0)  # before the next adjustment, nothing having come
    policy.sweep(7.0)  # an adjustment without lengths
    assert policy.bounds == [1000]


def test_the_most_bytes_of_buckets_are_right_after_they_are_taken_back():
    work = _RecentBytes(2)
    work.add(0, 50)
    work.add(1, 20)
    work.add(0, -50)
    assert (work.most, work.least_index) == (20, 0)


def test_prefix_hash_without_a_prompt_goes_to_the_least_loaded():
    pool, policy = workers(3), PrefixHash()
    pool[0].load = pool[2].load = 1
    assert policy.choose(pool, asked(policy)) == Decision(pool[1], "no_prompt")


# ---------------------------------------------------------------------- through the router


@pytest.mark.parametrize("flag", [{"bucket_adjust_interval_secs": 0}, {"prefix_token_count": 0},
                                  {"prefix_hash_load_factor": 0}, {"max_idle_secs": -1}])
def test_flags_out_of_range_are_refused(flag):
    with pytest.raises(ConfigError, match="must"):
        PolicyArgs(**flag)


@pytest.mark.parametrize("policy", ["consistent_hashing", "manual"])
async def test_keys_stick_through_the_router(start_router, worker, request_to, policy):
    mocks = [await worker() for _ in range(3)]
    router = await start_router(*mocks, policy=policy)
    for name in map(str, range(12)):
        for _ in range(3):
            assert (await request_to(router, "POST", "/generate", {"text": name}, key(name))).status == 200
    homes = [{served.json["text"] for served in mock.posts} for mock in mocks]
    assert sum(map(len, homes)) == 12
    assert sum(map(bool, homes)) > 1


@pytest.mark.parametrize("policy", ["consistent_hashing", "manual", "bucket", "prefix_hash"])
async def test_pairs_are_chosen_by_them(start_router, worker, request_to, policy):
    prefills = [await worker(disaggregation_mode="prefill") for _ in range(2)]
    decodes = [await worker(disaggregation_mode="decode") for _ in range(2)]
    router = await start_router(prefill=prefills, decode=decodes, policy=policy,
                                balance_abs_threshold=100_000)
    for _ in range(4):
        assert (await request_to(router, "POST", "/generate", {"text": "x" * 2000}, key("a"))).status == 200
    for mocks in (prefills, decodes):
        assert sorted(len(mock.posts) for mock in mocks) == [0, 4]


async def test_a_missing_target_is_unavailable(start_router, worker, request_to):
    prefill, decode = await worker(disaggregation_mode="prefill"), await worker(disaggregation_mode="decode")
    router = await start_router(prefill=[prefill, await worker(disaggregation_mode="prefill")], decode=[decode],
                                policy="consistent_hashing")
    reply = await request_to(router, "POST", "/generate", {"text": "x"}, "X-SMG-Target-Worker: 1\r\n")
    assert reply.status == 503 and "1 available workers" in reply.error["message"]
    assert not prefill.posts + decode.posts
    whole = await start_router(decode, policy="consistent_hashing")
    assert (await request_to(whole, "POST", "/generate", {"text": "x"}, "X-SMG-Target-Worker: 3\r\n")).status == 503
