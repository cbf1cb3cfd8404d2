"""What copying and computing cost here, measured."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

import torch

_PROBE_BYTES = 16 << 20
_SMALLEST_STEP = 32  # prompt tokens: shorter steps measure what a launch costs
_WEIGHT = 0.2  # of the newest step


def link_rate(device: torch.device) -> float:
    """Bytes a second between the device's memory and (pinned) host memory, the slower direction; takes milliseconds."""
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
    """Prompt tokens a second, as the last steps had it; 0 before the first one.

    Steps run one after the other: one's time begins when it was launched or the one before ended, whichever is later.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter):
        self._clock = clock
        self._begun: deque[tuple[float, int]] = deque()  # launch and prompt tokens of steps that have not ended
        self._ended = 0.0
        self.tokens_per_second = 0.0

    def begin(self, num_tokens: int) -> None:
        """A step is about to be launched that computes ``num_tokens`` of prompts; 0 if it decodes, too."""
        self._begun.append((self._clock(), num_tokens))

    def end(self) -> None:
        """The oldest step that has begun has run."""
        began, num_tokens = self._begun.popleft()
        now, before = self._clock(), self._ended
        self._ended = now
        if num_tokens < _SMALLEST_STEP:
            return
        newest = num_tokens / max(now - max(began, before), 1e-9)
        kept = self.tokens_per_second or newest
        self.tokens_per_second = (1 - _WEIGHT) * kept + _WEIGHT * newest
