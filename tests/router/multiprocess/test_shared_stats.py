"""The memory that a router's processes share: both sides in one process."""

from __future__ import annotations

import asyncio
import os
from random import Random

import pytest

from baton.common.api.errors import Overloaded
from baton.router.admission.admission import Permit, Waiting
from baton.router.config.admission import AdmissionRules
from baton.router.config.circuit import CircuitRules
from baton.router.config.endpoint import Endpoint
from baton.router.multiprocess import shared_stats as layout
from baton.router.multiprocess.counters import Totals, dump
from baton.router.multiprocess.membership import ReplicatedRegistry, Rows, UpdateFeed
from baton.router.multiprocess.messages import WorkerUpdate
from baton.router.multiprocess.ring_buffer import RingReader, RingWriter
from baton.router.multiprocess.shared_admission import SharedAdmission
from baton.router.multiprocess.shared_policies import PolicyReplicator
from baton.router.multiprocess.shared_stats import RING_HEAD, RING_WORDS, SharedStats
from baton.router.multiprocess.shared_workers import SharedRegistry, SharedSlots, SharedWorker
from baton.router.obs.metrics import Metrics
from baton.router.policies.cache_aware import CacheAware
from baton.router.policies.cache_exact import CacheExact
from baton.router.policies.manual import Manual
from baton.router.policies.text_pages import PromptPages
from baton.router.workers.registry import Registry, Worker


@pytest.fixture
def stats():
    made = SharedStats.create(2)
    yield made
    os.close(made.file)


def registry_of(stats: SharedStats, child: int) -> SharedRegistry:
    return SharedRegistry(stats, child, lambda message: None, CircuitRules())


def join(registry: SharedRegistry, stats: SharedStats, child: int, row: int) -> SharedWorker:
    worker = SharedWorker(Endpoint.parse(f"http://w:{row + 1}"), "regular", api_key=None, rank=None, root=None, row=row,
                          column=stats.loads(child))
    registry.add(worker)
    worker.state = "healthy"
    registry.rebuild()
    return worker


def test_loads_follow_each_other_over_many_rows(stats):
    registries = [registry_of(stats, child) for child in range(2)]
    workers = [[join(registries[child], stats, child, row) for row in range(200)] for child in range(2)]
    rng, running = Random(1), []
    for _ in range(2000):
        if running and rng.random() < 0.45:
            running.pop(rng.randrange(len(running))).load -= 1
        else:
            running.append(workers[rng.randrange(2)][rng.randrange(200)])
            running[-1].load += 1
        registries[rng.randrange(2)].available("regular")
    for child in range(2):
        registries[child].available("regular")
        for row in range(200):
            assert workers[child][row].load == stats.total(row) == sum(worker.row == row for worker in running)
    stats.clear(0)
    registries[1].available("regular")
    mine = {*map(id, workers[1])}
    assert sum(worker.load for worker in workers[1]) == sum(id(worker) in mine for worker in running)


def test_a_worker_that_joins_late_knows_its_load(stats):
    early, late = registry_of(stats, 0), registry_of(stats, 1)
    first = join(early, stats, 0, 3)
    first.load += 2
    join(late, stats, 1, 3)
    assert late.available("regular")[0].load == 2
    first.load -= 1
    assert late.available("regular")[0].load == 1


def test_rows_are_used_again_only_when_no_child_counts_there(stats):
    rows = Rows(stats)
    assert [rows[10], rows[11], rows[10]] == [0, 1, 0]
    stats.loads(1)[0] = 1
    rows.retire(10, version=5)
    rows.reclaim(applied=9)
    assert rows[12] == 2
    stats.loads(1)[0] = 0
    rows.reclaim(applied=4)  # A child may still place requests there.
    assert rows[13] == 3
    rows.reclaim(applied=5)
    assert rows[14] == 0


def test_a_ring_buffer_delivers_all_in_order_around_its_end(stats):
    writer, reader, received = RingWriter(stats, 0), RingReader(stats, 0), []
    reader.apply[7] = lambda words, subject, number: received.append((subject, number, words))
    rng, sent = Random(2), []
    while len(sent) < 40_000:
        for _ in range(rng.randrange(20)):
            sent.append((len(sent), -5, [rng.randrange(-2**63, 2**63) for _ in range(rng.randrange(6))]))
            writer.write(7, *sent[-1])
        reader.read(stats.cells(0)[RING_HEAD])
    assert received == sent
    assert stats.cells(0)[RING_HEAD] > RING_WORDS


