"""The host tier against a dict, with copies that the device makes late, on another stream than its steps."""

from __future__ import annotations

import math
import threading
import time

import numpy as np
import pytest

from baton.common.api.errors import ConfigError
from baton.common.kvcache.layout import KVLayout
from baton.common.kvcache.pool import KVPool
from baton.common.kvcache.tiers.base import TierContext
from baton.common.kvcache.tiers.host import HostTier
from baton.common.kvcache.tiers.page_copies import runs
from baton.common.kvcache.tiers.slot_memory import OutOfHostMemory, SlotMemory
from baton.tests.helpers.late_copies import LateCopies

NUM_PAGES = 24
SLOTS = 10


def a_pool(num_pages=NUM_PAGES) -> KVPool:
    return KVPool(KVLayout(num_kv_heads=1, head_dim=4, page_size=2, dtype="float32", groups=(1, 2)), num_pages, "cpu")


def a_tier(slots=SLOTS, late=True, **context) -> tuple[HostTier, KVPool, LateCopies | None]:
    pool, made = a_pool(), []
    context = TierContext(pool, slots * pool.layout.page_bytes, "--hicache-size", **context)

    def copies(memory):
        made.append(LateCopies(context, memory))
        return made[0]

    tier = HostTier(context, copies if late else None)
    return tier, pool, made[0] if late else None


def fill(pool: KVPool, page: int, value: float) -> None:
    for group in pool.groups:
        group[page] = value


def value_of(pool: KVPool, page: int) -> float:
    values = {float(group[page].min()) for group in pool.groups} | {float(group[page].max()) for group in pool.groups}
    assert len(values) == 1, "a page is torn"
    return values.pop()


def key(name: object) -> bytes:
    return str(name).encode()


def keys(*names: object) -> list[bytes]:
    return [key(name) for name in names]


class Heard:
    def __init__(self):
        self.events = []

    def stored(self, keys):
        self.events.append(("stored", list(keys)))

    def dropped(self, keys):
        self.events.append(("dropped", list(keys)))

    def cleared(self):
        self.events.append("cleared")


def test_pages_come_back():
    tier, pool, device = a_tier()
    for page in range(4):
        fill(pool, page, page + 1)
    task = tier.store(keys("a", "b", "c"), np.array([0, 3, 1]))
    assert tier.lookup(keys("a", "b", "c", "d")) == 3 == task.num_pages and not task.done and not device.launched
    tier.flush()
    assert not task.done and len(device.launched) == 1
    device.run()
    assert task.done
    load = tier.load(keys("a", "b", "c", "d"), np.array([10, 11, 12, 13]))
    assert load.num_pages == 3 and not load.done
    device.run()
    assert load.done and [value_of(pool, page) for page in (10, 11, 12)] == [1, 4, 2]
    tier.finish(load)
    tier.check_integrity()


def test_a_load_follows_a_store_that_is_queued():
    tier, pool, device = a_tier()
    fill(pool, 0, 7)
    tier.store(keys("a"), np.array([0]))
    load = tier.load(keys("a"), np.array([5]))
    load.wait()
    assert value_of(pool, 5) == 7 and len(device.launched) == 0


def test_an_evicted_page_may_be_overwritten_once_the_stream_has_waited():
    tier, pool, device = a_tier()
    fill(pool, 0, 7)
    task = tier.store(keys("a"), np.array([0]))
    task.wait_on_device()  # begins the copy
    fill(pool, 0, 8)
    load = tier.load(keys("a"), np.array([1]))
    load.wait()
    assert value_of(pool, 1) == 7 and task.done


def test_a_second_store_of_a_key_covers_the_first_in_flight():
    tier, pool, _ = a_tier()
    tier.store(keys("a"), np.array([0]))
    tier.flush()
    again = tier.store(keys("a", "b"), np.array([0, 1]))
    assert tier.counters.stored == 2 and not again.done
    again.wait()
    assert again.done


