"""A rank's storage: queries, reads and writes in the background, and what it does when the backend does not."""

from __future__ import annotations

import logging
import random
import threading
import time

import numpy as np
import pytest

from baton.common.kvcache.storage.health import Health, Rate
from baton.common.kvcache.storage.objects import HEADER_BYTES
from baton.common.kvcache.storage.storage import Storage
from baton.tests.helpers.stored_pages import (
    DIGEST,
    FakeHost,
    MemoryBackend,
    content,
    key_of,
    query,
    rank_shape,
    read_back,
    storage_of,
    wait_until,
    write,
)

KEYS = [key_of(i) for i in range(40)]


@pytest.fixture
def backend():
    return MemoryBackend()


@pytest.fixture
def host():
    return FakeHost(rank_shape(), 128)


@pytest.fixture
def storage(backend, host):
    storage = storage_of(backend, host)
    yield storage
    backend.gate.set()
    storage.close()


def test_what_one_server_writes_another_reads(backend, host, storage):
    write(storage, host, KEYS)
    other_host = FakeHost(rank_shape(groups=(1, 1, 1)), 128, groups=(1, 1, 1, 1))
    other = storage_of(backend, other_host)
    assert query(other, [*KEYS, key_of(99)]) == 40 and query(other, [key_of(99), *KEYS]) == 0 == query(other, [])
    assert read_back(other, other_host, [*KEYS, key_of(99)]) == 40
    assert other.counters.read_pages == 40 and other.counters.read_bytes == 40 * other_host.page_bytes
    assert other.read_rate > 0 == storage.read_rate
    other.close()


def test_a_page_is_written_once(backend, host, storage):
    write(storage, host, KEYS[:4])
    host.drop(KEYS[:4])
    write(storage, host, KEYS[:8])
    assert backend.num_puts == 8 == storage.counters.written_pages
    again = storage_of(backend, FakeHost(rank_shape()))
    assert read_back(again, again._host, KEYS[:8]) == 8  # publishes: they are stored in host memory
    wait_until(lambda: not again.num_queued_writes)
    assert backend.num_puts == 8 and again.counters.written_pages == 0
    again.close()


@pytest.mark.parametrize("finds_out", [query, None])
def test_pages_that_others_have_removed_are_written_again(backend, host, storage, finds_out):
    """At once, though all were written lately: a search, or a read, has not found some of them."""
    write(storage, host, KEYS)
    for key in KEYS[5:30:3]:
        del backend.objects[storage._objects.name(key, host.shape.own)]
    host.drop(KEYS)
    assert (query(storage, KEYS) if finds_out else read_back(storage, host, KEYS)) == 5
    if finds_out is None:
        host.drop(KEYS[:5])
    write(storage, host, KEYS)
    assert query(storage, KEYS) == 40


def test_pages_of_swapped_out_requests_are_not_written(backend, host, storage):
    host.publish([b"\1" * 16], host.reserve(1))
    assert not storage.num_queued_writes


def test_what_the_queue_cannot_take_is_dropped_and_what_has_left_host_memory_is_lost(backend, host):
    storage = storage_of(backend, host, max_queued_pages=10, num_writers=1)
    backend.gate.clear()
    host.add([key_of(100)])
    wait_until(lambda: not storage._queue)  # the writer has it, and waits for the backend
    host.add(KEYS[:12])
    assert storage.counters.dropped == 2 and storage.num_queued_writes == 11
    host.drop(KEYS[:3])
    assert storage.counters.lost == 3
    backend.gate.set()
    wait_until(lambda: not storage.num_queued_writes)
    assert len(backend.objects) == 8
    backend.gate.clear()
    host.add([key_of(101)])
    wait_until(lambda: not storage._queue)
    host.add(KEYS[20:25])
    for listener in host.listeners:
        listener.cleared()
    backend.gate.set()
    wait_until(lambda: not storage.num_queued_writes)
    assert len(backend.objects) == 9
    storage.close()


@pytest.mark.parametrize("writers, readers", [(1, 2), (2, 1), (1, 4), (4, 1), (2, 4), (4, 2), (1, 16)])
def test_ranks_of_any_size_read_the_same_objects(backend, writers, readers):
    for rank in range(writers):
        host = FakeHost(rank_shape(rank, writers))
        storage = storage_of(backend, host)
        write(storage, host, KEYS)
        storage.close()
    for rank in range(readers):
        host = FakeHost(rank_shape(rank, readers))
        storage = storage_of(backend, host)
        assert query(storage, [*KEYS, key_of(99)]) == 40
        assert read_back(storage, host, [*KEYS, key_of(99)]) == 40
        storage.close()


