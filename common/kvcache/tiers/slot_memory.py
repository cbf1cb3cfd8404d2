"""Memory of a host tier's slots, allocated and pinned in pieces: in the background, so that start-up does not wait.

It is private memory in huge pages, and populated by calls that do not hold the interpreter's lock: 11 GB/s on a machine
where first touches of shared memory reach 1 GB/s. (The kernel gives shared memory no huge pages by default.)
"""

from __future__ import annotations

import ctypes
import logging
import math
import mmap
import threading
import time
import weakref
from collections.abc import Callable, Sequence

import numpy as np

from ...process import available_host_bytes

logger = logging.getLogger(__name__)

CHUNK_BYTES = 32 << 20
"""Memory that is pinned at once, a layer group after the other. Each call takes a lock that launches of kernels need,
for 1.4 ms and 15 us a MiB in huge pages. While 40 GB were pinned in chunks of 32 MiB an 8B model's server lost 1.8 % of
its throughput, and in chunks of 256 MiB, whose calls take longer than a launch is ahead of its step, 7.7 %."""
_IDLE_PAUSE, _BUSY_PAUSE = 1, 9
"""The pause before the next chunk in the background, as a multiple of the time that the last one took."""
_BUSY_SECONDS = 0.1
_POPULATE_BYTES = 2 << 20
"""Memory that is populated at once: others who map memory wait meanwhile."""
_MADV_POPULATE_WRITE = 23  # Linux 5.14
_MAP_NORESERVE = 0x4000
_SPARED_BYTES = 1 << 30
"""Memory of the host that is left to others where ours is pinned: it cannot be swapped."""
_PAGE_BYTES = mmap.PAGESIZE


class OutOfHostMemory(Exception):
    """Raised where not even the first chunk can be had; the sentence says why."""