def test_pinned_pages_and_those_of_loads_stay():
    tier, _, device = a_tier(slots=3)
    tier.store(keys("a", "b", "c"), np.arange(3))
    tier.pin(keys("a"))
    load = tier.load(keys("b"), np.array([4]))
    assert tier.store(keys("d", "e", "f"), np.arange(5, 8)).num_pages == 1
    assert [tier.lookup(keys(name)) for name in "abcdef"] == [1, 1, 0, 1, 0, 0]
    assert tier.reserve(2) is None and tier.lookup(keys("d")) == 1
    device.run()
    tier.finish(load)
    tier.unpin(keys("a"))
    assert len(tier.reserve(3)) == 3 and tier.num_pages == 0
    tier.check_integrity()


def test_the_end_of_a_prefix_goes_first():
    tier, _, _ = a_tier(slots=4)
    tier.store(keys("a", "b", "c", "d"), np.arange(4))
    tier.store(keys("x"), np.array([5]))
    assert tier.lookup(keys("a", "b", "c", "d")) == 3
    tier.load(keys("a", "b", "c"), np.arange(6, 9))
    tier.store(keys("y"), np.array([5]))
    assert tier.lookup(keys("a", "b", "c")) == 3 and not tier.lookup(keys("x"))


def test_a_storage_fills_slots():
    tier, pool, device = a_tier(slots=4)
    heard = Heard()
    tier.listeners.append(heard)
    slots = tier.reserve(3)
    for slot, value in zip(slots, (5.0, 6.0, 7.0)):
        for view in tier.slot_views(int(slot)):
            view.view(np.float32)[:] = value
    assert not tier.lookup(keys("a"))
    tier.unreserve(slots[2:])
    tier.publish(keys("a", "b"), slots[:2])
    assert heard.events == [("stored", keys("a", "b"))]
    into = np.zeros(tier.page_bytes, np.uint8)
    assert tier.read_slot(key("b"), into) and (into.view(np.float32) == 6).all()
    load = tier.load(keys("a", "b"), np.array([1, 2]))
    load.wait()
    assert [value_of(pool, page) for page in (1, 2)] == [5, 6]
    tier.finish(load)
    again = tier.reserve(1)
    tier.publish(keys("a"), again)  # is there already
    assert tier.num_pages == 2
    tier.check_integrity()
    late = tier.reserve(1)
    tier.clear()
    tier.publish(keys("c"), late)
    assert not tier.lookup(keys("c")) and tier.num_pages == 0 and heard.events[-1] == "cleared"
    tier.check_integrity()


def test_slots_of_copies_in_flight_are_waited_for_before_a_storage_writes():
    tier, pool, device = a_tier(slots=1)
    fill(pool, 0, 3)
    tier.store(keys("a"), np.array([0]))
    load = tier.load(keys("a"), np.array([1]))
    tier.finish(load)
    [slot] = tier.reserve(1)
    for view in tier.slot_views(int(slot)):
        view[:] = 0
    assert value_of(pool, 1) == 3 and load.done


def test_a_dropped_page_that_is_queued_is_not_copied():
    tier, pool, device = a_tier(slots=1)
    heard = Heard()
    tier.listeners.append(heard)
    fill(pool, 0, 3)
    fill(pool, 1, 4)
    first = tier.store(keys("a"), np.array([0]))
    tier.store(keys("b"), np.array([1]))
    tier.flush()
    device.run()
    tier.poll()
    assert first.done and heard.events == [("dropped", keys("a")), ("stored", keys("b"))]
    into = np.zeros(tier.page_bytes, np.uint8)
    assert not tier.read_slot(key("a"), into)
    assert tier.read_slot(key("b"), into) and (into.view(np.float32) == 4).all()


def test_an_incomplete_page_is_not_read():
    tier, pool, device = a_tier()
    into = np.zeros(tier.page_bytes, np.uint8)
    tier.store(keys("a"), np.array([0]))
    assert not tier.read_slot(key("a"), into)
    tier.flush()
    assert not tier.read_slot(key("a"), into)
    device.run()
    assert tier.read_slot(key("a"), into)


def test_a_page_that_is_evicted_while_it_is_read_is_not_used(monkeypatch):
    tier, pool, _ = a_tier(late=False, slots=1)
    tier.store(keys("a"), np.array([0]))
    tier.flush()

    class Evicting(np.ndarray):
        def __setitem__(self, where, value):
            tier.store(keys("b"), np.array([1]))

    assert not tier.read_slot(key("a"), np.zeros(tier.page_bytes, np.uint8).view(Evicting))


