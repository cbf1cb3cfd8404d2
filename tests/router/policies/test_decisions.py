"""Policies, registry, retries and body surgery: pure code, no sockets."""

from __future__ import annotations

import json
from collections import Counter
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.common.api.errors import Conflict, InvalidRequest, NotFound
from baton.router.config.endpoint import Endpoint
from baton.router.net.body import bootstrap_fields, require_object, routing_fields, splice
from baton.router.policies.base import Decision
from baton.router.policies.cache_aware import BLOCK, SHARDS, CacheAware, block_hashes, covered_bytes
from baton.router.policies.power_of_two import PowerOfTwo
from baton.router.policies.random import RandomChoice
from baton.router.policies.round_robin import RoundRobin
from baton.router.relay.retry import Backoff
from baton.router.workers.registry import Registry, Reservation, Worker


def workers(count: int, *loads: int) -> tuple[Worker, ...]:
    made = tuple(Worker(Endpoint.parse(f"http://w{i}:80")) for i in range(count))
    for worker, load in zip(made, loads):
        worker.load = load
    return made


def text(seed: int, size: int) -> bytes:
    return Random(seed).randbytes(size)


# ---------------------------------------------------------------------- policies


def test_round_robin_takes_turns():
    pool, policy = workers(3), RoundRobin()
    assert set(Counter(policy.choose(pool, None).worker for _ in range(30)).values()) == {10}


def test_random_takes_all():
    pool, policy = workers(4), RandomChoice(Random(1))
    assert min(Counter(policy.choose(pool, None).worker for _ in range(400)).values()) > 70


def test_power_of_two_never_takes_the_fullest():
    pool, policy = workers(3, 5, 1, 9), PowerOfTwo(Random(1))
    chosen = Counter(policy.choose(pool, None).worker for _ in range(300))
    assert chosen[pool[2]] == 0
    assert chosen[pool[1]] > chosen[pool[0]]


def test_cache_aware_keeps_a_conversation_on_its_worker():
    pool, policy = workers(4), CacheAware()
    talks = {i: text(i, 2000) for i in range(40)}
    home = {i: policy.choose(pool, block_hashes(talk)).worker for i, talk in talks.items()}
    assert set(Counter(home.values()).values()) == {10}
    for turn in range(1, 4):
        for i in talks:
            talks[i] += text(100 * turn + i, 300)
            assert policy.choose(pool, block_hashes(talks[i])) == Decision(home[i], "cache_hit")


def test_cache_aware_spreads_conversations_that_share_a_system_prompt():
    """Affinity looks at the whole conversation: a common beginning below the threshold binds no request."""
    pool, policy = workers(4), CacheAware()
    system = text(0, 1000)
    chosen = Counter(policy.choose(pool, block_hashes(system + text(i, 3000))).worker for i in range(1, 41))
    assert set(chosen.values()) == {10}


def test_cache_aware_gives_up_affinity_for_balance():
    pool, policy = workers(2), CacheAware(balance_abs_threshold=8, balance_rel_threshold=1.5)
    prompt = text(1, 4000)
    home = policy.choose(pool, block_hashes(prompt)).worker
    home.load = 8
    assert policy.choose(pool, block_hashes(prompt)) == Decision(home, "cache_hit")
    home.load = 9
    decision = policy.choose(pool, block_hashes(prompt))
    assert (decision.worker is home, decision.reason) == (False, "balance")
    home.load = 40
    next(w for w in pool if w is not home).load = 30
    assert policy.choose(pool, block_hashes(prompt)).reason == "cache_hit"  # a difference of 10, but below the factor


def test_cache_aware_ignores_workers_that_are_not_available():
    pool, policy = workers(3), CacheAware()
    prompt = text(1, 4000)
    home = policy.choose(pool, block_hashes(prompt)).worker
    rest = tuple(worker for worker in pool if worker is not home)
    assert policy.choose(rest, block_hashes(prompt)).worker in rest
    assert policy.choose(pool, block_hashes(prompt)).reason == "cache_hit"


