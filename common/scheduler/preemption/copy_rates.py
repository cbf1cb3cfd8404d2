"""Measured rates of copying pages and of computing prompts."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

import torch

_PROBE_BYTES = 16 << 20
_MIN_STEP_TOKENS = 32  # shorter steps measure the cost of a launch
_NEWEST_STEP_WEIGHT = 0.2  # in the moving average


def measure_link_bandwidth(device: torch.device) -> float:
    """Bytes a second between device memory and (pinned) host memory, in the slower direction; takes milliseconds."""
    on_gpu = device.type == "cuda"
    host = torch.zeros(_PROBE_BYTES, dtype=torch.uint8, pin_memory=on_gpu)
    memory = torch.zeros(_PROBE_BYTES, dtype=torch.uint8, device=device)
    slowest = 0.0
    for target, source in ((memory, host), (host, memory)):
        target.copy_(source)  # first touches
        if on_gpu:
            torch.cuda.synchronize(device)
        began = time.perf_counter()
        target.copy_(source)
        if on_gpu:
            torch.cuda.synchronize(device)
        slowest = max(slowest, time.perf_counter() - began)
    return _PROBE_BYTES / max(slowest, 1e-9)


class PrefillRate:
    """Moving average of prompt tokens a second over the last steps; 0 before the first one.

    Steps run one after the other: a step begins when it was launched or when the previous one ended, whichever is
    later.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter):
        self._clock = clock
        self._in_flight: deque[tuple[float, int]] = deque()  # launch time and prompt tokens of each step
        self._last_end = 0.0
        self.tokens_per_second = 0.0

    def begin(self, num_tokens: int) -> None:
        """Record the launch of a step with ``num_tokens`` prompt tokens; 0 if it also decodes."""
        self._in_flight.append((self._clock(), num_tokens))

    def end(self) -> None:
        """Record the end of the oldest step in flight."""
        launched, num_tokens = self._in_flight.popleft()
        now, previous_end = self._clock(), self._last_end
        self._last_end = now
        if num_tokens < _MIN_STEP_TOKENS:
            return
        newest = num_tokens / max(now - max(launched, previous_end), 1e-9)
        average = self.tokens_per_second or newest
        self.tokens_per_second = (1 - _NEWEST_STEP_WEIGHT) * average + _NEWEST_STEP_WEIGHT * newest