def test_a_step_that_computes_long_enough_hides_the_rest_of_a_load():
    tier, _, device = a_tier()
    tier.store(keys("a"), np.array([0]))
    tier.flush()
    device.run()
    tier.link_rate = tier.page_bytes / 1.0  # a second for the page, of two groups
    assert not tier.load(keys("a"), np.array([1])).done
    device.run()
    tier.poll()
    short, long = (tier.load(keys("a"), np.array([page]), seconds) for page, seconds in ((2, 0.9), (3, 5.0)))
    assert not short.done and not long.done  # before the first group is there
    device.run_group()
    assert not short.done
    device.run_group()
    assert short.done and not long.done
    tier.poll()
    device.run_group()
    assert long.done and not long.copy.complete
    tier.finish(short)
    tier.finish(long)
    assert tier.take_step_loads() == [long.copy] and tier.take_step_loads() == []


@pytest.mark.parametrize("seed", range(4))
def test_random_operations_against_a_dict(seed):
    """Pages have values by key; the device overwrites what it may, copies end late, and each load has what was stored.
    """
    rng = np.random.default_rng(seed)
    tier, pool, device = a_tier()
    known: dict[bytes, float] = {}  # what a key's page holds, whenever it is there
    heard = Heard()
    tier.listeners.append(heard)
    loads, reserved = [], []
    for _ in range(1500):
        some = keys(*rng.choice(30, rng.integers(1, 5), replace=False))
        match rng.integers(0, 9):
            case 0 | 1:
                pages = rng.choice(12, len(some), replace=False)
                for name, page in zip(some, pages):
                    known.setdefault(name, float(name) + 1)
                    fill(pool, page, known[name])
                task = tier.store(some, pages)
                assert tier.lookup(some) >= task.num_pages
                if rng.integers(2):
                    task.wait_on_device()
                else:
                    task.wait()
                for page in pages:
                    fill(pool, page, -1.0)  # the next owner
            case 2 | 3:
                if not loads:
                    pages = 12 + rng.choice(12, len(some), replace=False)
                    loads.append((some, pages, tier.load(some, pages)))
            case 4:
                for names, pages, task in loads:
                    task.wait()
                    assert [value_of(pool, page) for page in pages[:task.num_pages]] == [
                        known[name] for name in names[:task.num_pages]]
                    tier.finish(task)
                loads.clear()
            case 5:
                if (slots := tier.reserve(2)) is not None:
                    reserved.append((some[:2], slots[:len(some[:2])]))
                    tier.unreserve(slots[len(some[:2]):])
            case 6:
                for names, slots in reserved:
                    for name, slot in zip(names, slots.tolist()):
                        known.setdefault(name, float(name) + 1)
                        for view in tier.slot_views(slot):
                            view.view(np.float32)[:] = known[name]
                    tier.publish(names, slots)
                reserved.clear()
            case 7:
                tier.flush()
                device.run_some(rng)
                tier.poll()
            case 8:
                into = np.zeros(tier.page_bytes, np.uint8)
                if tier.read_slot(some[0], into):
                    assert (into.view(np.float32) == known[some[0]]).all()
                if rng.integers(100) == 0:
                    tier.clear()
        tier.check_integrity()
    for _, _, task in loads:
        task.wait()
        tier.finish(task)
    device.run()
    tier.poll()
    there: set[bytes] = set()
    for event in heard.events:
        if event == "cleared":
            there.clear()
        elif event[0] == "stored":
            there |= set(event[1])
        else:
            there -= set(event[1])
    tier.flush()
    kept = [name for name in known if tier.lookup([name])]
    assert there == {name for name in kept if not tier.is_queued(tier.slots_of([name]))}


class Host:
    """Memory that can be pinned up to a limit."""

    def __init__(self, limit: int):
        self.limit, self.pinned = limit, {}

    def pin(self, address: int, num_bytes: int) -> bool:
        if sum(self.pinned.values()) + num_bytes > self.limit:
            return False
        self.pinned[address] = num_bytes
        return True

    def unpin(self, address: int) -> None:
        del self.pinned[address]


