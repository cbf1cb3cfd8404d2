"""The asynchronous part of a KV storage: one rank's pages between host memory and a backend.

Reading: the rank's loop queries the pages of a prompt, reserves slots of host memory and has them read into these;
threads check every object (objects.py) before a byte of it reaches a slot. Writing: pages that are complete in host
memory are written in the background, each once; what the queue cannot take is dropped and counted.

No method that the loop calls waits for the backend. One that fails or hangs is put aside (health.py): what is under way
ends with the pages that are there, and the prompt is computed.
"""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field

import numpy as np

from ..page_keys import PageKey
from ..tiers.base import HostSlots
from .base import STALL_SECONDS, StorageBackend, StorageError
from .health import Health
from .objects import ObjectFormat
from .operations import StorageQuery, StorageRead, Workers
from .page_shape import Rectangle

logger = logging.getLogger(__name__)

NUM_WRITERS = 2
_BATCH_BYTES = 8 << 20
_MAX_BATCH_PAGES = 64
_FIRST_QUERY_PAGES = 16
_KEY_BYTES = 32
"""Other keys name pages of swapped-out requests, which only this engine can use."""
_LEFT_OPEN: list[StorageBackend] = []
_WRITTEN_SECONDS, _MAX_WRITTEN = 300.0, 1 << 17


@dataclass
class StorageCounters:
    """Pages, bytes and, summed over threads, seconds in the backend. ``dropped``: pages that the queue of writes did
    not take; ``lost``: those that had left host memory before they were written. ``errors`` by kind: ``corrupt`` and
    ``foreign`` objects that were not used, ``read``, ``write`` and ``query`` calls that failed."""

    read_pages: int = 0
    read_bytes: int = 0
    written_pages: int = 0
    written_bytes: int = 0
    dropped: int = 0
    lost: int = 0
    read_seconds: float = 0.0
    write_seconds: float = 0.0
    evicted: int = 0
    times_aside: int = 0
    errors: dict[str, int] = field(default_factory=lambda: dict.fromkeys(
        ("corrupt", "foreign", "read", "write", "query"), 0))


