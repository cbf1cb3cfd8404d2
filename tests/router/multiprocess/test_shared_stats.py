"""What the processes of a router share, without processes: two children's halves in one."""

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
from baton.router.multiprocess.ring import RingReader, RingWriter
from baton.router.multiprocess.shared_admission import SharedAdmission
from baton.router.multiprocess.shared_policies import PolicySharing
from baton.router.multiprocess.shared_stats import FEED_HEAD, FEED_WORDS, SharedStats
from baton.router.multiprocess.shared_workers import SharedRegistry, SharedSlots, SharedWorker
from baton.router.obs.metrics import Metrics
from baton.router.policies.cache_aware import CacheAware
from baton.router.policies.cache_exact import CacheExact
from baton.router.policies.manual import Manual
from baton.router.policies.text_pages import PromptPages
from baton.router.workers.registry import Registry, Worker


@pytest.fixture
def board():
    made = SharedStats.create(2)
    yield made
    os.close(made.file)


def registry_of(board: SharedStats, child: int) -> SharedRegistry:
    return SharedRegistry(board, child, lambda message: None, CircuitRules())


def join(registry: SharedRegistry, board: SharedStats, child: int, row: int) -> SharedWorker:
    worker = SharedWorker(Endpoint.parse(f"http://w:{row + 1}"), "regular", api_key=None, rank=None, root=None, row=row,
                          column=board.loads(child))
    registry.add(worker)
    worker.state = "healthy"
    registry.changed()
    return worker


def test_loads_follow_each_other_over_many_rows(board):
    registries = [registry_of(board, child) for child in range(2)]
    workers = [[join(registries[child], board, child, row) for row in range(200)] for child in range(2)]
    rng, held = Random(1), []
    for _ in range(2000):
        if held and rng.random() < 0.45:
            held.pop(rng.randrange(len(held))).load -= 1
        else:
            held.append(workers[rng.randrange(2)][rng.randrange(200)])
            held[-1].load += 1
        registries[rng.randrange(2)].available("regular")
    for child in range(2):
        registries[child].available("regular")
        for row in range(200):
            assert workers[child][row].load == board.total(row) == sum(worker.row == row for worker in held)
    board.clear(0)
    registries[1].available("regular")
    mine = {*map(id, workers[1])}
    assert sum(worker.load for worker in workers[1]) == sum(id(worker) in mine for worker in held)


def test_a_worker_that_joins_late_knows_its_load(board):
    early, late = registry_of(board, 0), registry_of(board, 1)
    first = join(early, board, 0, 3)
    first.load += 2
    join(late, board, 1, 3)
    assert late.available("regular")[0].load == 2
    first.load -= 1
    assert late.available("regular")[0].load == 1


def test_rows_are_used_again_only_when_nobody_counts_there(board):
    rows = Rows(board)
    assert [rows[10], rows[11], rows[10]] == [0, 1, 0]
    board.loads(1)[0] = 1
    rows.retire(10, version=5)
    rows.reclaim(applied=9)
    assert rows[12] == 2
    board.loads(1)[0] = 0
    rows.reclaim(applied=4)  # A child may still place requests there.
    assert rows[13] == 3
    rows.reclaim(applied=5)
    assert rows[14] == 0


def test_a_ring_tells_all_in_order_around_its_end(board):
    writer, reader, found = RingWriter(board, 0), RingReader(board, 0), []
    reader.apply[7] = lambda words, subject, number: found.append((subject, number, words))
    rng, sent = Random(2), []
    while len(sent) < 40_000:
        for _ in range(rng.randrange(20)):
            sent.append((len(sent), -5, [rng.randrange(-2**63, 2**63) for _ in range(rng.randrange(6))]))
            writer.write(7, *sent[-1])
        reader.read(board.cells(0)[FEED_HEAD])
    assert found == sent
    assert board.cells(0)[FEED_HEAD] > FEED_WORDS