def test_a_prompt_may_lie_in_objects_of_several_sizes(backend):
    for size, keys in ((1, KEYS[:7]), (2, KEYS[7:20]), (4, KEYS[20:])):
        for rank in range(size):
            host = FakeHost(rank_shape(rank, size))
            storage = storage_of(backend, host)
            write(storage, host, keys)
            storage.close()
    host = FakeHost(rank_shape(1, 2))
    storage = storage_of(backend, host)
    assert query(storage, KEYS) == 40 and read_back(storage, host, KEYS) == 40
    del backend.objects[storage._objects.name(KEYS[30], rank_shape(2, 4).own)]
    assert query(storage, KEYS) == 30
    assert read_back(storage, host, KEYS[28:32]) == 2
    storage.close()


def wait_for_readers(storage):
    """Wait until a storage with one reader has done what it was given."""
    done = threading.Event()
    storage._readers.submit(done.set)
    assert done.wait(10)


def broken(backend, how):
    """Makes one object one that must not be used."""
    for name in backend.objects:
        if name.startswith(KEYS[5].hex()):
            data = backend.objects[name]
            if how == "corrupt":
                data[HEADER_BYTES + 9] ^= 4
            elif how == "corrupt header":
                data[20] ^= 1
            elif how == "truncated":
                backend.objects[name] = data[:-4096]
            else:
                backend.objects[name] = backend.objects[name.replace(KEYS[5].hex(), KEYS[6].hex())].copy()
            return
    raise AssertionError("no such object")


@pytest.mark.parametrize("how, error", [("corrupt", "corrupt"), ("corrupt header", "corrupt"), ("truncated", None),
                                        ("of another page", "foreign")])
def test_a_damaged_object_ends_the_read_and_is_written_anew(backend, host, storage, how, error):
    write(storage, host, KEYS[:10])
    broken(backend, how)
    reader_host = FakeHost(rank_shape())
    reader = storage_of(backend, reader_host)
    assert read_back(reader, reader_host, KEYS[:10]) == 5
    assert {kind: count for kind, count in reader.counters.errors.items() if count} == ({error: 1} if error else {})
    assert reader.healthy
    write(reader, reader_host, [KEYS[5]])
    assert query(reader, KEYS[:10]) == 10
    reader.close()


def test_objects_of_another_model_are_not_found(backend, host, storage):
    write(storage, host, KEYS[:4])
    other = storage_of(backend, FakeHost(rank_shape()), digest="f" * 32)
    assert query(other, KEYS[:4]) == 0 == read_back(other, other._host, KEYS[:4])
    for name in list(backend.objects):  # an object under a name that it does not have
        backend.objects[name.replace(DIGEST, "f" * 32)] = backend.objects[name]
    assert query(other, KEYS[:4]) == 4 and read_back(other, other._host, KEYS[:4]) == 0
    assert other.counters.errors["foreign"] >= 1
    other.close()


def test_an_object_whose_checksum_is_not_known_here_is_left_to_others(backend, host, storage):
    write(storage, host, KEYS[:2])
    reader = storage_of(backend, FakeHost(rank_shape()))
    reader._objects._checksums = {1: reader._objects._checksums[1]}  # without xxhash
    assert read_back(reader, reader._host, KEYS[:2]) == 0 and reader.counters.errors["foreign"] >= 1
    reader.close()
    assert len(backend.objects) == 2


def test_a_backend_that_was_killed_is_put_aside_and_tried_again(backend, host, caplog):
    now = [0.0]
    storage = storage_of(backend, host, clock=lambda: now[0])
    write(storage, host, KEYS[:8])
    backend.fails = True
    with caplog.at_level(logging.INFO):
        assert read_back(storage, host, KEYS[:8]) == 0
        assert not storage.healthy and storage.counters.errors["read"] >= 1
        started = time.monotonic()
        assert storage.query(KEYS).done and storage.read(KEYS[:8], np.arange(8)).done
        assert time.monotonic() - started < 0.1
        now[0] += 2
        assert query(storage, KEYS[:8]) == 0
        assert not storage.healthy
        backend.fails = False
        now[0] += 1.5
        assert not storage.healthy  # the second time it waits longer
        now[0] += 1
        assert query(storage, KEYS[:8]) == 8 and read_back(storage, host, KEYS[:8]) == 8
    lines = [record.message for record in caplog.records if "put aside" in record.message]
    assert len(lines) == 1 and "it was killed" in lines[0]
    assert any("again" in record.message for record in caplog.records if record.levelno == logging.INFO)
    storage.close()


@pytest.mark.parametrize("what", ["query", "read"])
def test_a_backend_that_hangs_is_not_waited_for(backend, host, what):
    storage = storage_of(backend, host, stall_seconds=0.02, num_readers=1)
    write(storage, host, KEYS[:8])
    backend.gate.clear()
    slots = host.reserve(8)
    operation = storage.query(KEYS[:8]) if what == "query" else storage.read(KEYS[:8], slots)
    wait_until(lambda: operation.done, 0.5)
    assert not storage.healthy and (operation.count if what == "query" else operation.num_pages) == 0
    before = [group[slots].copy() for group in host.memory]
    backend.gate.set()  # what it reads now is of no use: the slots may be somebody else's
    wait_for_readers(storage)
    assert all((group[slots] == old).all() for group, old in zip(host.memory, before))
    storage.close()