def make_memory(host: Host, **options) -> SlotMemory:
    return SlotMemory([4096, 8192], 10, pin=host.pin, unpin=host.unpin, chunk_bytes=2 * 12288,
                      num_free_bytes=lambda: 1 << 40, **options)


def test_memory_is_pinned_in_the_background():
    entered, go = threading.Event(), threading.Event()
    host = Host(1 << 30)

    def slow_pin(address, num_bytes):
        if len(host.pinned) == 2:
            entered.set()
            assert go.wait(10)
        return host.pin(address, num_bytes)

    memory = SlotMemory([4096, 8192], 10, pin=slow_pin, unpin=host.unpin, in_background=True, chunk_bytes=2 * 12288,
                        num_free_bytes=lambda: 1 << 40)
    assert entered.wait(10) and memory.num_allocated == 2
    go.set()
    memory._thread.join(10)
    assert memory.num_allocated == 10 and sum(host.pinned.values()) == 10 * 12288
    memory.close()
    del memory
    assert not host.pinned


def test_pinning_is_slow_while_steps_are_made():
    host = Host(1 << 30)

    def slow_pin(address, num_bytes):
        time.sleep(0.01)
        return host.pin(address, num_bytes)

    memory = SlotMemory([4096, 8192], 10, pin=slow_pin, unpin=host.unpin, in_background=True, chunk_bytes=2 * 12288,
                        num_free_bytes=lambda: 1 << 40)
    memory.last_step = math.inf
    began = time.monotonic()
    memory._thread.join(10)
    assert memory.num_allocated == 10 and time.monotonic() - began > 0.5, "it waits 0.18 s after each of 3 chunks"


def test_memory_ends_where_no_more_can_be_pinned(caplog):
    host = Host(5 * 12288)
    memory = make_memory(host, in_background=True)
    memory._thread.join(10)
    assert memory.num_allocated == 4 and sum(host.pinned.values()) == 4 * 12288
    assert "ends at 4 of 10 pages" in caplog.text
    with pytest.raises(OutOfHostMemory, match="cannot be pinned"):
        make_memory(Host(5 * 12288))
    with pytest.raises(OutOfHostMemory, match="the host has no"):
        SlotMemory([4096], 4, num_free_bytes=lambda: 1000)


def test_a_tier_needs_a_page():
    tier, _, _ = a_tier(slots=8)
    assert tier.capacity == tier.num_allocated == 8
    with pytest.raises(ConfigError, match="holds no page"):
        a_tier(slots=0)


def test_a_tier_grows(monkeypatch):
    monkeypatch.setattr("baton.common.kvcache.tiers.host.SlotMemory", Growing)
    tier, _, device = a_tier(slots=8)
    assert tier.capacity == 3
    assert tier.store(keys(*range(5)), np.arange(5)).num_pages == 3
    tier.memory.num_allocated = 8
    assert tier.capacity == 3
    tier.grow(6)
    assert tier.store(keys(*range(8)), np.arange(8)).num_pages == 6
    tier.check_integrity()


class Growing(SlotMemory):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.num_allocated = 3


def test_runs_end_with_chunks():
    slots, pages = np.array([0, 1, 2, 3, 7, 8]), np.array([4, 5, 6, 7, 8, 1])
    assert list(zip(*runs(slots, pages, slots // 3))) == [(0, 4, 3), (3, 7, 1), (7, 8, 1), (8, 1, 1)]
    assert not len(runs(slots[:0], pages[:0], slots[:0]).counts)


def test_draft_pages_are_part_of_a_page():
    pool, draft = a_pool(), a_pool()
    tier = HostTier(TierContext(pool, 4 * 2 * pool.layout.page_bytes, "--hicache-size", draft))
    fill(pool, 0, 1)
    fill(draft, 0, 2)
    tier.store(keys("a"), np.array([0]))
    tier.flush()
    tier.load(keys("a"), np.array([5])).wait()
    assert (value_of(pool, 5), value_of(draft, 5)) == (1, 2)
    assert [len(view) for view in tier.slot_views(3)] == [
        group[0].nbytes for group in (*pool.groups, *draft.groups)]
