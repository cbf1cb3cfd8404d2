"""Admission control: who may begin now, who waits, who is refused, decided before a worker is chosen. No I/O.

A request passes, in this order: rates (the router's, then its key's), its key's concurrency, the estimate of its TTFT
where one is promised, and the concurrency of all. Only the last has a queue, by priority, then by arrival.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable
from typing import Protocol

from ...common.api.errors import Overloaded, ServingError
from ..config.admission import REFUSALS, AdmissionRules
from .limits import KeyShare, LocalKeyShare, TokenBucket, TtftEstimate

_MAX_CANCELLED = 64
"""Cancelled requests that stay listed, beyond as many as wait: each keeps its body."""
_MAX_KEYS = 10_000
"""Keys that are remembered at once; above it, those without requests and with a full bucket are forgotten."""


class QueueTimeout(ServingError):
    """408, as sglang-router's; OpenAI's clients try it again."""

    status = 408
    type = "rate_limit_error"
    code = "queue_timeout"


class AdmissionState(Protocol):
    """The numbers that admission decides by: of one process, or in memory that several processes share."""

    running: int
    queued: int
    ttft: TtftEstimate
    bucket: TokenBucket | None
    """The rate of all requests, where it is limited."""

    def share_of(self, key: bytes, now: float) -> KeyShare | None:
        """The share of an API key; None where no more keys can be remembered."""

    def head_changed(self, head: Waiting | None) -> None:
        """Notes the request that is now the first of the queue."""


class LocalAdmissionState:
    """The numbers of a router that is one process."""

    __slots__ = ("running", "queued", "ttft", "bucket", "_rules", "_shares")

    def __init__(self, rules: AdmissionRules, now: float):
        self.running = 0
        self.queued = 0
        self.ttft = TtftEstimate()
        self.bucket: TokenBucket | None = TokenBucket(rules.rate, now) if rules.rate else None
        self._rules = rules
        self._shares: dict[bytes, LocalKeyShare] = {}

    def share_of(self, key: bytes, now: float) -> KeyShare | None:
        return self._shares.get(key) or self._new_share(key, now)

    def head_changed(self, head: Waiting | None) -> None:
        """Nothing else depends on it."""

    def _new_share(self, key: bytes, now: float) -> LocalKeyShare:
        if len(self._shares) >= _MAX_KEYS:
            self._shares = {name: share for name, share in self._shares.items()
                            if share.running or (share.bucket is not None and not share.bucket.full(now))}
        rate = self._rules.rate_per_key
        share = self._shares[key] = LocalKeyShare(TokenBucket(rate, now) if rate else None)
        return share


class Permit:
    """The right of a request to run; ``release`` gives it back, once."""

    __slots__ = ("_admission", "_charged", "_share", "_position", "_since", "_load")

    def __init__(self, admission: Admission, share: KeyShare | None, position: int, since: float, load: int = 1):
        self._admission = admission
        self._charged = share is not None or position > 0
        self._share = share
        self._position = position
        """The load that waits for first tokens up to it; 0 when it does not wait (any more)."""
        self._since = since
        self._load = load

    def first_token(self) -> None:
        """Learns from the time that the request's first token took."""
        if self._position:
            self._admission.first_token(self._position, self._since, self._load)
            self._position = 0

    def release(self) -> None:
        """Ends the request; the next may begin."""
        if self._charged:
            self.refund()
        self._admission.on_release()

    def refund(self) -> None:
        """Takes the request off its key's share and off the requests that wait for a first token."""
        if self._position:
            self._admission.ttft.end(self._load)
        if self._share is not None:
            self._share.running -= 1


class Waiting:
    """A request in the queue: ``start(permit)`` or ``refuse(error)`` ends its wait, or ``cancel`` by its client."""

    __slots__ = ("_admission", "start", "refuse", "permit", "priority", "since", "queued")

    def __init__(self, admission: Admission, start: Callable[[Permit], None], refuse: Callable[[ServingError], None],
                 permit: Permit, priority: int, since: float):
        self._admission = admission
        self.start = start
        self.refuse = refuse
        self.permit = permit
        self.priority = priority
        self.since = since
        self.queued = True

    def cancel(self) -> None:
        self._admission.cancel(self)


