"""Host memory as a KV tier: pages make room for new ones in the order of an eviction policy."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from ...api.errors import ConfigError
from ...config.server.tiers import KV_TIERS
from ..allocator import PageAllocator
from ..cache_group import ABSENT
from ..page_keys import PageKey
from .base import HostListener, TierContext, TierCounters, TierTask
from .evictable_keys import evictable_keys
from .page_copies import IO_BACKENDS, Copy, HostPageCopies, PageCopies
from .shared_pages import SharedPageCopies
from .slot_memory import OutOfHostMemory, SlotMemory

_MIN_MEASURED_BYTES = 8 << 20
_NEWEST_RATE_WEIGHT = 0.3  # in the moving average
_POLL_SECONDS = 5e-4


class InFlight:
    """Copies of one direction, which end in the order in which they began, by the slots and pages that they use."""

    def __init__(self, num_slots: int, num_pages: int):
        self._of_slot = np.zeros(num_slots, np.int64)  # the number of the last copy, from 1 on
        self._of_page = np.zeros(num_pages, np.int64)
        self._copies: dict[int, Copy] = {}
        self._last = 0

    def __iter__(self) -> Iterator[Copy]:
        return iter(list(self._copies.values()))

    def add(self, copy: Copy, slots: np.ndarray, page_ids: np.ndarray) -> None:
        self._last += 1
        self._copies[self._last] = copy
        self._of_slot[slots] = self._of_page[page_ids] = self._last

    def of_slots(self, slots: np.ndarray) -> Copy | None:
        """The last incomplete copy from or to ``slots``. Any thread."""
        return self._incomplete(self._of_slot[slots])

    def of_pages(self, page_ids: np.ndarray) -> Copy | None:
        return self._incomplete(self._of_page[page_ids])

    def pop_complete(self) -> Iterator[Copy]:
        """Yields copies that have become complete, in order."""
        for number, copy in list(self._copies.items()):
            if not copy.complete:
                return
            del self._copies[number]
            yield copy

    def _incomplete(self, numbers: np.ndarray) -> Copy | None:
        copy = self._copies.get(int(numbers.max(initial=0)))
        return None if copy is None or copy.complete else copy


@dataclass(frozen=True)
class _Contents:
    """Keys, their slots [n], and what ``generation`` their slots had then: other numbers now, and a page has left."""

    keys: Sequence[PageKey]
    slots: np.ndarray
    generations: np.ndarray

    def present(self, generation: np.ndarray) -> np.ndarray:
        """[n] bool: which pages are still in their slots."""
        found: np.ndarray = generation[self.slots] == self.generations
        return found

    def keys_of(self, chosen: np.ndarray) -> list[PageKey]:
        """The keys of ``chosen`` [n] bool."""
        return list(self.keys) if chosen.all() else [key for key, is_one in zip(self.keys, chosen.tolist()) if is_one]


class StoreTask:
    """A store, queued or in flight, of pages whose slots were ``slots``. Later content of a slot delays it, no more."""

    def __init__(self, tier: HostTier, num_pages: int, slots: np.ndarray):
        self.num_pages = num_pages
        self._tier: HostTier | None = tier
        self._slots = slots

    @property
    def done(self) -> bool:
        if self._tier is not None and not self._tier.is_queued(self._slots) and (
                self._tier.stores.of_slots(self._slots) is None):
            self._tier = None
        return self._tier is None

    def wait(self) -> None:
        if (copy := self._launched()) is not None:
            copy.synchronize()

    def wait_on_device(self, group: int | None = None) -> None:
        if (copy := self._launched()) is not None:
            copy.wait_on_device()

    def _launched(self) -> Copy | None:
        if self._tier is None:
            return None
        if self._tier.is_queued(self._slots):
            self._tier.flush()
        return self._tier.stores.of_slots(self._slots)


class LoadTask:
    """A load that was launched; done once the rest of it is hidden by ``compute_seconds`` of the step that reads it."""

    def __init__(self, tier: HostTier, keys: Sequence[PageKey], copy: Copy | None, compute_seconds: float):
        self.num_pages = len(keys)
        self.keys = keys
        self.copy = copy
        self.slots = tier.slots_of(keys)
        self._tier = tier
        self._compute_seconds = compute_seconds
        self._done = False

    @property
    def done(self) -> bool:
        self._done = (self._done or self.copy is None or self.copy.complete
                      or self._tier.is_hidden(self.copy, self._compute_seconds))
        return self._done

    def wait(self) -> None:
        if self.copy is not None:
            self.copy.synchronize()

    def wait_on_device(self, group: int | None = None) -> None:
        if self.copy is not None:
            self.copy.wait_on_device(group)


@KV_TIERS.register("host")
class HostTier:
    """Slots for as many pages as fit into the context's bytes; see base.py for what its calls guarantee.

    A copy waits on the device for the copies in flight with the same slots or pages, so that a slot may change hands,
    and a page be evicted, while the device still reads it. With a ``share`` in the context the slots are those of all
    its ranks (shared_pages.py); a storage fills and reads them on the first one.
    """

    def __init__(self, context: TierContext, make_copies: Callable[[SlotMemory], PageCopies] | None = None):
        """Raises ConfigError where the host lacks this memory, or no page fits into it. ``make_copies``: by default
        those of the pool's device."""
        groups = context.groups
        sizes = [group[0].nbytes for group in groups]
        on_gpu = groups[0].is_cuda
        self.counters = TierCounters()
        self.listeners: list[HostListener] = []
        self.page_bytes = sum(sizes)
        count, gigabytes = context.num_bytes // self.page_bytes, context.num_bytes / 2**30
        if not count:
            raise ConfigError(f"{context.flag} {gigabytes:g} holds no page of {self.page_bytes} bytes; raise it, or "
                              "leave it out.")
        try:
            pin, unpin = partial(_pin, groups[0].device), partial(_unpin, groups[0].device)
            self.memory = SlotMemory(sizes, count, pin=pin if on_gpu else None, unpin=unpin if on_gpu else None,
                                     in_background=context.in_background,
                                     shared=None if context.share is None else context.share.memory)
        except OutOfHostMemory as problem:
            raise ConfigError(f"The host has no {gigabytes:g} GiB for {context.flag} ({problem}); lower it.") from None
        if make_copies is not None:
            self._copies = make_copies(self.memory)
        elif on_gpu:
            self._copies = IO_BACKENDS[context.io_backend](context, self.memory)
        else:
            self._copies = HostPageCopies(context, self.memory)
        self._shared: SharedPageCopies | None = None
        if context.share is not None:
            self._copies = self._shared = SharedPageCopies(self._copies, context.share, self.page_bytes)
        sizes = [pool.num_pages for pool in (context.pool, *context.further)]
        self._first_number = np.cumsum([0, *sizes[:-1]])[:, None]
        self.loads, self.stores = (InFlight(count, sum(sizes)) for _ in range(2))
        self.num_clears = 0
        self._num_loads = np.zeros(count, np.int64)  # that are not finished, by slot
        self._withheld = np.zeros(count, bool)  # by slot: dropped while such loads read it
        self.link_rate = 0.0
        """Bytes a second of loads, a moving average; 0 before the first one."""
        self.capacity = 0
        self._slots = PageAllocator(count)
        self._slots.allocate(count)
        self.grow(self.num_allocated)
        self._slot_of: dict[PageKey, int] = {}
        self._evictable = evictable_keys(context.order)
        """The keys without a pin."""
        self._pins: Counter[PageKey] = Counter()
        self._generation = np.zeros(count, np.int64)  # counts a slot's contents
        self._queued: list[tuple[_Contents, np.ndarray]] = []  # with pages [cache groups, n]
        self._is_queued = np.zeros(count, bool)  # by slot
        self._reserved: dict[int, int] = {}  # slot: the number of clears before
        self._stored: dict[Copy, list[_Contents]] = {}  # for the listeners
        self._step_loads: list[Copy] = []

    def __repr__(self) -> str:
        return f"HostTier({self.num_pages} of {self.capacity} pages)"

    # -- capacity --------------------------------------------------------------------------------

    @property
    def num_allocated(self) -> int:
        return self.memory.num_allocated

    def grow(self, num_pages: int) -> None:
        assert self.capacity <= num_pages <= self.num_allocated
        self._slots.free(np.arange(self.capacity, num_pages))
        self.capacity = num_pages

    @property
    def num_pages(self) -> int:
        return len(self._slot_of)

    @property
    def keys(self) -> Iterable[PageKey]:
        """The keys of all pages that it keeps."""
        return self._slot_of.keys()

    @property
    def busy(self) -> bool:
        return bool(self._queued or self._stored)

    # -- copies ----------------------------------------------------------------------------------

    def lookup(self, keys: Sequence[PageKey]) -> int:
        return next((i for i, key in enumerate(keys) if key not in self._slot_of), len(keys))

    def load(self, keys: Sequence[PageKey], page_ids: np.ndarray, compute_seconds: float = 0.0) -> LoadTask:
        present = keys[:self.lookup(keys)]
        self._evictable.touch(present)
        self._evictable.count_use(present)
        self.pin(present)
        if not present:
            return LoadTask(self, present, None, 0.0)
        slots, pages = self.slots_of(present), np.atleast_2d(page_ids)[:, :len(present)]
        self._num_loads[slots] += 1
        if self.is_queued(slots):
            self.flush()
        numbers = self._numbers_of(pages)
        copy = self._copies.load(slots, pages, _not_none(self.stores.of_slots(slots), self.stores.of_pages(numbers)))
        self.loads.add(copy, slots, numbers)
        self.counters.loaded += len(present)
        return LoadTask(self, present, copy, compute_seconds)

    def finish(self, task: TierTask) -> None:
        assert isinstance(task, LoadTask)
        self._num_loads[task.slots] -= 1
        dropped = self._withheld[task.slots]
        self.unpin([key for key, is_dropped in zip(task.keys, dropped.tolist()) if not is_dropped])
        free = task.slots[dropped & (self._num_loads[task.slots] == 0)]
        self._withheld[free] = False
        self._slots.free(free)
        if task.copy is not None and not task.copy.complete:
            self._step_loads.append(task.copy)

    @property
    def step_loads(self) -> list[Copy]:
        """Loads that were finished while they are in flight."""
        self._step_loads = [copy for copy in self._step_loads if not copy.complete]
        return self._step_loads

    def take_step_loads(self) -> list[Copy]:
        loads, self._step_loads = self.step_loads, []
        return loads

    def is_hidden(self, copy: Copy, compute_seconds: float) -> bool:
        """True where a step that computes so long, and begins now, would not wait for the rest of a load: each layer
        group is there before the layers before it are computed."""
        if not self.link_rate or not compute_seconds or next(iter(self.loads), copy) is not copy:
            return False
        missing = copy.num_groups - copy.num_complete
        load, compute = copy.num_bytes / self.link_rate / copy.num_groups, compute_seconds / copy.num_groups
        return load <= (copy.num_groups - missing) * compute and missing * load <= (copy.num_groups - 1) * compute

    def store(self, keys: Sequence[PageKey], page_ids: np.ndarray) -> StoreTask:
        slot_of = list(map(self._slot_of.get, keys))
        new = [i for i, slot in enumerate(slot_of) if slot is None]
        if len(new) < len(keys):
            self._evictable.touch([key for key, slot in zip(keys, slot_of) if slot is not None])
        new = new[:self._make_room(len(new), frozenset(keys) if len(new) < len(keys) else ())]
        if new:
            for i, slot in zip(new, self._queue([keys[i] for i in new], np.atleast_2d(page_ids)[:, new]).tolist()):
                slot_of[i] = slot
        kept = [slot for slot in slot_of if slot is not None]
        return StoreTask(self, slot_of.index(None) if len(kept) < len(keys) else len(keys), np.array(kept, np.int64))

    def _queue(self, keys: list[PageKey], page_ids: np.ndarray) -> np.ndarray:
        """Queue copies of pages [cache groups, n] whose keys are new; returns their slots."""
        slots = self._slots.allocate(len(keys))
        self._generation[slots] += 1
        self._queued.append((_Contents(keys, slots, self._generation[slots]), page_ids))
        self._is_queued[slots] = True
        self._slot_of.update(zip(keys, slots.tolist()))
        self._evictable.add(keys)
        self.counters.stored += len(keys)
        return slots

    def flush(self) -> None:
        if not self._queued:
            return
        queued = [(contents, pages, contents.present(self._generation)) for contents, pages in self._queued]
        slots = np.concatenate([contents.slots[there] for contents, _, there in queued])
        pages = np.concatenate([ids[:, there] for _, ids, there in queued], 1)
        if len(slots):
            numbers = self._numbers_of(pages)
            copy = self._copies.store(slots, pages, _not_none(self.loads.of_slots(slots), self.loads.of_pages(numbers)))
            self.stores.add(copy, slots, numbers)
            self._stored[copy] = [contents for contents, _ in self._queued]
        self._queued = []
        self._is_queued[slots] = False  # not before: a slot is always queued or in flight for other threads

    def _numbers_of(self, page_ids: np.ndarray) -> np.ndarray:
        """Numbers pages [cache groups, n] through all cache groups; without those that are ABSENT."""
        numbers: np.ndarray = (page_ids + self._first_number)[page_ids != ABSENT]
        return numbers

    def is_queued(self, slots: np.ndarray) -> bool:
        """True where a slot waits for ``flush``."""
        return bool(self._queued) and bool(self._is_queued[slots].any())

    def poll(self) -> None:
        if self.capacity < self.memory.num_slots:
            self.memory.last_step = time.monotonic()
        if self._shared is not None:
            self._shared.advance()
        for copy in self.loads.pop_complete():
            if copy.num_bytes >= _MIN_MEASURED_BYTES and (seconds := copy.seconds):
                newest = copy.num_bytes / seconds
                self.link_rate += _NEWEST_RATE_WEIGHT * (newest - self.link_rate) if self.link_rate else newest
        for copy in self.stores.pop_complete():
            for contents in self._stored.pop(copy):
                if keys := contents.keys_of(contents.present(self._generation)):
                    self._call_stored(keys)

    def close(self) -> None:
        for copy in (*self.loads, *self.stores):
            copy.synchronize()
        self.memory.close()

    # -- what is kept ----------------------------------------------------------------------------

    def pin(self, keys: Sequence[PageKey]) -> None:
        assert all(key in self._slot_of for key in keys)
        self._pins.update(keys)
        self._evictable.take_out(keys)

    def unpin(self, keys: Sequence[PageKey]) -> None:
        free: list[PageKey] = []
        for key in reversed(keys):
            if self._pins[key] > 1:
                self._pins[key] -= 1
                continue
            del self._pins[key]
            if key in self._slot_of:
                free.append(key)
        self._evictable.put_back(free)

    def free(self, keys: Sequence[PageKey]) -> None:
        freed = self._drop(keys)
        if freed:
            for listener in self.listeners:
                listener.dropped(freed)

    def clear(self) -> None:
        self._drop(list(self._slot_of))
        self.num_clears += 1
        for listener in self.listeners:
            listener.cleared()

    def _drop(self, keys: Sequence[PageKey]) -> list[PageKey]:
        """Free the slots of ``keys``; copies that are in flight go on, and the next ones wait for them."""
        found = [self._slot_of.pop(key, None) for key in keys]
        dropped = list(keys) if None not in found else [key for key, slot in zip(keys, found) if slot is not None]
        slots = np.array([slot for slot in found if slot is not None], np.int64)
        self._generation[slots] += 1
        self._is_queued[slots] = False
        if self._pins:
            for key in dropped:
                self._pins.pop(key, None)
        self._evictable.forget(dropped)
        slots.sort()  # the last page left first: neighbours are copied by one command
        read = self._num_loads[slots] > 0
        self._withheld[slots[read]] = True
        self._slots.free(slots[~read])
        return dropped

    def _make_room(self, count: int, keep: Container[PageKey] = ()) -> int:
        """Evict until ``count`` slots are free, but pinned pages and those of ``keep``; returns how many of ``count``
        are."""
        if (missing := count - self._slots.num_free) > 0:
            evicted = self._evictable.next(missing, keep)
            self.free(evicted)
            self.counters.evicted += len(evicted)
        return min(count, self._slots.num_free)

    def slots_of(self, keys: Sequence[PageKey]) -> np.ndarray:
        """The slots [n] of pages that it keeps."""
        return np.array([self._slot_of[key] for key in keys], np.int64)

    # -- what a storage fills and reads ----------------------------------------------------------

    def reserve(self, count: int) -> np.ndarray | None:
        if count > self._slots.num_free + self.num_pages - len(self._pins):
            return None
        self._make_room(count)
        slots = self._slots.allocate(count)
        self._generation[slots] += 1
        self._reserved.update(dict.fromkeys(slots.tolist(), self.num_clears))
        return slots

    def publish(self, keys: Sequence[PageKey], slots: np.ndarray) -> None:
        published: list[PageKey] = []
        unused = []
        for key, slot in zip(keys, slots.tolist(), strict=True):
            if self._reserved.pop(slot) != self.num_clears or key in self._slot_of:
                unused.append(slot)
            else:
                self._slot_of[key] = slot
                published.append(key)
        self._slots.free(np.array(unused, np.int64))
        if published:
            self._evictable.add(published)
            self._call_stored(published)

    def unreserve(self, slots: np.ndarray) -> None:
        for slot in slots.tolist():
            del self._reserved[slot]
        self._slots.free(slots)

    def slot_views(self, slot: int) -> list[np.ndarray]:
        for copies in (self.loads, self.stores):
            while (copy := copies.of_slots(np.array([slot]))) is not None:
                copy.synchronize()
                if not copy.complete:  # on other ranks
                    time.sleep(_POLL_SECONDS)
        return [array[slot] for array in self.memory.arrays]

    def read_slot(self, key: PageKey, into: np.ndarray) -> bool:
        slot = self._slot_of.get(key)
        if slot is None:
            return False
        generation, begin = self._generation[slot], 0
        if (self._slot_of.get(key) != slot or self._is_queued[slot]
                or self.stores.of_slots(np.array([slot])) is not None):
            return False
        for array in self.memory.arrays:
            end = begin + array.shape[1]
            into[begin:end] = array[slot]
            begin = end
        if self._shared is not None:
            self._shared.catch_up()
        return bool(self._generation[slot] == generation)

    def check_integrity(self) -> None:
        """Asserts that each slot is free, reserved or has one key."""
        taken = [*self._slot_of.values(), *self._reserved]
        taken += np.flatnonzero(self._withheld).tolist()
        assert len(set(taken)) == len(taken) == self.capacity - self._slots.num_free, repr(self)
        assert self._pins.keys() <= self._slot_of.keys() and min(self._pins.values(), default=1) > 0, "pins are off"
        assert all(key in self._evictable for key in self._slot_of.keys() - self._pins.keys())
        assert len(self._evictable) == len(self._slot_of) - len(self._pins), "a page that can be evicted is not queued"
        queued = [key for contents, _ in self._queued for key in contents.keys_of(contents.present(self._generation))]
        assert sorted(self._slot_of[key] for key in queued) == np.flatnonzero(self._is_queued).tolist(), (
            "the count of queued pages is off")

    def _call_stored(self, keys: list[PageKey]) -> None:
        for listener in self.listeners:
            listener.stored(keys)


def _not_none(*copies: Copy | None) -> list[Copy]:
    return [copy for copy in copies if copy is not None]


def _pin(device: torch.device, address: int, num_bytes: int) -> bool:
    """Pin by CUDA's own call: torch's allocator of pinned memory rounds up to a power of two. A thread of its own would
    otherwise open a context on the first GPU."""
    cudart: Any = torch.cuda.cudart()
    with torch.cuda.device(device):
        return int(cudart.cudaHostRegister(address, num_bytes, 0)) == 0


def _unpin(device: torch.device, address: int) -> None:
    cudart: Any = torch.cuda.cudart()
    with torch.cuda.device(device):
        cudart.cudaHostUnregister(address)