def test_a_slow_backend_gives_what_came_and_nothing_after_cancel(backend, host):
    storage = storage_of(backend, host, num_readers=1)
    storage.__class__ = type("OnePageAtATime", (Storage,), {"_batch_pages": 1})
    write(storage, host, KEYS[:20])
    slots = host.reserve(20)
    for group in host.memory:
        group[slots] = 0
    steps = threading.Semaphore(3)
    backend.gate.wait = steps.acquire  # type: ignore[method-assign]
    read = storage.read(KEYS[:20], slots)
    wait_until(lambda: read.num_pages == 3)
    assert not read.done
    read.cancel()
    assert read.done and read.num_pages == 3
    steps.release(100)
    wait_for_readers(storage)
    assert read.num_pages == 3
    assert all((host.bytes_of(slot) == content(host.shape, key)).all() for key, slot in zip(KEYS, slots[:3]))
    assert not any(group[slots[3:]].any() for group in host.memory)
    storage.close()


def test_cancel_waits_for_the_page_that_is_being_copied(backend, host, storage):
    write(storage, host, KEYS[:1])
    copying, go_on = threading.Event(), threading.Event()
    unpack = storage._objects.shape.unpack

    class Slow(type(storage._objects.shape)):  # type: ignore[misc]
        def unpack(self, *args):
            copying.set()
            go_on.wait()
            unpack(*args)

    shape = storage._objects.shape
    storage._objects.shape = Slow(shape.pools, shape.layers, shape.tp_rank, shape.tp_size)
    read = storage.read(KEYS[:1], host.reserve(1))
    assert copying.wait(5) and not read.done
    cancelling = threading.Thread(target=read.cancel)
    cancelling.start()
    cancelling.join(0.05)
    assert cancelling.is_alive() and not read.done
    go_on.set()
    cancelling.join(5)
    assert read.done and read.num_pages == 0


def test_a_full_store_stops_writes_and_not_reads(backend, host, storage, caplog):
    write(storage, host, KEYS[:4])
    backend.is_full = True
    with caplog.at_level(logging.WARNING):
        write(storage, host, KEYS[4:8])
    assert storage.healthy and storage._writes.is_aside and "it is full" in caplog.text
    assert read_back(storage, host, KEYS[:8]) == 4
    assert storage.counters.times_aside == 1 and storage.counters.errors["write"] == 1


def test_a_failed_write_is_not_counted_and_does_not_stop_the_server(backend, host, storage):
    backend.fails = True
    write(storage, host, KEYS[:4])
    assert storage.counters.written_pages == 0 and not backend.objects and storage.counters.errors["write"] == 1
    assert storage.healthy


def test_clear_removes_everything_and_pages_are_written_again(backend, host, storage):
    write(storage, host, KEYS[:4])
    storage.clear().result(5)
    assert not backend.objects and query(storage, KEYS[:4]) == 0
    host.drop(KEYS[:4])
    write(storage, host, KEYS[:4])
    assert query(storage, KEYS[:4]) == 4
    backend.fails = True
    with pytest.raises(Exception, match="killed"):
        storage.clear().result(5)


def test_it_is_attached_and_detached_while_the_server_runs(backend, host):
    before = set(threading.enumerate())
    host.add(KEYS[:4])  # before there was a storage
    storage = storage_of(backend, host)
    host.add(KEYS[4:8])
    storage.close(drain_seconds=5)
    assert backend.closed and not host.listeners and len(backend.objects) == 4
    assert set(threading.enumerate()) == before
    assert storage.query(KEYS).done and storage.read(KEYS[:1], np.zeros(1, np.int64)).done
    host.add(KEYS[8:9])
    assert len(backend.objects) == 4


def test_closing_ends_what_is_under_way_also_where_the_backend_hangs(backend, host, caplog):
    storage = storage_of(backend, host, num_readers=1, num_writers=1)
    write(storage, host, KEYS[:4])
    backend.gate.clear()
    read, search = storage.read(KEYS[:4], host.reserve(4)), storage.query(KEYS)
    wait_until(lambda: storage._reads._calls)
    storage.close()
    assert read.done and search.done and not backend.closed
    assert "does not answer" in caplog.text
    backend.gate.set()


