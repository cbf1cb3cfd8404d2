"""Who may begin now, who waits, who is turned away: decided before a worker is chosen. Pure; the clock is injected.

A request passes, in this order: rates (everybody's, then its key's), its key's concurrency, the estimate of its TTFT
where one is promised, and the concurrency of all. Only for the last there is a queue, by priority, then by arrival.
"""

from __future__ import annotations

import dataclasses
import heapq
import itertools
from collections.abc import Callable

from ...common.api.errors import Overloaded, ServingError

_SPARE = 64
"""Requests that wait no more and are still listed, beyond as many as do wait: each keeps its body."""
_MAX_KEYS = 10_000
"""Keys that are remembered at once; above it, those without requests and with a full bucket are forgotten."""


REFUSALS = ("rate", "key", "slo", "queue_full", "queue_timeout")
"""Why requests are not let in."""


@dataclasses.dataclass(frozen=True)
class AdmissionRules:
    """0 means no limit. Rates are requests a second, times are in seconds."""

    max_concurrent: int = 0
    queue_size: int = 100
    queue_timeout: float = 60.0
    rate: float = 0.0
    max_concurrent_per_key: int = 0
    rate_per_key: float = 0.0
    slo_ttft: float = 0.0

    @property
    def active(self) -> bool:
        return bool(self.max_concurrent or self.rate or self.per_key or self.slo_ttft)

    @property
    def per_key(self) -> bool:
        return bool(self.max_concurrent_per_key or self.rate_per_key)


class QueueTimeout(ServingError):
    """408, as sglang-router's; OpenAI's clients try it again."""

    status = 408
    type = "rate_limit_error"
    code = "queue_timeout"


class TokenBucket:
    """``rate`` requests a second, a second's worth of them at once (at least one)."""

    __slots__ = ("_rate", "_capacity", "_level", "_at")

    def __init__(self, rate: float, now: float):
        self._rate = rate
        self._capacity = self._level = max(1.0, rate)
        self._at = now

    def _refill(self, now: float) -> None:
        self._level = min(self._capacity, self._level + (now - self._at) * self._rate)
        self._at = now

    def wait(self, now: float) -> float:
        """Seconds until a request may pass; 0 when it may now."""
        self._refill(now)
        # Sums of small refills fall short of 1 by rounding; a nanotoken must not cost a client a second.
        return max(0.0, (1 - 1e-9 - self._level) / self._rate)

    def take(self) -> None:
        self._level -= 1

    def full(self, now: float) -> bool:
        self._refill(now)
        return self._level >= self._capacity


class TtftEstimate:
    """Time to the first token, from how long others took and how many waited before them.

    What is learnt is the pace: a request's TTFT divided by the number of requests that waited for their first token
    when it came, itself included. More waiting requests then mean a later token, in proportion, and parallel workers
    show as a quicker pace. Moving average with a weight of 1/8.
    """

    __slots__ = ("waiting", "_pace")

    def __init__(self) -> None:
        self.waiting = 0
        self._pace = 0.0

    @property
    def next(self) -> float:
        """Estimated seconds for one more request; 0 when nobody waits, so that a bad time is unlearnt."""
        return self._pace * (self.waiting + 1) if self.waiting else 0.0

    def begin(self) -> int:
        """A request begins to wait; returns its place, for ``observe``."""
        self.waiting += 1
        return self.waiting

    def observe(self, place: int, seconds: float) -> None:
        pace = seconds / place
        self._pace += (pace - self._pace) / 8 if self._pace else pace


class _Key:
    """One API key's share."""

    __slots__ = ("running", "bucket")

    def __init__(self, bucket: TokenBucket | None):
        self.running = 0
        self.bucket = bucket


class Permit:
    """The right to run, of one request; ``finished`` gives it back, once."""

    __slots__ = ("_admission", "_key", "_place", "_since")

    def __init__(self, admission: Admission, key: _Key | None, place: int, since: float):
        self._admission = admission
        self._key = key
        self._place = place
        """Among those that wait for a first token; 0 when it is none of them (any more)."""
        self._since = since

    def first_token(self) -> None:
        if self._place:
            self._admission.first_token(self._place, self._since)
            self._place = 0

    def finished(self) -> None:
        if self._place:
            self._admission.ttft.waiting -= 1
        if self._key is not None:
            self._key.running -= 1
        self._admission.leave()


class Waiting:
    """A request in the queue: ``start(ticket)`` or ``refuse(error)`` ends its wait, or ``leave`` by its client."""

    __slots__ = ("_admission", "start", "refuse", "key", "place", "since", "queued")

    def __init__(self, admission: Admission, start: Callable[[Permit], None], refuse: Callable[[ServingError], None],
                 key: _Key | None, place: int, since: float):
        self._admission = admission
        self.start = start
        self.refuse = refuse
        self.key = key
        self.place = place
        self.since = since
        self.queued = True

    def leave(self) -> None:
        self._admission.drop(self)


