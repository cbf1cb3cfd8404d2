"""Token buckets, shares of API keys and the estimate of TTFT: what admission limits requests by. No I/O.

Their numbers are in this process, or in memory that several processes share.
"""

from __future__ import annotations

from typing import Protocol


class FloatCells(Protocol):
    """Two numbers that are read and written by index: a list, or a view of shared memory."""

    def __getitem__(self, index: int, /) -> float: ...
    def __setitem__(self, index: int, value: float, /) -> None: ...


class TokenBucket:
    """Token bucket of ``rate`` requests a second, which saves the tokens of one second (at least one).

    ``cells`` are the level in tokens and the time of the last refill. A time of 0 means a bucket that was never used:
    it is full. All buckets over the same memory are one.
    """

    __slots__ = ("_rate", "_capacity", "_cells")

    def __init__(self, rate: float, now: float, cells: FloatCells | None = None):
        self._rate = rate
        self._capacity = max(1.0, rate)
        self._cells: FloatCells = [0.0, 0.0] if cells is None else cells
        if not self._cells[1]:
            self._cells[0], self._cells[1] = self._capacity, now

    def _refill(self, now: float) -> float:
        """Adds the tokens of the time since the last refill; returns the level."""
        cells = self._cells
        level = min(self._capacity, cells[0] + (now - cells[1]) * self._rate)
        cells[0], cells[1] = level, now
        return level

    def wait(self, now: float) -> float:
        """Seconds until a request may pass; 0 when it may now."""
        # Sums of small refills fall short of 1 by rounding; a nanotoken must not cost a client a second.
        return max(0.0, (1 - 1e-9 - self._refill(now)) / self._rate)

    def take(self) -> None:
        self._cells[0] -= 1

    def full(self, now: float) -> bool:
        return self._refill(now) >= self._capacity


class TtftState(Protocol):
    """The load of requests that wait for their first token, and seconds that a unit of it adds to the next one's
    wait."""

    waiting: int
    pace: float


class LocalTtftState:
    """The state of a router that is one process."""

    __slots__ = ("waiting", "pace")

    def __init__(self) -> None:
        self.waiting = 0
        self.pace = 0.0


UNIT_TOKENS = 2048
"""Prompt tokens that add as much to the wait of others as a further short request."""


def load_of(prompt_tokens: int) -> int:
    """The load of a request that waits for its first token."""
    return 1 + prompt_tokens // UNIT_TOKENS


class TtftEstimate:
    """Time to the first token, from how long others took and how much load waited before them.

    What is learnt is the pace: a request's TTFT divided by the load (``load_of``) that waited for first tokens when it
    came, its own included. More waiting prompts then mean a later token, in proportion, and parallel workers show as a
    quicker pace. Moving average with a weight of 1/8.
    """

    __slots__ = ("_state",)

    def __init__(self, state: TtftState | None = None) -> None:
        self._state: TtftState = LocalTtftState() if state is None else state

    @property
    def waiting(self) -> int:
        return self._state.waiting

    def next(self, load: int = 1) -> float:
        """Estimated seconds for one more request; 0 while none waits, so that a bad time is unlearnt."""
        waiting = self._state.waiting
        return self._state.pace * (waiting + load) if waiting else 0.0

    def begin(self, load: int = 1) -> int:
        """Counts a request that begins to wait; returns its position, for ``observe``."""
        self._state.waiting += load
        return self._state.waiting

    def end(self, load: int = 1) -> None:
        """Counts a request that waits no longer."""
        self._state.waiting -= load

    def observe(self, position: int, seconds: float) -> None:
        """Learns from a first token that came after ``seconds`` to a request with a load of ``position`` before it, its
        own included."""
        state, pace = self._state, seconds / position
        before = state.pace
        state.pace = before + (pace - before) / 8 if before else pace


class KeyShare(Protocol):
    """One API key's share of the router: its running requests, and its rate where that is limited."""

    running: int
    bucket: TokenBucket | None


class LocalKeyShare:
    """The share of a key in a router that is one process."""

    __slots__ = ("running", "bucket")

    def __init__(self, bucket: TokenBucket | None):
        self.running = 0
        self.bucket: TokenBucket | None = bucket