def test_who_was_overtaken_goes_on_with_what_comes(board):
    writer, reader, found = RingWriter(board, 0), RingReader(board, 0), []
    reader.apply[1] = lambda words, subject, number: found.append(subject)
    for number in range(FEED_WORDS):
        writer.write(1, number, 0, [1])
    reader.read(board.cells(0)[FEED_HEAD])
    found.clear()
    again = RingWriter(board, 0)  # Another process in its place goes on behind it.
    again.write(1, 99, 0, [])
    reader.read(board.cells(0)[FEED_HEAD])
    assert found == [99]


def test_a_record_longer_than_it_may_be_loses_its_end(board):
    writer, reader, found = RingWriter(board, 0), RingReader(board, 0), []
    reader.apply[1] = lambda words, subject, number: found.append(words)
    writer.write(1, 0, 0, range(FEED_WORDS))
    writer.write(1, 0, 0, [5])
    reader.read(board.cells(0)[FEED_HEAD])
    assert found[0] == list(range(len(found[0])))
    assert found[1] == [5]


def test_policies_of_two_processes_remember_alike(board):
    registries = [registry_of(board, child) for child in range(2)]
    both = []
    for child, registry in enumerate(registries):
        policies = [CacheAware(), CacheExact()]
        apply = PolicySharing(board, child).join(None, policies)
        for neighbour in registry.neighbours:
            neighbour.apply.update(apply)
        both.append(policies)
    for child in range(2):
        both[child][0].memory.record([child + 1, 5], 7, 1000)
        both[child][1].texts.learn([10, 11, 12], 700, PromptPages(20, 16, [(4, 77), (20, 78)]))
    for registry in registries:
        registry.refresh()
    for aware, exact in both:
        assert aware.memory.longest([1, 5], frozenset((7,))) == (frozenset((7,)), 2)
        assert aware.memory.longest([2], frozenset((7,)))[1] == 1
        assert exact.texts.knows([12])


def test_keys_of_two_processes_stay_with_the_same_worker(board):
    registries, policies = [registry_of(board, child) for child in range(2)], []
    for child, registry in enumerate(registries):
        policies.append(Manual(Random(child)))
        for neighbour in registry.neighbours:
            neighbour.apply.update(PolicySharing(board, child).join("a model", policies[child:]))
    pool = tuple(Worker(Endpoint.parse(f"http://w{index}:1")) for index in range(5))
    keys = [b"%d" % number for number in range(40)]
    homes = [policies[number % 2].choose(pool, key).worker for number, key in enumerate(keys)]
    for registry in registries:
        registry.refresh()
    for policy in policies:
        assert [policy.choose(pool, key).worker for key in keys] == homes


def shared_admission(board, rules, loop) -> list[SharedAdmission]:
    signals = [os.eventfd(0, os.EFD_NONBLOCK) for _ in range(2)]
    return [SharedAdmission(rules, loop, board, child, signals) for child in range(2)]


async def test_the_queue_goes_by_priority_over_both_processes(board):
    one, other = shared_admission(board, AdmissionRules(1, 10), asyncio.get_running_loop())
    ticket = one.acquire(b"", False, lambda: 0, None, None)
    assert isinstance(ticket, Permit)
    order: list[str] = []

    def wait(admission, name, priority):
        def start(ticket):
            order.append(name)
            asyncio.get_running_loop().call_later(0.001, ticket.release)
        return admission.acquire(b"", False, lambda: priority, start, None)

    waiting = [wait(one, "low", -1), wait(other, "high", 5), wait(one, "first", 0), wait(other, "second", 0),
               wait(one, "gone", 9)]
    assert all(isinstance(found, Waiting) for found in waiting)
    waiting[-1].cancel()
    assert (one.queued, other.running) == (4, 1)
    ticket.release()
    while len(order) < 4:
        await asyncio.sleep(0.005)
    assert order == ["high", "first", "second", "low"]
    await asyncio.sleep(0.02)
    assert (one.running, one.queued) == (0, 0)
    one.close(), other.close()