class Storage:
    """Pages of one rank in ``backend``, which it owns. It is a listener of the host tier from its creation to
    ``close``; both may happen while the server runs. With ``num_writers`` 0 nothing is written."""

    def __init__(self, name: str, backend: StorageBackend, objects: ObjectFormat, host: HostSlots, *,
                 stall_seconds: float = STALL_SECONDS, num_readers: int = 4, num_writers: int = NUM_WRITERS,
                 max_queued_pages: int = 16_384, clock: Callable[[], float] = time.monotonic):
        assert objects.shape.body_bytes(objects.shape.own) == host.page_bytes, "the layout is not the host tier's"
        self._name = name
        self._backend, self._objects, self._host = backend, objects, host
        self._clock = clock
        self._reads = Health(name, "reads", clock, stall_seconds)
        self._writes = Health(name, "writes", clock, stall_seconds)
        self._counters, self._lock = StorageCounters(), threading.Lock()
        self._sources = objects.shape.sources
        self._buffers = threading.local()
        self._max_queued_pages = max_queued_pages
        self._queue: OrderedDict[PageKey, None] = OrderedDict()  # of writes
        self._written: OrderedDict[PageKey, float] = OrderedDict()
        self.num_clears = 0
        """Times that ``clear`` has emptied the backend."""
        self._seen: deque[PageKey] = deque(maxlen=_MAX_WRITTEN)
        self._num_writing = 0
        self._write_possible = threading.Condition()
        self._closed = False
        self._operations: weakref.WeakSet[StorageQuery | StorageRead] = weakref.WeakSet()
        self._readers = Workers(f"kv-storage-read-{name}", num_readers)
        self._num_writers = num_writers if objects.shape.is_writer else 0
        self._writers = Workers(f"kv-storage-write-{name}", self._num_writers)
        for _ in range(self._num_writers):
            self._writers.submit(self._write_all)
        host.listeners.append(self)

    def __repr__(self) -> str:
        return f"Storage({self.name}, {len(self._queue)} pages to write{'' if self.healthy else ', put aside'})"

    @property
    def name(self) -> str:
        """Of the backend, as flags have it."""
        return self._name

    @property
    def healthy(self) -> bool:
        """False while nothing is read because the backend fails or hangs."""
        return not self._reads.is_aside

    @property
    def read_rate(self) -> float:
        """Bytes per second at which pages came into host memory lately; 0 until some did."""
        return self._reads.rate.value

    @property
    def num_queued_writes(self) -> int:
        """Pages that wait to be written, or are being written."""
        return len(self._queue) + self._num_writing

    def take_seen(self) -> list[PageKey]:
        """The pages that were written, or found in the storage, since the last call: for KV events. Bounded."""
        return [self._seen.popleft() for _ in range(len(self._seen))]

    @property
    def counters(self) -> StorageCounters:
        """What was done so far."""
        counters = self._counters
        counters.read_seconds, counters.write_seconds = self._reads.seconds, self._writes.seconds
        counters.times_aside = self._reads.times_aside + self._writes.times_aside
        counters.evicted = self._backend.stats.evicted
        return counters

    def query(self, keys: Sequence[PageKey]) -> StorageQuery:
        """Counts the leading pages that are there, in the background."""
        query = StorageQuery(keys, lambda: self._reads.is_aside)
        if not keys or self._closed:
            query.cancel()
        elif not query.done:
            self._operations.add(query)
            self._readers.submit(lambda: self._query(query))
        return query

    def read(self, keys: Sequence[PageKey], slots: np.ndarray) -> StorageRead:
        """Reads pages into reserved slots of the host tier, in the background; ends at the first that is absent, or not
        ours, or damaged."""
        read = StorageRead(keys, slots, lambda: self._reads.is_aside)
        if self._closed:
            read.end_at(0)
        if not read.done:
            self._operations.add(read)
            step = self._batch_pages
            for first in range(0, len(keys), step):
                pages = range(first, min(first + step, len(keys)))
                self._readers.submit(lambda pages=pages: self._read(read, pages))  # type: ignore[misc]
        return read

    def clear(self) -> Future[None]:
        """Removes all objects from the backend, in the background. The future has the error where it fails."""
        with self._write_possible:
            self._queue.clear()
        future: Future[None] = Future()
        threading.Thread(target=self._clear, args=(future,), name="kv-storage-clear", daemon=True).start()
        return future

    def close(self, drain_seconds: float = 0.0) -> None:
        """Ends what is under way and closes the backend; waits up to ``drain_seconds`` for pages that are queued to be
        written, and then at most a second for calls in progress."""
        with suppress(ValueError):
            self._host.listeners.remove(self)
        with self._write_possible:
            self._write_possible.wait_for(lambda: not self.num_queued_writes or self._writes.is_aside, drain_seconds)
            self._closed = True
            self._queue.clear()
            self._write_possible.notify_all()
        for operation in list(self._operations):
            operation.cancel()
        ended = [workers.close(0.5) for workers in (self._readers, self._writers)]
        if all(ended):
            self._backend.close()
        else:  # a call that hangs uses the backend still, and to free it here might take as long
            _LEFT_OPEN.append(self._backend)
            logger.warning("The KV storage %s does not answer; it is left as it is.", self.name)

    def stored(self, keys: Sequence[PageKey]) -> None:
        """As a listener of the host tier: queues pages to be written."""
        if not self._num_writers:
            return
        now = self._clock()
        with self._write_possible:
            for key in keys:
                if len(key) != _KEY_BYTES or key in self._queue or self._was_written(key, now):
                    continue
                if len(self._queue) >= self._max_queued_pages or self._closed:
                    self._counters.dropped += 1
                else:
                    self._queue[key] = None
            self._write_possible.notify_all()

    def dropped(self, keys: Sequence[PageKey]) -> None:
        """As a listener of the host tier: these cannot be written any more."""
        with self._write_possible:
            for key in keys:
                if key in self._queue:
                    del self._queue[key]
                    self._counters.lost += 1

    def cleared(self) -> None:
        """As a listener of the host tier: what is queued has gone."""
        with self._write_possible:
            self._queue.clear()

    @property
    def _batch_pages(self) -> int:
        return max(1, min(_MAX_BATCH_PAGES, _BATCH_BYTES // self._objects.num_bytes(self._objects.shape.own)))

    def _was_written(self, key: PageKey, now: float) -> bool:
        """Whether the object is surely there: it was seen lately. Needs the lock of the queue."""
        return now - self._written.get(key, -_WRITTEN_SECONDS) < _WRITTEN_SECONDS

    def _note_written(self, keys: Sequence[PageKey]) -> None:
        if not self._num_writers:
            return
        now = self._clock()
        with self._write_possible:
            for key in keys:
                self._written.pop(key, None)
                self._written[key] = now
                self._seen.append(key)
            while len(self._written) > _MAX_WRITTEN:
                self._written.popitem(last=False)

    def _note_absent(self, keys: Sequence[PageKey]) -> None:
        """Lets pages be written again once they are stored: some of ``keys`` are not there, evicted or removed by
        others."""
        with self._write_possible:
            for key in keys:
                self._written.pop(key, None)

    def _count_error(self, kind: str) -> None:
        with self._lock:
            self._counters.errors[kind] += 1

    def _fail(self, health: Health, kind: str, error: Exception) -> None:
        self._buffers.memory = None  # the backend knows whether something may still be written there
        self._count_error(kind)
        health.failed(str(error) or type(error).__name__)

    # In the readers' threads.

    def _query(self, query: StorageQuery) -> None:
        try:
            while not query.done and query.count < len(query.keys):
                count = self._num_present(query, query.count)
                if count == query.count:
                    break
                query.found(count, last=False)
        except Exception as error:  # whatever a backend's library raises
            self._fail(self._reads, "query", error)
        self._note_absent(query.keys[query.count:])
        query.found(query.count, last=True)

    def _num_present(self, query: StorageQuery, first: int) -> int:
        """The number of leading pages that are there, given that ``first`` are; more than one source may have more."""
        for source in list(self._sources):
            count, step = first, _FIRST_QUERY_PAGES if source[0] == self._objects.shape.own else 1
            while count < len(query.keys) and not query.done:
                keys = query.keys[count:count + step]
                names = [self._objects.name(key, rectangle) for key in keys for rectangle in source]
                with self._reads.call():
                    present = np.array(self._backend.exists(names), bool).reshape(len(keys), len(source)).all(1)
                found = len(keys) if present.all() else int(present.argmin())
                count += found
                if found < len(keys):
                    break
                step *= 4
            if count > first:
                self._prefer(source)
                return count
        return first

    def _prefer(self, source: list[Rectangle]) -> None:
        """Looks at this source first: a prompt's pages were written by one server."""
        if self._sources[0] != source:
            with self._lock:
                self._sources = [source, *(other for other in self._sources if other != source)]

    def _read(self, read: StorageRead, pages: range) -> None:
        try:
            missing = list(pages)
            for source in list(self._sources):
                missing = [page for page in missing if read.wants(page)]
                if not missing:
                    break
                missing = self._read_from(source, read, missing)
            if missing:
                self._note_absent(read.keys[missing[0]:])
                read.end_at(missing[0])
        except Exception as error:  # whatever a backend's library raises
            self._fail(self._reads, "read", error)
            read.end_at(pages.start)

    def _read_from(self, source: list[Rectangle], read: StorageRead, pages: list[int]) -> list[int]:
        """Reads pages from one source; returns those that it does not have."""
        sizes = [self._objects.num_bytes(rectangle) for rectangle in source]
        count = max(1, _BATCH_BYTES // sum(sizes))
        missing = []
        for first in range(0, len(pages), count):
            batch = [page for page in pages[first:first + count] if read.wants(page)]
            parts = list(self._cut(len(batch), sizes))
            names = [self._objects.name(read.keys[page], rectangle) for page in batch for rectangle in source]
            if not batch:
                break
            with self._reads.rate.measure() as measured:
                with self._reads.call(len(batch) * sum(sizes)):
                    present = self._backend.get(names, [data for page in parts for data in page])
                filled = [all(present[i * len(source):][:len(source)]) and self._fill(source, read, page, parts[i])
                          for i, page in enumerate(batch)]
                measured.num_bytes = sum(filled) * self._host.page_bytes
            missing += [page for page, is_filled in zip(batch, filled) if not is_filled]
            # Others may have written them, in objects of other heads: they need not be written again.
            self._note_written([read.keys[page] for page, is_filled in zip(batch, filled) if is_filled])
        if len(missing) < len(pages):
            self._prefer(source)
        return missing

    def _fill(self, source: list[Rectangle], read: StorageRead, page: int, objects: list[np.ndarray]) -> bool:
        """Copies a page's objects into its slot; False, and one that is not what it should be is removed, where they
        cannot be used."""
        key, shape = read.keys[page], self._objects.shape
        for rectangle, data in zip(source, objects):
            verdict = self._objects.check(key, rectangle, data)
            if verdict != "ok":
                self._count_error("foreign" if verdict == "unchecked" else verdict)
                if verdict != "unchecked":  # others can use that one
                    self._backend.delete([self._objects.name(key, rectangle)])
                return False
        if not read.wants(page):
            return True
        slot = self._host.slot_views(int(read.slots[page]))

        def copy() -> None:
            for rectangle, data in zip(source, objects):
                shape.unpack(rectangle, self._objects.body(data, rectangle), slot)

        with self._lock:  # before the loop sees the page
            self._counters.read_pages += 1
            self._counters.read_bytes += self._host.page_bytes
        read.copy(page, copy)
        return True

    def _clear(self, future: Future[None]) -> None:
        try:
            self._backend.clear()
        except Exception as error:  # whatever a backend's library raises
            future.set_exception(error)
            return
        with self._write_possible:
            self._written.clear()
            self._seen.clear()
            self.num_clears += 1
        future.set_result(None)

    def _cut(self, count: int, sizes: list[int]) -> Iterator[list[np.ndarray]]:
        """Yields parts of this thread's buffer: for each of ``count`` pages one of each size."""
        needed = count * sum(sizes)
        buffer = getattr(self._buffers, "memory", None)
        if buffer is None or buffer.nbytes < needed:
            own = self._batch_pages * self._objects.num_bytes(self._objects.shape.own)
            buffer = self._buffers.memory = self._backend.buffer(max(needed, own))
        begin = 0
        for _ in range(count):
            page = []
            for size in sizes:
                page.append(buffer[begin:begin + size])
                begin += size
            yield page

    # In the writers' threads.

    def _write_all(self) -> None:
        """Writes what is queued until the storage is closed."""
        while True:
            with self._write_possible:
                # A backend that was put aside is tried again after a while: nothing tells when.
                while not self._closed and (not self._queue or self._writes.is_aside):
                    self._write_possible.wait(0.2 if self._queue else None)
                if self._closed:
                    return
                keys = [self._queue.popitem(last=False)[0] for _ in range(min(len(self._queue), self._batch_pages))]
                self._num_writing += len(keys)
            try:
                self._write(keys)
            except Exception as error:  # whatever a backend's library raises
                self._fail(self._writes, "write", error)
            finally:
                with self._write_possible:
                    self._num_writing -= len(keys)
                    self._write_possible.notify_all()

    def _write(self, keys: list[PageKey]) -> None:
        own = self._objects.shape.own
        with self._writes.call(shows_health=False):  # a full store answers
            present = self._backend.exists([self._objects.name(key, own) for key in keys])
        self._note_written([key for key, there in zip(keys, present) if there])
        packed, data = [], []
        for key, (target,) in zip([key for key, there in zip(keys, present) if not there],
                                  self._cut(len(keys), [self._objects.num_bytes(own)])):
            if self._host.read_slot(key, self._objects.body(target, own)):
                self._objects.seal(key, target)
                packed.append(key)
                data.append(target)
            else:
                with self._lock:
                    self._counters.lost += 1
        if packed:
            self._put(packed, data)

    def _put(self, keys: list[PageKey], data: list[np.ndarray]) -> None:
        """Raises StorageError where the store takes no more."""
        own = self._objects.shape.own
        with self._writes.rate.measure() as measured, self._writes.call(sum(each.nbytes for each in data)):
            results = self._backend.put([self._objects.name(key, own) for key in keys], data)
            written = [key for key, result in zip(keys, results) if result]
            measured.num_bytes = len(written) * self._host.page_bytes
            with self._lock:
                self._counters.written_pages += len(written)
                self._counters.written_bytes += measured.num_bytes
            self._note_written(written)
            if len(written) < len(keys):
                raise StorageError("it is full")