class SlotMemory:
    """``arrays[g]`` is ``[num_slots, group_bytes[g]]`` uint8: a slot has a part in each. The addresses are reserved at
    once; only the first ``num_allocated`` slots may be used.

    ``pin(address, num_bytes)`` and ``unpin(address)`` are the device's, None where it has none.
    """

    def __init__(self, group_bytes: Sequence[int], num_slots: int, *,
                 pin: Callable[[int, int], bool] | None = None, unpin: Callable[[int], object] | None = None,
                 in_background: bool = False, chunk_bytes: int = CHUNK_BYTES,
                 num_free_bytes: Callable[[], int] = available_host_bytes, shared: np.ndarray | None = None):
        """Allocates the first chunk where ``in_background``, else all. Raises OutOfHostMemory where there is none.
        ``shared``: memory of ``num_bytes`` to take the slots from, which other processes map, too."""
        self.num_slots = num_slots
        self.num_allocated = 0
        try:
            self._maps = (_reserved(group_bytes, num_slots) if shared is None else
                          np.split(shared, np.cumsum(_whole_pages(group_bytes, num_slots)))[:len(group_bytes)])
        except (OSError, ValueError, OverflowError):
            raise OutOfHostMemory("its addresses cannot be reserved") from None
        for memory in self._maps:  # it has no effect where the kernel gives such memory no huge pages
            _madvise(memory.ctypes.data, memory.nbytes, mmap.MADV_HUGEPAGE)
        self.arrays = [memory[:size * num_slots].reshape(num_slots, size)
                       for memory, size in zip(self._maps, group_bytes)]
        self._num_free_bytes = num_free_bytes
        # Pinned ranges begin and end with whole pages of memory in each array.
        step = math.lcm(*(_PAGE_BYTES // math.gcd(_PAGE_BYTES, size) for size in group_bytes))
        self.chunk_slots = min(num_slots, max(1, chunk_bytes // (sum(group_bytes) * step)) * step)
        self._pin, self._unpin = pin, unpin
        self._pinned: list[int] = []  # addresses
        if unpin is not None:
            weakref.finalize(self, _unpin_all, unpin, self._pinned, self._maps).atexit = False
        self.last_step = -math.inf
        """When a step was made last, by ``time.monotonic``: while some are, pinning is slow."""
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        while self.num_allocated < (self.chunk_slots if in_background else num_slots):
            if (problem := self._allocate_next()) is not None:
                raise OutOfHostMemory(problem)
        if in_background:
            # A thread that held this object would keep it from being collected.
            self._thread = threading.Thread(target=_allocate_rest, args=(weakref.ref(self), self._stop), daemon=True,
                                            name="pin-host-memory")
            self._thread.start()

    def __repr__(self) -> str:
        return f"SlotMemory({self.num_allocated} of {self.num_slots} slots)"

    @staticmethod
    def num_bytes(group_bytes: Sequence[int], num_slots: int) -> int:
        """Bytes of the memory of ``count`` slots."""
        return sum(_whole_pages(group_bytes, num_slots))

    def chunk_of(self, slots: np.ndarray) -> np.ndarray:
        """The chunk of each slot: a copy by the device must not cross the end of one."""
        chunks: np.ndarray = slots // self.chunk_slots
        return chunks

    def close(self) -> None:
        """End the allocation in the background."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()

    def _allocate_or_log(self) -> bool:
        """Allocate the next chunk; False, with a line in the log, where there is no memory for it."""
        problem = self._allocate_next()
        if problem is not None:
            logger.warning("host memory for KV pages ends at %d of %d pages: %s", self.num_allocated, self.num_slots,
                           problem)
        return problem is None

    def _allocate_next(self) -> str | None:
        """Allocate a chunk; returns why not, if so."""
        begin, end = self.num_allocated, min(self.num_slots, self.num_allocated + self.chunk_slots)
        parts = [array[begin:end] for array in self.arrays]
        num_bytes = sum(part.nbytes for part in parts)
        if num_bytes + (_SPARED_BYTES if self._pin is not None else 0) > self._num_free_bytes():
            return f"the host has no {num_bytes / 2**30:.2f} GiB more"
        if self._pin is not None:
            for part in parts:
                _populate(part)
            for done, part in enumerate(parts):
                if not self._pin(part.ctypes.data, part.nbytes):
                    for earlier in parts[:done]:
                        assert self._unpin is not None
                        self._unpin(earlier.ctypes.data)
                    return (f"{part.nbytes / 2**30:.2f} GiB cannot be pinned; the limit of locked memory may be "
                            "reached")
            self._pinned += [part.ctypes.data for part in parts]
        self.num_allocated = end
        return None


def _allocate_rest(reference: weakref.ref[SlotMemory], stop: threading.Event) -> None:
    pause = 0.0
    while not stop.wait(pause):
        memory, began = reference(), time.monotonic()
        if memory is None or memory.num_allocated == memory.num_slots or not memory._allocate_or_log():
            return
        now = time.monotonic()
        pause = (now - began) * (_BUSY_PAUSE if now - memory.last_step < _BUSY_SECONDS else _IDLE_PAUSE)
        del memory


def _whole_pages(group_bytes: Sequence[int], num_slots: int) -> list[int]:
    """Bytes of each group's slots, in whole pages of memory."""
    return [-(-size * num_slots // _PAGE_BYTES) * _PAGE_BYTES for size in group_bytes]


def _reserved(group_bytes: Sequence[int], num_slots: int) -> list[np.ndarray]:
    return [np.frombuffer(_reserve(size), np.uint8) for size in _whole_pages(group_bytes, num_slots)]


def _reserve(num_bytes: int) -> mmap.mmap:
    memory = mmap.mmap(-1, num_bytes,
                       flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE)
    memory.madvise(mmap.MADV_DONTFORK)  # a fork would copy what is pinned
    return memory


def _populate(part: np.ndarray) -> None:
    """Let the kernel allocate the memory of ``part``, without the driver's lock and the interpreter's."""
    data = part.reshape(-1)
    for begin in range(0, len(data), _POPULATE_BYTES):
        piece = data[begin:begin + _POPULATE_BYTES]
        first = piece.ctypes.data // _PAGE_BYTES * _PAGE_BYTES
        if _madvise(first, piece.ctypes.data + len(piece) - first, _MADV_POPULATE_WRITE) != 0:
            piece[::_PAGE_BYTES] = 0  # an older kernel


_madvise = ctypes.CDLL(None).madvise
_madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


def _unpin_all(unpin: Callable[[int], object], addresses: Sequence[int], maps: Sequence[np.ndarray]) -> None:
    """Unpins memory before it is unmapped: ``maps`` is kept until here."""
    for address in addresses:
        unpin(address)