def test_an_overtaken_reader_continues_with_what_comes(stats):
    writer, reader, received = RingWriter(stats, 0), RingReader(stats, 0), []
    reader.apply[1] = lambda words, subject, number: received.append(subject)
    for number in range(RING_WORDS):
        writer.write(1, number, 0, [1])
    reader.read(stats.cells(0)[RING_HEAD])
    received.clear()
    again = RingWriter(stats, 0)  # The process that replaces it continues there.
    again.write(1, 99, 0, [])
    reader.read(stats.cells(0)[RING_HEAD])
    assert received == [99]


def test_a_record_longer_than_it_may_be_loses_its_end(stats):
    writer, reader, received = RingWriter(stats, 0), RingReader(stats, 0), []
    reader.apply[1] = lambda words, subject, number: received.append(words)
    writer.write(1, 0, 0, range(RING_WORDS))
    writer.write(1, 0, 0, [5])
    reader.read(stats.cells(0)[RING_HEAD])
    assert received[0] == list(range(len(received[0])))
    assert received[1] == [5]


def test_policies_of_two_processes_remember_alike(stats):
    registries = [registry_of(stats, child) for child in range(2)]
    both = []
    for child, registry in enumerate(registries):
        policies = [CacheAware(), CacheExact()]
        apply = PolicyReplicator(stats, child).join(None, policies)
        for peer in registry.peers:
            peer.apply.update(apply)
        both.append(policies)
    for child in range(2):
        both[child][0].memory.record([child + 1, 5], 7, 1000)
        both[child][1].texts.learn([10, 11, 12], 700, PromptPages(20, 16, [(4, 77), (20, 78)]))
    for registry in registries:
        registry.refresh()
    for aware, exact in both:
        assert aware.memory.longest_match([1, 5], frozenset((7,))) == (frozenset((7,)), 2)
        assert aware.memory.longest_match([2], frozenset((7,)))[1] == 1
        assert exact.texts.knows([12])


def test_keys_of_two_processes_stay_with_the_same_worker(stats):
    registries, policies = [registry_of(stats, child) for child in range(2)], []
    for child, registry in enumerate(registries):
        policies.append(Manual(Random(child)))
        for peer in registry.peers:
            peer.apply.update(PolicyReplicator(stats, child).join("a model", policies[child:]))
    pool = tuple(Worker(Endpoint.parse(f"http://w{index}:1")) for index in range(5))
    keys = [b"%d" % number for number in range(40)]
    homes = [policies[number % 2].choose(pool, key).worker for number, key in enumerate(keys)]
    for registry in registries:
        registry.refresh()
    for policy in policies:
        assert [policy.choose(pool, key).worker for key in keys] == homes


def shared_admission(stats, rules, loop) -> list[SharedAdmission]:
    signals = [os.eventfd(0, os.EFD_NONBLOCK) for _ in range(2)]
    return [SharedAdmission(rules, loop, stats, child, signals) for child in range(2)]


async def test_the_queue_goes_by_priority_over_both_processes(stats):
    one, other = shared_admission(stats, AdmissionRules(1, 10), asyncio.get_running_loop())
    permit = one.acquire(b"", False, lambda: 0, None, None)
    assert isinstance(permit, Permit)
    order: list[str] = []

    def wait(admission, name, priority):
        def start(permit):
            order.append(name)
            asyncio.get_running_loop().call_later(0.001, permit.release)
        return admission.acquire(b"", False, lambda: priority, start, None)

    waiting = [wait(one, "low", -1), wait(other, "high", 5), wait(one, "first", 0), wait(other, "second", 0),
               wait(one, "gone", 9)]
    assert all(isinstance(each, Waiting) for each in waiting)
    waiting[-1].cancel()
    assert (one.queued, other.running) == (4, 1)
    permit.release()
    while len(order) < 4:
        await asyncio.sleep(0.005)
    assert order == ["high", "first", "second", "low"]
    await asyncio.sleep(0.02)
    assert (one.running, one.queued) == (0, 0)
    one.close(), other.close()


async def test_keys_beyond_the_table_are_refused_until_some_are_idle(stats, monkeypatch):
    monkeypatch.setattr("baton.router.multiprocess.shared_keys.MAX_KEYS", 4)
    start, _ = stats.digests_at
    monkeypatch.setattr(SharedStats, "digests_at", property(lambda self: (start, start + 8 * 4)))
    one, other = shared_admission(stats, AdmissionRules(max_concurrent_per_key=1), asyncio.get_running_loop())
    running = [admission.acquire(b"key %d" % index, False, lambda: 0, None, None)
            for index, admission in enumerate((one, other, one, other))]
    with pytest.raises(Overloaded, match="as many requests running"):
        other.acquire(b"key 0", False, lambda: 0, None, None)
    with pytest.raises(Overloaded, match="Too many API keys"):
        one.acquire(b"key 5", False, lambda: 0, None, None)
    running[1].release()
    running.append(one.acquire(b"key 5", False, lambda: 0, None, None))
    with pytest.raises(Overloaded, match="Too many API keys"):
        one.acquire(b"key 1", False, lambda: 0, None, None)
    stats.clear(0)  # That process died.
    one.acquire(b"key 0", False, lambda: 0, None, None)
    one.close(), other.close()


