"""sglang-router's ``bucket``: prompts of like length to one worker, so that short ones do not wait for long ones.

Each worker has a range of lengths. The ranges are adjusted at every interval so that the recent prompts would have
given each worker equally many bytes; between two adjustments, workers whose bytes differ too much are balanced.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from heapq import heappop, heappush
from itertools import accumulate
from random import Random

from ..config.policy import ROUTING_POLICIES, PolicyArgs
from ..workers.registry import Worker
from .base import Decision, Policy, prompt_text

_INITIAL_MAX_LENGTH = 4096
"""Lengths up to here are divided evenly until prompts have been seen."""
_SAMPLE_SIZE = 4096
"""Lengths that the ranges are derived from: sorting them takes 0.3 ms, sorting 100,000 would delay every stream."""


class _RecentBytes:
    """Bytes recently sent to each worker; the least and the most take logarithmic time."""

    def __init__(self, count: int):
        self.bytes = [0] * count
        self._least = [(0, index) for index in range(count)]
        self._most = [(0, index) for index in range(count)]

    def add(self, index: int, size: int) -> None:
        self.bytes[index] += size
        heappush(self._least, (self.bytes[index], index))
        heappush(self._most, (-self.bytes[index], index))
        if len(self._least) > 8 * len(self.bytes) + 64:
            self._least = sorted((size, index) for index, size in enumerate(self.bytes))
            self._most = sorted((-size, index) for size, index in self._least)

    @property
    def least_index(self) -> int:
        while self._least[0][0] != self.bytes[self._least[0][1]]:
            heappop(self._least)  # It has been overtaken by another entry for the same worker.
        return self._least[0][1]

    @property
    def most(self) -> int:
        while -self._most[0][0] != self.bytes[self._most[0][1]]:
            heappop(self._most)
        return -self._most[0][0]


class Bucket:
    """By the prompt's length, unless the busiest worker got ``balance_abs_threshold`` bytes and
    ``balance_rel_threshold`` times more than the idlest one within the last ``interval`` seconds: then the idlest."""

    read = staticmethod(prompt_text)

    def __init__(self, rng: Random, *, balance_abs_threshold: int = 64, balance_rel_threshold: float = 1.5,
                 interval: float = 5.0):
        self._rng = rng
        self._abs = balance_abs_threshold
        self._rel = balance_rel_threshold
        self._interval = interval
        self._next_adjustment = 0.0
        self._workers: Sequence[Worker] = ()
        self._work = _RecentBytes(1)
        self._recent: list[tuple[int, int]] = []
        self._past: deque[tuple[float, list[tuple[int, int]]]] = deque()
        self._lengths: list[int] = []
        self._num_seen = 0
        self._sorted: list[int] = []
        self.bounds: list[int] = []
        """The greatest length of each worker's range; the last worker's range has no end."""

    def choose(self, workers: Sequence[Worker], subject: bytes) -> Decision:
        # A list lacks workers that failed this request.
        if isinstance(workers, tuple) and workers is not self._workers:
            self._reset(workers)
        if workers is not self._workers:
            return Decision(self._rng.choice(workers), "retry")
        size, work = len(subject), self._work
        index, reason = bisect_left(self.bounds, size), "length"
        least_index = work.least_index
        least, most = work.bytes[least_index], work.most
        if most - least > self._abs and most > least * self._rel:
            index, reason = least_index, "balance"
        work.add(index, size)
        self._recent.append((index, size))
        self._sample(size)
        return Decision(workers[index], reason)

    def sweep(self, now: float) -> None:
        """Called every second or so; ``now`` in seconds."""
        if self._recent:
            self._past.append((now, self._recent))
            self._recent = []
        while self._past and self._past[0][0] <= now - self._interval:
            for index, size in self._past.popleft()[1]:
                self._work.add(index, -size)
        if now >= self._next_adjustment:
            self._adjust()
            self._next_adjustment = now + self._interval

    def _sample(self, size: int) -> None:
        """Adds a length to a fair sample of those since the last adjustment."""
        self._num_seen += 1
        if len(self._lengths) < _SAMPLE_SIZE:
            self._lengths.append(size)
        elif (index := self._rng.randrange(self._num_seen)) < _SAMPLE_SIZE:
            self._lengths[index] = size

    def _adjust(self) -> None:
        """Derives the ranges from the lengths since the last adjustment."""
        if self._lengths:
            self._sorted = sorted(self._lengths)
            self._lengths, self._num_seen = [], 0
            self.bounds = self._bounds(len(self._workers))

    def _bounds(self, count: int) -> list[int]:
        if not self._sorted:
            return [index * _INITIAL_MAX_LENGTH // count - 1 for index in range(1, count)]
        sums = list(accumulate(self._sorted))
        return [self._sorted[min(bisect_left(sums, sums[-1] * index / count), len(sums) - 1)]
                for index in range(1, count)]

    def _reset(self, workers: Sequence[Worker]) -> None:
        self.bounds = self._bounds(len(workers))
        self._workers, self._work = workers, _RecentBytes(len(workers))
        self._recent, self._past = [], deque()


@ROUTING_POLICIES.register("bucket")
def make(args: PolicyArgs, rng: Random) -> Policy:
    return Bucket(rng, balance_abs_threshold=args.balance_abs_threshold,
                  balance_rel_threshold=args.balance_rel_threshold, interval=args.bucket_adjust_interval_secs)