async def test_keys_beyond_the_table_are_refused_until_some_are_idle(board, monkeypatch):
    monkeypatch.setattr("baton.router.multiprocess.shared_keys.MAX_KEYS", 4)
    start, _ = board.digests_at
    monkeypatch.setattr(SharedStats, "digests_at", property(lambda self: (start, start + 8 * 4)))
    one, other = shared_admission(board, AdmissionRules(max_concurrent_per_key=1), asyncio.get_running_loop())
    held = [admission.acquire(b"key %d" % index, False, lambda: 0, None, None)
            for index, admission in enumerate((one, other, one, other))]
    with pytest.raises(Overloaded, match="as many requests running"):
        other.acquire(b"key 0", False, lambda: 0, None, None)
    with pytest.raises(Overloaded, match="Too many API keys"):
        one.acquire(b"key 5", False, lambda: 0, None, None)
    held[1].release()
    held.append(one.acquire(b"key 5", False, lambda: 0, None, None))
    with pytest.raises(Overloaded, match="Too many API keys"):
        one.acquire(b"key 1", False, lambda: 0, None, None)
    board.clear(0)  # That process died.
    one.acquire(b"key 0", False, lambda: 0, None, None)
    one.close(), other.close()


async def test_estimates_of_the_first_token_are_common(board):
    one, other = shared_admission(board, AdmissionRules(slo_ttft=1.0), asyncio.get_running_loop())
    one.acquire(b"", True, lambda: 0, None, None)
    one.ttft.observe(1, 0.8), one.ttft.end()
    assert isinstance(one.acquire(b"", True, lambda: 0, None, None), Permit)
    with pytest.raises(Overloaded, match="later than promised"):
        other.acquire(b"", True, lambda: 0, None, None)
    one.close(), other.close()


def test_counters_add_up_and_never_fall(board):
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


def test_news_hold_what_changed_once(board):
    registry = ReplicatedRegistry(failure_threshold=1, success_threshold=1, circuit_rules=CircuitRules(),
                                  on_drain=lambda: None)
    bulletin = UpdateFeed(registry, Rows(board))
    first, second = Worker(Endpoint.parse("http://a:1")), Worker(Endpoint.parse("http://b:1"))
    registry.add(first), registry.add(second)
    assert [news.server for news in bulletin.next_update().changed] == ["http://a:1", "http://b:1"]
    assert bulletin.next_update() is None
    registry.passed(second)
    assert [(news.id, news.state) for news in bulletin.next_update().changed] == [(second.id, "healthy")]
    bulletin.repeat(first.id)
    assert [news.id for news in bulletin.next_update().changed] == [first.id]
    bulletin.repeat(second.id)
    bulletin.to_cut.add(second.id)
    registry.remove(second.url)
    news = bulletin.next_update()
    assert (news.changed, news.removed, news.cut, news.version) == ((), (second.id,), (second.id,), 4)
    assert [told.id for told in bulletin.snapshot().changed] == [first.id]


def test_all_that_makes_a_worker_is_told_to_the_children():
    """A new attribute of Worker belongs into WorkerUpdate, or here: it is a process's own."""
    own = {"endpoint", "url", "asks_role", "asks_port", "asks_models", "failures", "successes", "known_load",
           "load_orders", "on_release", "cached_tokens", "epoch"}
    assert {*WorkerUpdate.__struct_fields__} - {"row", "server", "troubled", "probing"} == {*Worker.__slots__} - own


def test_words_of_a_child_do_not_overlap():
    assert len({layout.FEED_HEAD, layout.TTFT_WAITING, layout.HEAD_PRIORITY, layout.HEAD_SINCE}) == 4
    assert max(layout.FEED_HEAD, layout.TTFT_WAITING, layout.HEAD_PRIORITY, layout.HEAD_SINCE) < layout.COUNTERS


def test_a_worker_has_one_suspect_in_quarantine_whichever_process_sent_it(board):
    first, second = (SharedSlots(board, child) for child in range(2))
    seen = [[join(registry, board, child, row) for row in range(2)]
            for child, registry in enumerate(registry_of(board, child) for child in range(2))]
    assert first.try_acquire(seen[0][0])
    assert not second.is_free(seen[1][0]) and not second.try_acquire(seen[1][0])
    assert second.is_free(seen[1][1]) and second.try_acquire(seen[1][1]) and not first.is_free(seen[0][1])
    first.release(seen[0][0])
    assert second.try_acquire(seen[1][0])
    board.clear(1)  # its process died
    assert all(map(first.is_free, seen[0]))