def test_cache_aware_prefers_the_longest_prefix():
    pool, policy = workers(2), CacheAware(cache_threshold=0.1)
    base = text(1, 2048)
    first = policy.choose(pool, block_hashes(base)).worker
    first.load = 1
    other = next(w for w in pool if w is not first)
    policy.memory.record(block_hashes(base + text(2, 2048)), other.id, 10**6)
    first.load = 0
    other.load = 1
    assert policy.choose(pool, block_hashes(base + text(2, 2048))).worker is other
    assert policy.choose(pool, block_hashes(base + text(3, 2048))).worker is first


def test_cache_aware_memory_is_bounded():
    pool, policy = workers(2), CacheAware(max_tree_size=100 * BLOCK)
    for i in range(500):
        policy.choose(pool, block_hashes(text(i, 10 * BLOCK)))
    assert len(policy.memory) <= 200
    assert policy.memory.num_sets <= 3 * 2 * SHARDS


@given(st.binary(max_size=4 * BLOCK), st.binary(max_size=4 * BLOCK))
def test_hashes_of_a_prefix_are_a_prefix_of_the_hashes(head, tail):
    whole = block_hashes(head + tail)
    assert len(head) < BLOCK or whole[:len(head) // BLOCK] == block_hashes(head)
    assert len(whole) == (len(head + tail) // BLOCK or (1 if head + tail else 0))


def test_long_prompts_cost_few_hashes():
    prompt = bytes(4 * 2**20)
    assert len(block_hashes(prompt)) == 64 + 48 + (len(prompt) - 64 * 1024) // 4096
    assert block_hashes(prompt[:2**20]) == block_hashes(prompt)[:len(block_hashes(prompt[:2**20]))]


@pytest.mark.parametrize("size", [0, 1, 255, 256, 16384, 16385, 17407, 17408, 65536, 69631, 69632, 300_000])
def test_blocks_cover_a_prompt_but_for_less_than_a_block(size):
    hashes = block_hashes(bytes(size))
    assert len(set(hashes)) == len(hashes) >= (size > 0)
    if size >= BLOCK:
        ends = [covered_bytes(count) for count in range(1, len(hashes) + 1)]
        assert ends == sorted(set(ends))
        assert ends[-1] <= size < covered_bytes(len(hashes) + 1)


@given(st.integers(0, 200_000), st.integers(1, 30_000))
def test_prompts_of_any_size_share_the_blocks_of_their_common_beginning(common, rest):
    beginning = Random(1).randbytes(common)
    one, other = (block_hashes(beginning + Random(seed).randbytes(rest)) for seed in (2, 3))
    shared = next((at for at, (a, b) in enumerate(zip(one, other)) if a != b), len(one))
    whole = block_hashes(beginning) if common >= BLOCK else []
    assert one[:len(whole)] == whole and shared >= len(whole)


# ---------------------------------------------------------------------- registry, endpoints, backoff


def test_availability_follows_health():
    registry = Registry(failure_threshold=2, success_threshold=2)
    (worker,) = workers(1)
    registry.add(worker)
    assert registry.available("regular") == ()
    assert registry.record_check_passed(worker)  # a new worker: one check is enough
    before = registry.available("regular")
    assert before == (worker,)
    assert not registry.record_check_failed(worker, certain=False)
    assert registry.available("regular") is before
    assert registry.record_check_failed(worker, certain=False)
    assert not registry.record_check_passed(worker)
    assert registry.available("regular") == ()
    assert registry.record_check_passed(worker)
    assert registry.record_check_failed(worker, certain=True)
    assert not registry.ready(pairs=False)


def test_membership_errors():
    registry = Registry()
    (worker,) = workers(1)
    registry.add(worker)
    with pytest.raises(Conflict):
        registry.add(Worker(worker.endpoint))
    assert registry.remove(worker.url) is worker
    with pytest.raises(NotFound):
        registry.remove(worker.url)
    assert worker not in registry


def test_a_reservation_is_released_once():
    (worker,) = workers(1)
    worker.load += 1
    reservation = Reservation(worker)
    assert worker.load == 1
    reservation.release()
    assert worker.load == 0
    with pytest.raises(AssertionError):
        reservation.release()


@pytest.mark.parametrize(("url", "normal"), [
    ("http://Host:80/", "http://host:80"), ("http://h", "http://h:80"), ("https://h/base/", "https://h:443/base"),
    ("http://[::1]:3000", "http://[::1]:3000"),
])
def test_endpoints_are_normalized(url, normal):
    assert Endpoint.parse(url).url == normal


@pytest.mark.parametrize("url", ["", "h:80", "ftp://h", "http://", "http://h:x", "http://h:0", "http://h/?q",
                                 "http://h\r\n:80/", "http://u:p@h", "http://h/a b"])
def test_malformed_urls_are_refused(url):
    with pytest.raises(ValueError, match="URL"):
        Endpoint.parse(url)


def test_backoff_grows_to_its_limit():
    backoff = Backoff(max_retries=5, initial=0.1, maximum=0.5, multiplier=2, jitter=0.1)
    delays = [backoff.delay(k, Random(k)) for k in range(6)]
    for delay, base in zip(delays, (0.1, 0.2, 0.4, 0.5, 0.5, 0.5)):
        assert base * 0.9 <= delay <= base * 1.1
    assert backoff.delay(10_000, Random(1)) <= 0.55


# ---------------------------------------------------------------------- bodies

SCALAR = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text()
JSON = st.recursive(
    SCALAR, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3), max_leaves=8)
SPACE = st.text(" \t\r\n", max_size=70).map(str.encode)
FIELDS = {"bootstrap_host": "h", "bootstrap_port": None, "bootstrap_room": 2**63 - 1}


@given(st.dictionaries(st.text(), JSON, max_size=5), SPACE, SPACE, st.sampled_from([None, 1]))
def test_spliced_fields_are_all_that_changes(value, before, inside, indent):
    inner = json.dumps(value, indent=indent).encode()[1:]
    body = before + b"{" + inside + inner + before
    fields = routing_fields(body)
    result = splice(body, fields, FIELDS)
    assert json.loads(result) == value | FIELDS
    if not fields.has_bootstrap:
        assert result.startswith(before + b"{")
        assert result.endswith(inside + inner + before)


@given(st.sets(st.sampled_from(sorted(FIELDS)), min_size=1))
def test_fields_that_a_client_sent_are_replaced(present):
    """Two equal keys would leave the choice to each worker's parser."""
    body = b'{"a": 1.50, ' + b", ".join(b'"%s": "theirs"' % key.encode() for key in sorted(present)) + b', "z": 1e2}'
    result = splice(body, routing_fields(body), FIELDS)
    assert json.loads(result) == {"a": 1.5, "z": 100.0} | FIELDS
    assert b"1.50" in result
    assert b"1e2" in result
    assert all(result.count(key.encode()) == 1 for key in FIELDS)


@given(st.binary(max_size=60) | JSON.map(lambda value: json.dumps(value).encode()))
def test_peek_accepts_objects_only(body):
    fields = routing_fields(body)
    if fields is None:
        with pytest.raises(InvalidRequest):
            require_object(body)
    else:
        assert isinstance(json.loads(body), dict)


def test_routing_text_of_a_conversation_extends_from_turn_to_turn():
    turns = [{"role": "user", "content": "x" * 40}]
    first = routing_fields(json.dumps({"model": "m", "messages": turns}).encode()).routing_text
    turns += [{"role": "assistant", "content": "y"}, {"role": "user", "content": "z"}]
    second = routing_fields(json.dumps({"stream": True, "messages": turns, "model": "m"}).encode()).routing_text
    assert second.startswith(first)
    assert len(first) > 40


@pytest.mark.parametrize("body", [b"{}", b'{"messages": null}', b'{"text": ""}', b'{"messages": 5, "text": {"a": []}}',
                                  b'{"input_ids": []}', b'{"prompt": [' + b"[" * 5000 + b"]" * 5000 + b"]}"])
def test_odd_bodies_do_not_raise(body):
    fields = routing_fields(body)
    if fields is not None:
        assert isinstance(fields.routing_text, bytes)
        assert fields.batch_size in (None, 1)


def test_bootstrap_fields():
    one = bootstrap_fields("h", 1, Random(1), None)
    assert 0 <= one["bootstrap_room"] < 2**63
    many = bootstrap_fields("h", None, Random(1), 3)
    assert (many["bootstrap_host"], many["bootstrap_port"]) == (["h"] * 3, [None] * 3)
    assert len(set(many["bootstrap_room"])) == 3
