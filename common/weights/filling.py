"""Fills slots by several threads: reading, converting and copying of tensors overlap."""

from __future__ import annotations

import threading
import time
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from types import TracebackType

import torch

from .lazy import LazyTensor
from .slots import Slot


@dataclass
class FillTimes:
    """Seconds of all threads together: ``read_s`` to read slices from the source, ``copy_s`` to convert and copy
    them."""

    read_s: float = 0.0
    copy_s: float = 0.0


class Filling:
    """Fills slots in the order in which they come, as many at a time as there are threads; none of them with 0 or 1.

    What is more than a copy to the slot's own memory runs on the caller's thread: such slots may share parameters.
    """

    def __init__(self, num_threads: int, times: FillTimes | None = None):
        """``times``, where given, is added to."""
        self._num_threads = num_threads
        self._times = times or FillTimes()
        self._stack = ExitStack()
        self._running: deque[Future[None]] = deque()
        self._lock = threading.Lock()
        self.num_values = 0
        """Values of the slots that are filled."""

    def __enter__(self) -> Filling:
        if self._num_threads > 1:
            self._threads = self._stack.enter_context(ThreadPoolExecutor(self._num_threads, "load-weights"))
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        """Waits for what runs; raises what it raised, unless the block did."""
        try:
            while self._running and error is None:
                self._running.popleft().result()
        finally:
            for future in self._running:
                future.cancel()
            self._stack.close()

    def fill(self, slot: Slot, tensor: LazyTensor) -> None:
        """Fills a slot, now or soon; raises what an earlier one raised."""
        if self._num_threads < 2 or slot.load is not None or slot.memory is not None:
            self._fill(slot, tensor)
            return
        # At most so many slices are in host memory besides the parameters.
        while len(self._running) >= self._num_threads:
            self._running.popleft().result()
        self._running.append(self._threads.submit(self._fill_apart, slot, tensor,
                                                  torch.is_inference_mode_enabled()))

    def _fill_apart(self, slot: Slot, tensor: LazyTensor, inference: bool) -> None:
        with torch.inference_mode() if inference else torch.no_grad():  # modes are a thread's own
            self._fill(slot, tensor)

    def _fill(self, slot: Slot, tensor: LazyTensor) -> None:
        begin = middle = time.perf_counter()
        if slot.target.numel():
            part = slot.part_of(tensor)
            middle = time.perf_counter()
            slot.write(part)
        end = time.perf_counter()
        with self._lock:
            self._times.read_s += middle - begin
            self._times.copy_s += end - middle
            self.num_values += slot.target.numel()