class Admission:
    def __init__(self, rules: AdmissionRules, now: Callable[[], float]):
        self.rules = rules
        self.running = 0
        self.queued = 0
        self.refused: dict[str, int] = dict.fromkeys(REFUSALS, 0)
        self.ttft = TtftEstimate()
        self._now = now
        self._bucket = TokenBucket(rules.rate, now()) if rules.rate else None
        self._keys: dict[bytes, _Key] = {}
        self._order = itertools.count()
        self._heap: list[tuple[int, int, Waiting]] = []
        self._arrivals: list[Waiting] = []
        self._starting = False
        # Most routers limit nothing but the total: their requests share one ticket.
        self._common = None if rules.per_key or rules.slo_ttft else Permit(self, None, 0, 0.0)

    def walk_in(self) -> Permit | None:
        """Let a request run where there is room and nothing but the total is limited; None: ``enter`` decides."""
        if self._common is None or self._bucket is not None or 0 < self.rules.max_concurrent <= self.running:
            return None
        self.running += 1
        return self._common

    def enter(self, key: bytes, streamed: bool, priority: Callable[[], int], start: Callable[[Permit], None],
              refuse: Callable[[ServingError], None]) -> Permit | Waiting:
        """Let a request run (a Ticket) or wait (then ``start`` or ``refuse`` is called); raises Overloaded.

        ``key`` is the client's API key, ``streamed`` whether it will see its first token at once, and ``priority`` is
        asked only of those that have to wait; higher goes first.
        """
        rules = self.rules
        now = self._now()
        owner = self._check(key, now) if self._bucket is not None or rules.per_key else None
        place = self._check_slo() if rules.slo_ttft and streamed else 0
        full = self._full()
        if full and self.queued >= rules.queue_size:
            raise self._refusal("queue_full", "The router is busy and its queue is full.", 1.0)
        if self._bucket is not None:
            self._bucket.take()
        if owner is not None:
            owner.running += 1
            if owner.bucket is not None:
                owner.bucket.take()
        if place:
            self.ttft.begin()
        if full:
            waiting = Waiting(self, start, refuse, owner, place, now)
            heapq.heappush(self._heap, (-priority(), next(self._order), waiting))
            self._arrivals.append(waiting)
            self.queued += 1
            return waiting
        self.running += 1
        return self._common or Permit(self, owner, place, now)

    def close(self) -> None:
        """Nothing of it is used any more."""

    def _full(self) -> bool:
        return 0 < self.rules.max_concurrent <= self.running

    def leave(self) -> None:
        """A running request has ended: the next may begin."""
        self.running -= 1
        if not self.queued or self._starting:  # A request that fails at once ends within start(): the loop goes on.
            return
        self._starting = True
        try:
            while self.queued and self.running < self.rules.max_concurrent:
                waiting = heapq.heappop(self._heap)[2]
                if waiting.queued:
                    self._unqueue(waiting)
                    self.running += 1
                    waiting.start(self._common or Permit(self, waiting.key, waiting.place, waiting.since))
        finally:
            self._starting = False

    def drop(self, waiting: Waiting) -> None:
        """A waiting request leaves the queue without having run."""
        self._unqueue(waiting)
        if waiting.key is not None:
            waiting.key.running -= 1
        if waiting.place:
            self.ttft.waiting -= 1

    def sweep(self) -> float | None:
        """Refuse those that waited for too long; returns when to look again, on the clock's time (None: no need)."""
        now, limit = self._now(), self.rules.queue_timeout
        late = [waiting for waiting in self._arrivals if waiting.queued and now - waiting.since >= limit]
        for waiting in late:
            self.drop(waiting)
            waiting.refuse(self._refusal("queue_timeout", f"The request waited for {limit:g} s and no place came free.",
                                         1.0, QueueTimeout))
        self._arrivals = [waiting for waiting in self._arrivals if waiting.queued]
        return self._arrivals[0].since + limit if self._arrivals else None

    def first_token(self, place: int, since: float) -> None:
        self.ttft.waiting -= 1
        self.ttft.observe(place, self._now() - since)

    # ------------------------------------------------------------------ inside

    def _unqueue(self, waiting: Waiting) -> None:
        assert waiting.queued
        waiting.queued = False
        self.queued -= 1
        if max(len(self._heap), len(self._arrivals)) > 2 * self.queued + _SPARE:
            self._arrivals = [other for other in self._arrivals if other.queued]
            self._heap = [entry for entry in self._heap if entry[2].queued]
            heapq.heapify(self._heap)

    def _check(self, key: bytes, now: float) -> _Key | None:
        if self._bucket is not None and (wait := self._bucket.wait(now)):
            raise self._refusal("rate", "The router takes no more requests a second.", wait)
        if not self.rules.per_key:
            return None
        owner = self._owner(key, now)
        if owner.bucket is not None and (wait := owner.bucket.wait(now)):
            raise self._refusal("key", "This API key has sent as many requests a second as it may.", wait)
        if 0 < self.rules.max_concurrent_per_key <= owner.running:
            raise self._refusal("key", "This API key has as many requests running as it may.", 1.0)
        return owner

    def _owner(self, key: bytes, now: float) -> _Key:
        return self._keys.get(key) or self._new_key(key, now)

    def _new_key(self, key: bytes, now: float) -> _Key:
        if len(self._keys) >= _MAX_KEYS:
            self._keys = {name: known for name, known in self._keys.items()
                          if known.running or (known.bucket is not None and not known.bucket.full(now))}
        owner = self._keys[key] = _Key(TokenBucket(self.rules.rate_per_key, now) if self.rules.rate_per_key else None)
        return owner

    def _check_slo(self) -> int:
        """The request's place among those that wait for a first token."""
        estimate = self.ttft.next
        if estimate > self.rules.slo_ttft:
            raise self._refusal("slo", f"The first token would come after about {estimate:.1f} s, later than promised.",
                                estimate - self.rules.slo_ttft)
        return self.ttft.waiting + 1

    def _refusal(self, why: str, message: str, retry_after: float,
                 kind: type[ServingError] = Overloaded) -> ServingError:
        self.refused[why] += 1
        return kind(message, retry_after=retry_after)