async def test_estimates_of_the_first_token_are_common(stats):
    one, other = shared_admission(stats, AdmissionRules(slo_ttft=1.0), asyncio.get_running_loop())
    one.acquire(b"", True, lambda: 0, None, None)
    one.ttft.observe(1, 0.8), one.ttft.end()
    assert isinstance(one.acquire(b"", True, lambda: 0, None, None), Permit)
    with pytest.raises(Overloaded, match="later than promised"):
        other.acquire(b"", True, lambda: 0, None, None)
    one.close(), other.close()


def test_counters_add_up_and_never_fall(stats):
    parts = [Metrics(Registry()) for _ in range(2)]
    totals, shown, refused = Totals(2), Metrics(Registry()), {}
    for child, metrics in enumerate(parts):
        metrics.requests["/x", 200] += child + 1
        metrics.broken_streams += 1
        metrics.durations["/x"].observe(0.3)
        metrics.decisions["regular", "turn"] += 1
        totals.update(child, dump(metrics))
    totals.ended(1)
    totals.update(1, dump(Metrics(Registry())))
    for _ in range(2):
        totals.fill(shown, refused)
    assert (shown.requests["/x", 200], shown.broken_streams, shown.decisions["regular", "turn"]) == (3, 2, 2)
    assert sum(shown.durations["/x"].counts) == 2
    assert shown.durations["/x"].total == pytest.approx(0.6)
    assert b'request_duration_seconds_count{route="/x"} 2.0' in shown.render()


def test_an_update_has_what_changed_once(stats):
    registry = ReplicatedRegistry(failure_threshold=1, success_threshold=1, circuit_rules=CircuitRules(),
                                  on_drain=lambda: None)
    feed = UpdateFeed(registry, Rows(stats))
    first, second = Worker(Endpoint.parse("http://a:1")), Worker(Endpoint.parse("http://b:1"))
    registry.add(first), registry.add(second)
    assert [update.server for update in feed.next_update().changed] == ["http://a:1", "http://b:1"]
    assert feed.next_update() is None
    registry.record_check_passed(second)
    assert [(update.id, update.state) for update in feed.next_update().changed] == [(second.id, "healthy")]
    feed.repeat(first.id)
    assert [update.id for update in feed.next_update().changed] == [first.id]
    feed.repeat(second.id)
    feed.to_cut.add(second.id)
    registry.remove(second.url)
    update = feed.next_update()
    assert (update.changed, update.removed, update.cut, update.version) == ((), (second.id,), (second.id,), 4)
    assert [state.id for state in feed.snapshot().changed] == [first.id]


def test_all_that_makes_a_worker_is_sent_to_the_children():
    """A new attribute of Worker belongs into WorkerUpdate, or into ``own``: it is a process's own."""
    own = {"endpoint", "url", "asks_role", "asks_port", "asks_models", "failures", "successes", "known_load",
           "load_orders", "on_release", "cached_tokens", "epoch", "peak_load"}
    assert {*WorkerUpdate.__struct_fields__} - {"row", "server", "troubled", "probing"} == {*Worker.__slots__} - own


def test_words_of_a_child_do_not_overlap():
    assert len({layout.RING_HEAD, layout.TTFT_WAITING, layout.HEAD_PRIORITY, layout.HEAD_SINCE}) == 4
    assert max(layout.RING_HEAD, layout.TTFT_WAITING, layout.HEAD_PRIORITY, layout.HEAD_SINCE) < layout.COUNTERS


def test_a_worker_has_one_suspect_in_quarantine_whichever_process_sent_it(stats):
    first, second = (SharedSlots(stats, child) for child in range(2))
    seen = [[join(registry, stats, child, row) for row in range(2)]
            for child, registry in enumerate(registry_of(stats, child) for child in range(2))]
    assert first.try_acquire(seen[0][0])
    assert not second.is_free(seen[1][0]) and not second.try_acquire(seen[1][0])
    assert second.is_free(seen[1][1]) and second.try_acquire(seen[1][1]) and not first.is_free(seen[0][1])
    first.release(seen[0][0])
    assert second.try_acquire(seen[1][0])
    stats.clear(1)  # its process died
    assert all(map(first.is_free, seen[0]))
