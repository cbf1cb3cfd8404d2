"""Host memory of ranks, and a storage backend in memory that fails, hangs or lies when a test says so."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from hashlib import sha256

import numpy as np

from baton.common.kvcache.layout import KVLayout
from baton.common.kvcache.storage.base import BackendStats, StorageBackend, StorageError, aligned_buffer
from baton.common.kvcache.storage.fingerprint import StoredPool
from baton.common.kvcache.storage.objects import ObjectFormat
from baton.common.kvcache.storage.open import page_shape
from baton.common.kvcache.storage.page_shape import PageShape
from baton.common.kvcache.storage.storage import Storage

DIGEST = "0123456789abcdef" * 2
NUM_HEADS = 8


def key_of(number: int) -> bytes:
    return sha256(number.to_bytes(8, "little")).digest()


def rank_shape(rank: int = 0, size: int = 1, *, groups: Sequence[int] = (2, 1), draft: bool = True,
               latent: bool = False) -> PageShape:
    """A page of three layers with eight heads (or latents), in layer groups, and of a draft layer with two heads."""
    heads = NUM_HEADS if not latent else 1
    target = KVLayout(tuple(groups), max(1, heads // size), 4, 4, "float16", "latent" if latent else "heads")
    pools = [StoredPool(target, NUM_HEADS)]
    if draft:
        pools.append(StoredPool(KVLayout((1,), max(1, 2 // size), 8, 4, "float16"), 2, is_draft=True))
    return page_shape(pools, rank, size)


def content(shape: PageShape, key: bytes) -> np.ndarray:
    """The bytes that the rank's slot of this key has, cut out of the whole model's page."""
    rng = np.random.default_rng(int.from_bytes(key[:8], "little"))
    parts = []
    for pool in shape.pools:
        whole = rng.integers(0, 256, (pool.num_layers, pool.planes, pool.num_heads, pool.head_bytes), np.uint8)
        heads = pool.heads(shape.tp_size, shape.tp_rank)
        parts.append(whole[:, :, heads.start:heads.stop].reshape(-1))
    return np.concatenate(parts)


class FakeHost:
    """Slots of one rank, filled by the test; a slot's memory is an array for each layer group."""

    def __init__(self, shape: PageShape, num_slots: int = 64, groups: Sequence[int] = (2, 1, 1)):
        self.shape, self.listeners = shape, []
        sizes, pools = [], [pool for pool in shape.pools for _ in range(pool.num_layers)]
        layers = iter(pools)
        for count in groups[:len(groups) if len(shape.pools) > 1 else -1]:
            sizes.append(sum(next(layers).layer_bytes(shape.own.split) for _ in range(count)))
        self.memory = [np.zeros((num_slots, size), np.uint8) for size in sizes]
        self.page_bytes = sum(sizes)
        self.free, self.slot_of = list(range(num_slots)), {}
        self.before_views: Callable[[], None] = lambda: None

    def reserve(self, count: int) -> np.ndarray | None:
        if count > len(self.free):
            return None
        return np.array([self.free.pop() for _ in range(count)], np.int64)

    def publish(self, keys: Sequence[bytes], slots: np.ndarray) -> None:
        self.slot_of.update(zip(keys, slots.tolist()))
        for listener in self.listeners:
            listener.stored(keys)

    def unreserve(self, slots: np.ndarray) -> None:
        self.free += slots.tolist()

    def slot_views(self, slot: int) -> list[np.ndarray]:
        self.before_views()
        return [group[slot] for group in self.memory]

    def bytes_of(self, slot: int) -> np.ndarray:
        return np.concatenate([group[slot] for group in self.memory])

    def read_slot(self, key: bytes, into: np.ndarray) -> bool:
        if key not in self.slot_of:
            return False
        into[:] = self.bytes_of(self.slot_of[key])
        return True

    def add(self, keys: Iterable[bytes]) -> None:
        """Complete pages of these keys, as if the device had stored them."""
        keys = list(keys)
        slots = self.reserve(len(keys))
        for key, slot in zip(keys, slots.tolist()):
            begin, data = 0, content(self.shape, key)
            for group in self.memory:
                group[slot] = data[begin:begin + group.shape[1]]
                begin += group.shape[1]
        self.publish(keys, slots)

    def drop(self, keys: Sequence[bytes]) -> None:
        self.unreserve(np.array([self.slot_of.pop(key) for key in keys], np.int64))
        for listener in self.listeners:
            listener.dropped(keys)


class MemoryBackend:
    """Objects in a dictionary. ``fails``: every call raises; ``gate``: calls wait for it; ``is_full``: nothing is
    taken."""

    def __init__(self, objects: dict[str, np.ndarray] | None = None):
        self.objects = {} if objects is None else objects
        self.stats = BackendStats()
        self.fails = self.is_full = self.closed = False
        self.gate = threading.Event()
        self.gate.set()
        self.num_puts = 0

    def _enter(self) -> None:
        self.gate.wait()
        if self.fails:
            raise StorageError("it was killed")

    def buffer(self, num_bytes: int) -> np.ndarray:
        return aligned_buffer(num_bytes)

    def exists(self, names: Sequence[str]) -> list[bool]:
        self._enter()
        return [name in self.objects for name in names]

    def get(self, names: Sequence[str], into: Sequence[np.ndarray]) -> list[bool]:
        self._enter()
        found = [name in self.objects and self.objects[name].nbytes == target.nbytes
                 for name, target in zip(names, into)]
        for name, target, there in zip(names, into, found):
            if there:
                target[:] = self.objects[name]
            else:
                self.objects.pop(name, None)
        return found

    def put(self, names: Sequence[str], data: Sequence[np.ndarray]) -> list[bool]:
        self._enter()
        if self.is_full:
            return [False] * len(names)
        self.num_puts += len(names)
        self.objects.update((name, each.copy()) for name, each in zip(names, data))
        return [True] * len(names)

    def delete(self, names: Sequence[str]) -> None:
        for name in names:
            self.objects.pop(name, None)

    def clear(self) -> None:
        self._enter()
        self.objects.clear()

    def close(self) -> None:
        self.closed = True


def storage_of(backend: StorageBackend, host: FakeHost, digest: str = DIGEST, **options: object) -> Storage:
    options.setdefault("stall_seconds", 5.0)  # this machine's cores are shared
    return Storage("test", backend, ObjectFormat(digest, host.shape), host, **options)


def wait_until(condition: Callable[[], bool], seconds: float = 10.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it took too long"
        time.sleep(0.001)


def read_back(storage: Storage, host: FakeHost, keys: Sequence[bytes]) -> int:
    """Reads pages into reserved slots; checks and publishes those that came, and returns their number."""
    slots = host.reserve(len(keys))
    read = storage.read(keys, slots)
    wait_until(lambda: read.done)
    for key, slot in zip(keys[:read.num_pages], slots.tolist()):
        assert (host.bytes_of(slot) == content(host.shape, key)).all()
    host.publish(keys[:read.num_pages], slots[:read.num_pages])
    host.unreserve(slots[read.num_pages:])
    return read.num_pages


def query(storage: Storage, keys: Sequence[bytes]) -> int:
    found = storage.query(keys)
    wait_until(lambda: found.done)
    return found.count


def write(storage: Storage, host: FakeHost, keys: Sequence[bytes]) -> None:
    host.add(keys)
    wait_until(lambda: not storage.num_queued_writes)
