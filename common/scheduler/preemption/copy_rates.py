"""Measured rates of copying pages and of computing prompts."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable

import torch

from ...distributed.agreement import RankAgreement

_PROBE_BYTES = 16 << 20
_MIN_STEP_TOKENS = 32  # shorter steps measure the cost of a launch
_NEWEST_STEP_WEIGHT = 0.2  # in the moving average
_OPTIMISM = 0.02


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
        self.tokens_per_second = _with_newest(self.tokens_per_second, num_tokens, now - max(launched, previous_end))


class AgreedRates:
    """The rates of the slowest rank, by which all ranks of a group decide alike; ``poll`` once a step.

    ``link``: bytes a second between device and host memory; ``prefill``: prompt tokens a second; ``storage``: bytes a
    second of reads. The last two are 0 while they are not known.
    """

    def __init__(self, link_bandwidth: float, group: RankAgreement, prefill_rate: PrefillRate | None = None, *,
                 always_load: bool = False):
        """``always_load``: ``should_load`` and ``should_read`` say yes, whatever the rates are."""
        self.prefill_rate = prefill_rate or PrefillRate()
        self.storage_rate: Callable[[], float] = lambda: 0.0
        """Bytes a second at which this rank's storage has read lately; 0 while that is not known."""
        self._link_bandwidth = link_bandwidth
        self._group = group
        self._always_load = always_load
        self._read_rate, self._belief = 0.0, 1.0
        self._measured = (-1.0, -1.0, -1.0)
        self._rounded: dict[int, tuple[int, int, int]] = {}
        self.link, self.prefill, self.storage = 0, 0, 0
        self.poll()

    def poll(self) -> None:
        """Take over what the ranks agree on."""
        ((self.link, self.prefill, self.storage),) = self._group.min_by_key("rates", [0], self._sample,
                                                                            (0, 0, 0)).tolist()

    def _sample(self) -> dict[int, tuple[int, int, int]]:
        """Values in steps of 5 %, so that ranks need not report each small change."""
        if (read_rate := self.storage_rate()) != self._read_rate:
            self._read_rate, self._belief = read_rate, 1.0
        measured = self._link_bandwidth, self.prefill_rate.tokens_per_second, read_rate * self._belief
        if measured != self._measured:
            self._measured = measured
            link, prefill, storage = map(_rounded, measured)
            self._rounded = {0: (link, prefill, storage)}
        return self._rounded

    def copy_is_cheaper(self, num_bytes: int, num_tokens: int) -> bool:
        """True where copying ``num_bytes``, those that are queued before included, between device and host memory takes
        less time than computing ``num_tokens``; also without a measured prefill rate (decode servers compute no
        prompts)."""
        return self._is_cheaper(num_bytes, num_tokens, self.link)

    def should_load(self, num_bytes: int, num_tokens: int) -> bool:
        """``copy_is_cheaper``, of pages that a tier has."""
        return self._always_load or self._is_cheaper(num_bytes, num_tokens, self.link)

    def should_read(self, num_bytes: int, num_tokens: int) -> bool:
        """``should_load``, of pages that come from the storage; True until that was measured. After each read that
        seemed too slow the storage is believed to be faster by 2 %, until one is measured again."""
        if self._always_load or self._is_cheaper(num_bytes, num_tokens, self.storage):
            return True
        self._belief *= 1 + _OPTIMISM
        return False

    def _is_cheaper(self, num_bytes: int, num_tokens: int, bandwidth: int) -> bool:
        return not self.prefill or not bandwidth or num_bytes * self.prefill < num_tokens * bandwidth

    def page_costs(self, page_bytes: int, page_size: int) -> dict[str, float]:
        """Times to load a page from host memory and from the storage, as shares of that to compute it, by the names of
        their gauges; without those that are not known. Pages that are cheaper to compute are computed: their share is
        1."""
        found: dict[str, float] = {}
        if not self.prefill or not self.link:
            return found
        compute, load = page_size / self.prefill, page_bytes / self.link
        most = math.inf if self._always_load else 1.0
        found["tier_host_page_cost"] = min(most, load / compute)
        if self.storage:
            found["tier_storage_page_cost"] = min(most, (load + page_bytes / self.storage) / compute)
        return found

    def compute_seconds(self, num_tokens: int) -> float:
        """Seconds that computing ``num_tokens`` takes; 0 where that is not known."""
        return num_tokens / self.prefill if self.prefill else 0.0


def _with_newest(average: float, amount: int, seconds: float) -> float:
    """The moving average of a rate after ``amount`` in ``seconds``; 0 before the first one."""
    newest = amount / max(seconds, 1e-9)
    return (1 - _NEWEST_STEP_WEIGHT) * (average or newest) + _NEWEST_STEP_WEIGHT * newest


def _rounded(value: float) -> int:
    return int(1.05 ** int(math.log(value, 1.05))) if value >= 1 else 0