class WaitQueue:
    """Waiting requests by priority, the highest first, then by arrival. Cancelled ones are dropped in bulk."""

    def __init__(self) -> None:
        self._order = itertools.count()
        self._heap: list[tuple[int, int, Waiting]] = []
        self._arrivals: list[Waiting] = []
        self._size = 0

    @property
    def first(self) -> Waiting | None:
        while self._heap and not self._heap[0][2].queued:
            heapq.heappop(self._heap)
        return self._heap[0][2] if self._heap else None

    def add(self, waiting: Waiting) -> None:
        heapq.heappush(self._heap, (-waiting.priority, next(self._order), waiting))
        self._arrivals.append(waiting)
        self._size += 1

    def remove(self, waiting: Waiting) -> None:
        assert waiting.queued
        waiting.queued = False
        self._size -= 1
        if max(len(self._heap), len(self._arrivals)) > 2 * self._size + _MAX_CANCELLED:
            self._arrivals = [other for other in self._arrivals if other.queued]
            self._heap = [entry for entry in self._heap if entry[2].queued]
            heapq.heapify(self._heap)

    def overdue(self, now: float, limit: float) -> list[Waiting]:
        """The requests that have waited for ``limit`` seconds or longer."""
        return [waiting for waiting in self._arrivals if waiting.queued and now - waiting.since >= limit]

    def oldest(self) -> Waiting | None:
        self._arrivals = [waiting for waiting in self._arrivals if waiting.queued]
        return self._arrivals[0] if self._arrivals else None


class AdmissionControl(Protocol):
    """Admission as its callers use it."""

    rules: AdmissionRules
    refused: dict[str, int]

    @property
    def running(self) -> int: ...
    @property
    def queued(self) -> int: ...
    def try_acquire(self) -> Permit | None: ...
    def acquire(self, key: bytes, streamed: bool, priority: Callable[[], int], start: Callable[[Permit], None],
                refuse: Callable[[ServingError], None], *, slo: float = 0.0, load: int = 1) -> Permit | Waiting: ...
    def expire(self) -> float | None: ...
    def close(self) -> None: ...