def test_rates_count_the_time_in_which_something_was_copied():
    now = [0.0]
    rate = Rate(lambda: now[0])
    assert rate.value == 0
    with rate.measure() as first:
        now[0] += 1
        with rate.measure() as second:  # two at once: the link's rate, not each thread's
            now[0] += 1
            second.num_bytes = 100
        first.num_bytes = 300
    assert rate.value == 200
    now[0] += 1000
    assert rate.value == 200
    for _ in range(50):
        with rate.measure() as each:
            now[0] += 1
            each.num_bytes = 16 << 20
    assert rate.value == pytest.approx(16 << 20, rel=0.05)


def test_a_call_may_take_as_long_as_its_bytes_should():
    now = [0.0]
    health = Health("test", "reads", lambda: now[0], 0.1)
    assert health._limit(1 << 30) == 0.1  # nothing is known yet
    with health.rate.measure() as measured, health.call(100 << 20):
        now[0] += 1
        measured.num_bytes = 100 << 20
    assert health._limit(1) == 0.1 and health._limit(100 << 20) == pytest.approx(8)
    with health.call(1):
        now[0] += 0.05
        assert not health.is_aside
        now[0] += 0.1
        assert health.is_aside and health.is_aside
    assert health.is_aside and health.times_aside == 1  # it came, too late
    now[0] += 1
    assert not health.is_aside


def test_a_backend_that_soon_fails_again_is_put_aside_longer(caplog):
    now = [0.0]
    health = Health("test", "writes", lambda: now[0], 0.1)
    for seconds in (1, 2, 4):
        health.failed("it is full")
        now[0] += seconds - 0.1
        assert health.is_aside
        now[0] += 0.2
        with health.call(shows_health=False):
            assert not health.is_aside
    def warnings() -> int:
        return sum(record.levelname == "WARNING" for record in caplog.records)

    assert warnings() == 1, "it has not worked since"
    with health.call():
        now[0] += 0.01
    health.failed("it is full")
    now[0] += 7
    assert health.is_aside and warnings() == 2
    now[0] += 2
    with health.call():
        now[0] += 0.01
    now[0] += 100
    health.failed("it is full")
    now[0] += 1.1
    assert not health.is_aside


def test_random_operations_never_give_a_wrong_page():
    rng = random.Random(5)
    shared: dict[str, np.ndarray] = {}
    sizes = [1, 2, 4]
    servers = []
    for size in sizes:
        for rank in range(size):
            host = FakeHost(rank_shape(rank, size), 48)
            backend = MemoryBackend(shared)
            servers.append((backend, host, storage_of(  # a thousand times as fast: one that failed is tried again soon
                backend, host, num_readers=2, num_writers=1, stall_seconds=5e3,
                clock=lambda: 1e3 * time.monotonic())))
    keys = [key_of(i) for i in range(24)]
    open_reads: list[tuple] = []

    def settle(host, read, slots):
        if rng.random() < 0.3:
            read.cancel()
        wait_until(lambda: read.done)
        count, before = read.num_pages, [host.bytes_of(slot) for slot in slots[read.num_pages:]]
        for key, slot in zip(read.keys[:count], slots):
            assert (host.bytes_of(slot) == content(host.shape, key)).all()
        new = [i for i in range(count) if read.keys[i] not in host.slot_of]
        host.publish([read.keys[i] for i in new], slots[new])
        host.unreserve(np.array([slot for i, slot in enumerate(slots.tolist()) if i not in new], np.int64))
        assert all((host.bytes_of(slot) == old).all() for slot, old in zip(slots[count:], before))

    for _ in range(3000):
        backend, host, storage = rng.choice(servers)
        first = rng.randrange(len(keys))
        some = keys[first:first + rng.randrange(1, 9)]
        match rng.randrange(8):
            case 0:
                new = [key for key in some if key not in host.slot_of]
                if len(new) <= len(host.free):
                    host.add(new)
            case 1:
                host.drop([key for key in some if key in host.slot_of])
            case 2 | 3:
                if (slots := host.reserve(len(some))) is not None:
                    open_reads.append((host, storage.read(some, slots), slots))
            case 4:
                assert query(storage, some) <= len(some)
            case 5 if shared and rng.random() < 0.3:
                name = rng.choice(list(shared))
                data = shared.get(name)
                if data is not None:
                    shared[name] = data[:-4096] if rng.random() < 0.3 else data ^ np.uint8(rng.random() < 0.5)
            case 6 if rng.random() < 0.02:
                storage.clear().exception(5)
            case _:
                backend.fails = rng.random() < 0.1
        while len(open_reads) > 4:
            settle(*open_reads.pop(0))
    for each in open_reads:
        settle(*each)
    for kind in ("corrupt", "read", "write", "query"):
        assert sum(storage.counters.errors[kind] for *_, storage in servers) > 0
    assert sum(storage.counters.read_pages for *_, storage in servers) > 500
    for _, host, storage in servers:
        assert len(host.free) + len(host.slot_of) == 48
        storage.close(drain_seconds=0.5)