class Admission:
    """Admission by ``rules`` over the numbers of ``state``, on the caller's clock.

    ``on_release`` is called at the end of each request that ran, instead of ``release``.
    """

    def __init__(self, rules: AdmissionRules, now: Callable[[], float], *, state: AdmissionState | None = None,
                 on_release: Callable[[], None] | None = None):
        self.rules = rules
        self.refused: dict[str, int] = dict.fromkeys(REFUSALS, 0)
        self._state = state = LocalAdmissionState(rules, now()) if state is None else state
        self.ttft = state.ttft
        self.queue = WaitQueue()
        self.on_release = on_release or self.release
        self._now = now
        self._starting = False
        # Most routers limit nothing but the total: their requests share one permit.
        self._shared_permit = None if rules.per_key or rules.estimates_ttft else Permit(self, None, 0, 0.0)
        self.immediate = self._shared_permit if state.bucket is None else None
        """The permit of requests that nothing but the total limits; None where there are other limits."""

    @property
    def running(self) -> int:
        return self._state.running

    @property
    def queued(self) -> int:
        return self._state.queued

    def try_acquire(self) -> Permit | None:
        """Lets a request run where fewer than the most run and nothing else is limited; None: ``acquire`` decides."""
        state = self._state
        if self.immediate is None or 0 < self.rules.max_concurrent <= state.running:
            return None
        state.running += 1
        return self.immediate

    def acquire(self, key: bytes, streamed: bool, priority: Callable[[], int], start: Callable[[Permit], None],
                refuse: Callable[[ServingError], None], *, slo: float = 0.0, load: int = 1) -> Permit | Waiting:
        """Lets a request run (a Permit) or wait (then ``start`` or ``refuse`` is called); raises Overloaded.

        ``key`` is the client's API key, ``streamed`` whether it will see its first token at once. ``priority`` is asked
        only of requests that have to wait; higher goes first. ``slo``: the TTFT in seconds that the request wants
        (0: that of the rules); ``load``: what its prompt adds to the wait of others (``load_of``).
        """
        rules, state, now = self.rules, self._state, self._now()
        share = self._check_rates(key, now) if state.bucket is not None or rules.per_key else None
        if rules.estimates_ttft and streamed:
            self._check_slo(slo, load)
        # Requests that wait go first, even where one could run this moment.
        full = rules.max_concurrent > 0 and (state.running >= rules.max_concurrent or state.queued > 0)
        if full and state.queued >= rules.queue_size:
            raise self._refusal("queue_full", "The router is busy and its queue is full.", 1.0)
        permit = self._charge(share, load if rules.estimates_ttft and streamed else 0, now)
        if not full:
            state.running += 1
            return permit
        waiting = Waiting(self, start, refuse, permit, priority(), now)
        self.queue.add(waiting)
        state.queued += 1
        state.head_changed(self.queue.first)
        return waiting

    def release(self) -> None:
        """Counts a running request that has ended, and lets the next begin."""
        state = self._state
        state.running -= 1
        if not state.queued or self._starting:  # A request that fails at once ends within start(): the loop continues.
            return
        self._starting = True
        try:
            while state.queued and state.running < self.rules.max_concurrent:
                waiting = self.take_first()
                waiting.start(waiting.permit)
        finally:
            self._starting = False

    def take_first(self) -> Waiting:
        """Moves the first of the queue (not empty) to the running requests."""
        waiting = self.queue.first
        assert waiting is not None
        self._unqueue(waiting)
        self._state.running += 1
        return waiting

    def cancel(self, waiting: Waiting) -> None:
        """Takes a request out of the queue that did not run."""
        self._unqueue(waiting)
        waiting.permit.refund()

    def expire(self) -> float | None:
        """Refuses requests that waited for too long; returns the clock's time for the next call (None: no need)."""
        limit = self.rules.queue_timeout
        for waiting in self.queue.overdue(self._now(), limit):
            self.cancel(waiting)
            waiting.refuse(self._refusal("queue_timeout", f"The request waited for {limit:g} s and no place came free.",
                                         1.0, QueueTimeout))
        oldest = self.queue.oldest()
        return oldest.since + limit if oldest is not None else None

    def first_token(self, position: int, since: float, load: int) -> None:
        self.ttft.end(load)
        self.ttft.observe(position, self._now() - since)

    def close(self) -> None:
        """Nothing has to be closed."""

    # ------------------------------------------------------------------ inside

    def _unqueue(self, waiting: Waiting) -> None:
        self.queue.remove(waiting)
        self._state.queued -= 1
        self._state.head_changed(self.queue.first)

    def _charge(self, share: KeyShare | None, load: int, now: float) -> Permit:
        """Takes the tokens of a request that passed all checks; ``load``: 0 where its TTFT does not count."""
        if self._state.bucket is not None:
            self._state.bucket.take()
        if share is not None:
            share.running += 1
            if share.bucket is not None:
                share.bucket.take()
        position = self.ttft.begin(load) if load else 0
        return self._shared_permit or Permit(self, share, position, now, load)

    def _check_rates(self, key: bytes, now: float) -> KeyShare | None:
        """The share of a key that is within its limits, where keys have any; raises Overloaded."""
        bucket = self._state.bucket
        if bucket is not None and (wait := bucket.wait(now)):
            raise self._refusal("rate", "The router takes no more requests a second.", wait)
        if not self.rules.per_key:
            return None
        share = self._state.share_of(key, now)
        if share is None:
            raise self._refusal("key", "Too many API keys have requests at once.", 1.0)
        if share.bucket is not None and (wait := share.bucket.wait(now)):
            raise self._refusal("key", "This API key has sent as many requests a second as it may.", wait)
        if 0 < self.rules.max_concurrent_per_key <= share.running:
            raise self._refusal("key", "This API key has as many requests running as it may.", 1.0)
        return share

    def _check_slo(self, slo: float, load: int) -> None:
        """Raises Overloaded where the first token is expected later than the request wants, or than promised."""
        limit, than = (slo, f"its slo_ttft_ms of {slo * 1e3:g}") if slo else (self.rules.slo_ttft, "promised")
        estimate = self.ttft.next(load)
        if 0 < limit < estimate:
            raise self._refusal("slo", f"The first token would come after about {estimate:.1f} s, later than {than}.",
                                estimate - limit)

    def _refusal(self, why: str, message: str, retry_after: float,
                 kind: type[ServingError] = Overloaded) -> ServingError:
        self.refused[why] += 1
        return kind(message, retry_after=retry_after)
