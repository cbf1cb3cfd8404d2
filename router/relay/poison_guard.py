"""Requests that kill workers are stopped after the second one, and none of those that ran beside them is.

A request that was in flight on a worker when that died is a *suspect*, and mostly innocent. It is tried elsewhere like
any request whose worker failed, with one restriction: of all suspects a worker has one at a time in *quarantine*, until
that has answered, or lived longer than it had on the worker that died. The others wait for their turn, for some seconds
at most; youngest first, since what kills a worker mostly does so at once. So when another worker dies it is known which
of the suspects on it did it: its fingerprint, a hash of what it asks for, is refused for ``--poison-refusal-secs``.

A slow killer may leave quarantine before it strikes; what was in flight at three deaths is refused all the same. A
death counts once it is certain: an engine's last words, a refused connection, a health check without a good answer.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Sequence
from hashlib import blake2b
from time import perf_counter
from typing import TYPE_CHECKING, Protocol

import msgspec

from ...common.api.errors import InvalidRequest
from ...common.api.unreadable import UNREADABLE
from ..net.request import Request
from ..workers.ask import ask, get
from ..workers.registry import Role, Worker

if TYPE_CHECKING:
    from .client_response import ClientResponse
    from .dispatcher import Dispatcher

logger = logging.getLogger("baton.router")

KEPT_BODY_BYTES = 64 * 1024
"""Of a stream that cannot go on elsewhere, a longer prompt is not kept for its fingerprint's sake."""
MOST_DEATHS = 3
_SUSPECT_SECONDS = 60.0
"""How long a fingerprint is remembered of which nothing is proven."""
_MOST_RECORDS = 4096
_GATHER_SECONDS = 0.03
"""The suspects of one death come within this: they take their turns in order."""
_TICK_SECONDS = 0.02
_WAIT_SECONDS = 8.0
"""Longest wait for a turn. From then on a suspect runs beside others."""
_QUARANTINE_SECONDS = 2.0, 6.0
"""Shortest and longest quarantine without an answer: a worker under load takes a while to get to what kills it, and
answers that are not streamed may take minutes."""
_RESUMED_SECONDS = 0.5
"""A stream that goes on where it was meets what killed its worker within this, however long it had run."""
_OUTLIVED_SECONDS = 10.0
"""What lives for longer than twice its age at a death, and this, is no suspect any more."""
_AGAIN_SECONDS = 0.25
"""A peer may hear of an engine's death a moment before the API server in front of it, so that is asked twice."""
_NO_CONTENT = frozenset((
    "rid", "request_id", "user", "safety_identifier", "prompt_cache_key", "metadata", "priority", "session_id",
    "bootstrap_host", "bootstrap_port", "bootstrap_room", "bootstrap_previous_room", "data_parallel_rank",
    "disagg_prefill_dp_rank", "stream_options", "continuation"))
"""Fields that name a request or its place, and change with each try of a client."""

_decode_fields = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode


class PoisonRequest(InvalidRequest):
    """400, so that clients do not try again by themselves."""

    code = "poison_request"


def fingerprint(path: bytes, body: bytes) -> bytes:
    """A hash of what a request asks for, equal for a client's next try of it."""
    digest = blake2b(path, digest_size=16)
    try:
        fields = _decode_fields(body)
    except UNREADABLE:
        digest.update(body)
        return digest.digest()
    for name in sorted(fields.keys() - _NO_CONTENT):
        digest.update(b"%b\0%b\0" % (name.encode("utf-8", "surrogatepass"), bytes(fields[name])))
    return digest.digest()


class Deaths(msgspec.Struct, tag=True, frozen=True):
    """What is known of a fingerprint; processes of one router tell each other. No ``deaths``: it is cleared."""

    fingerprint: bytes
    role: Role
    deaths: int
    age: float
    """Seconds from the beginning of its attempt to the death."""
    seconds: float
    """How long this holds."""
    refused: bool = False


class Slots(Protocol):
    """Which workers have a suspect in quarantine."""

    def free(self, worker: Worker) -> bool: ...
    def take(self, worker: Worker) -> bool: ...
    def give(self, worker: Worker) -> None: ...


class LocalSlots:
    """Those of a router that is one process."""

    def __init__(self) -> None:
        self._taken: set[Worker] = set()

    def free(self, worker: Worker) -> bool:
        return worker not in self._taken

    def take(self, worker: Worker) -> bool:
        """Returns whether it was free."""
        if worker in self._taken:
            return False
        self._taken.add(worker)
        return True

    def give(self, worker: Worker) -> None:
        self._taken.discard(worker)


class Suspect:
    """A request under which a worker died, or may have: see ``PoisonGuard``.

    ``fresh``: it died in an earlier request of equal content, perhaps in the middle of its answer, so that the first
    byte proves nothing.
    """

    __slots__ = ("fingerprint", "role", "deaths", "age", "fresh", "entered_at", "deadline", "finished", "start",
                 "died_under", "_guard", "_on", "_runs_on", "_timer")

    def __init__(self, guard: PoisonGuard, mark: bytes, role: Role, deaths: int, age: float, *, fresh: bool):
        self.fingerprint = mark
        self.role = role
        """Of the worker that died last."""
        self.deaths = deaths
        self.age = age
        self.fresh = fresh
        self.entered_at = self.deadline = 0.0
        self.finished = False
        self.died_under: Worker | None = None
        self.start: Callable[[], None] = lambda: None
        self._guard = guard
        self._on: Worker | None = None
        self._runs_on: Worker | None = None
        self._timer: asyncio.TimerHandle | None = None

    def enter(self, worker: Worker) -> None:
        """An attempt begins, in quarantine if nobody else is there on its worker."""
        guard = self._guard
        self.entered_at, self.deadline = guard.loop.time(), 0.0
        if self.deaths:
            self._runs_on = worker
            guard.running[worker] += 1
        if self.deaths and guard.slots.take(worker):
            self._on = worker
            least, longest = _QUARANTINE_SECONDS
            self._timer = guard.loop.call_later(min(3 * self.age + least, longest), self.leave)

    def died_on(self, worker: Worker) -> bool:
        """Whether it was in quarantine on a worker that died, and the only suspect there: not beside one that waited in
        vain, or left quarantine without an answer. It stays until it is known what to make of that, so that nobody else
        is sent into the same death."""
        if self._timer is not None:
            self._timer.cancel()
        return self._on is worker and self._guard.running[worker] == 1

    def stop(self) -> None:
        """Its attempt is over, or has shown that it is harmless."""
        self.leave()
        on, self._runs_on = self._runs_on, None
        if on is not None:
            self._guard.running[on] -= 1
            if not self._guard.running[on]:
                del self._guard.running[on]

    def leave(self) -> None:
        """End the quarantine, if it lasts."""
        on, self._on = self._on, None
        if self._timer is not None:
            self._timer.cancel()
        if on is not None:
            self._guard.slots.give(on)
            self._guard.next_turn()

    def answered(self) -> None:
        """The first byte of what was still to come is there."""
        if not self.fresh:
            self.stop()

    def cleared(self) -> None:
        """The answer is complete."""
        self._guard.clear(self)

    def over(self) -> None:
        """The request has ended, one way or another."""
        self.finished = True
        self.stop()


class PoisonGuard:
    """All suspects of a router process, and what is known of fingerprints. ``seconds`` 0: nobody is suspected."""

    def __init__(self, dispatcher: Dispatcher, seconds: float, check: tuple[str, float]):
        """``check``: path and time limit of a health check. A worker without checks lives if it accepts connections."""
        self.loop = dispatcher.loop
        self.slots: Slots = LocalSlots()
        self.tell: Callable[[Deaths], None] = lambda deaths: None
        """Tells the other processes."""
        self.records: dict[bytes, tuple[Deaths, float]] = {}
        """By fingerprint, with the time until which it holds. Where there is none, requests need not be looked at."""
        self._dispatcher = dispatcher
        self._seconds = seconds
        self._check = check
        self.running: Counter[Worker] = Counter()
        """Suspects that have not answered, in quarantine or not."""
        self._waiting: list[Suspect] = []
        self._timer: asyncio.TimerHandle | None = None
        self._verdicts: dict[tuple[Worker, bool], asyncio.Task[bool]] = {}

    # ------------------------------------------------------------------ fingerprints

    def suspect(self, request: Request) -> Suspect | None:
        """What is known of a request that comes in; raises PoisonRequest for one that is refused."""
        found = self.records.get(mark := fingerprint(request.path, request.body))
        if found is None or found[1] <= self.loop.time():
            return None
        known, until = found
        if known.refused:
            self._dispatcher.metrics.poison_requests += 1
            raise self._refusal(until - self.loop.time())
        return Suspect(self, mark, known.role, known.deaths, known.age, fresh=True)

    def learn(self, deaths: Deaths) -> None:
        """Take in what another process found. A refusal is not taken back."""
        found = self.records.get(deaths.fingerprint)
        if found is not None and found[0].refused and not deaths.refused:
            return
        if not deaths.deaths:
            self.records.pop(deaths.fingerprint, None)
            return
        if len(self.records) >= _MOST_RECORDS and found is None:
            del self.records[next((mark for mark, (known, _) in self.records.items() if not known.refused),
                                  next(iter(self.records)))]
        self.records[deaths.fingerprint] = deaths, self.loop.time() + deaths.seconds

    def known(self) -> tuple[Deaths, ...]:
        """All of it, for a process that begins."""
        now = self.loop.time()
        return tuple(msgspec.structs.replace(deaths, seconds=until - now)
                     for deaths, until in self.records.values() if until > now)

    def sweep(self) -> None:
        """Forget what does not hold any more."""
        now = self.loop.time()
        for mark in [mark for mark, (_, until) in self.records.items() if until <= now]:
            del self.records[mark]

    def clear(self, suspect: Suspect) -> None:
        """A suspect has answered: its like is no suspect any more."""
        if suspect.fingerprint in self.records:
            self._note(Deaths(suspect.fingerprint, suspect.role, 0, 0.0, 0.0))

    def _note(self, deaths: Deaths) -> None:
        self.learn(deaths)
        self.tell(deaths)

    def _refusal(self, seconds: float) -> PoisonRequest:
        return PoisonRequest("This request was running when one worker after the other died, so it is refused for "
                             f"{max(1, round(seconds))} s; change it, and tell the operator.")

    # ------------------------------------------------------------------ turns

    def admit(self, suspect: Suspect, workers: Sequence[Worker], start: Callable[[], None]) -> Sequence[Worker]:
        """The workers that a suspect may be tried on now; none: ``start`` is called when it is its turn."""
        suspect.stop()
        now = self.loop.time()
        free = [worker for worker in workers if self.slots.free(worker)]
        if suspect.fresh:  # A client's next try need not wait: the crowd of the death has passed.
            return free or workers
        if not suspect.deadline:
            suspect.deadline = now + _WAIT_SECONDS
        elif free or now >= suspect.deadline:
            return free or workers
        suspect.start = start
        self._waiting.append(suspect)
        if self._timer is None:
            self._timer = self.loop.call_later(_GATHER_SECONDS, self._give_turns)
        return ()

    def next_turn(self) -> None:
        """A worker has nobody in quarantine any more."""
        if self._timer is not None and self.loop.time() + _TICK_SECONDS / 4 < self._timer.when():
            self._timer.cancel()
            self._timer = self.loop.call_later(_TICK_SECONDS / 4, self._give_turns)

    def _give_turns(self) -> None:
        waiting, self._waiting, self._timer = sorted(self._waiting, key=lambda suspect: suspect.age), [], None
        for suspect in waiting:
            if not suspect.finished:
                suspect.start()
        if self._waiting and self._timer is not None:
            self._timer.cancel()
            self._timer = self.loop.call_later(_TICK_SECONDS, self._give_turns)

    # ------------------------------------------------------------------ deaths

    def died(self, exchange: ClientResponse, worker: Worker, role: Role, *, go_on: Callable[[], None],
             certain: bool = False,
             by_peer: bool = False, at_boundary: bool = False) -> None:
        """A worker died under a request, for ``certain`` or perhaps, which is found out first; unless the request is
        refused for that, ``go_on`` is called. ``by_peer``: it is the other half of a pair that says so."""
        if not self._seconds:
            go_on()
            return
        suspect, quarantined = self._suspect_of(exchange, worker, role)
        if suspect.died_under is worker:
            go_on()  # It is dead still; there was nobody else to be tried on.
            return

        def decide(dead: bool) -> None:
            if dead:
                suspect.died_under = worker
                self._count(suspect, quarantined)
            suspect.leave()
            if suspect.finished:
                return
            if suspect.deaths >= MOST_DEATHS:
                exchange.refuse(self._refusal(self._seconds), at_boundary)
            else:
                go_on()

        if certain:
            decide(True)
        else:
            self._ask(worker, by_peer, decide)

    def ended_with(self, exchange: ClientResponse, worker: Worker, role: Role) -> None:
        """An answer ended with the last words of its engine, which its client has been told."""
        if self._seconds:
            self._count(*self._suspect_of(exchange, worker, role))

    def _suspect_of(self, exchange: ClientResponse, worker: Worker, role: Role) -> tuple[Suspect, bool]:
        """The suspect that a request is, and whether it was in quarantine on the worker."""
        suspect, now = exchange.suspect, self.loop.time()
        if suspect is None:
            age = perf_counter() - exchange.begun_at
            exchange.suspect = suspect = Suspect(self, self._mark(exchange), role, 0, age, fresh=False)
        elif suspect.entered_at:
            age = now - suspect.entered_at
            if age > 2 * suspect.age + _OUTLIVED_SECONDS:
                suspect.deaths = 0
            suspect.age = age
        if exchange.began and exchange.log is not None:
            suspect.age = min(suspect.age, _RESUMED_SECONDS)
        suspect.role, suspect.fresh = role, False
        return suspect, suspect.died_on(worker)

    def _count(self, suspect: Suspect, quarantined: bool) -> None:
        suspect.deaths = MOST_DEATHS if quarantined and suspect.deaths else suspect.deaths + 1
        refused = suspect.deaths >= MOST_DEATHS
        self._note(Deaths(suspect.fingerprint, suspect.role, suspect.deaths, suspect.age,
                          self._seconds if refused else min(self._seconds, _SUSPECT_SECONDS), refused))
        if refused:
            self._dispatcher.metrics.poison_requests += 1
            logger.error("A request killed one %s worker after the other: its like is refused for %g s.", suspect.role,
                         self._seconds, extra={"fields": {"fingerprint": suspect.fingerprint.hex()}})

    def _mark(self, exchange: ClientResponse) -> bytes:
        request = exchange.request
        body = request.body or (exchange.log.body if exchange.log is not None else b"")
        # Without its body nothing can be compared with it.
        return fingerprint(request.path, body) if body else b"request " + request.request_id

    def _ask(self, worker: Worker, by_peer: bool, then: Callable[[bool], None]) -> None:
        """Tell ``then`` whether a worker is dead; a crowd that wants to know asks once."""
        task = self._verdicts.get((worker, by_peer))
        if task is None:
            verdict = self._is_dead_soon(worker) if by_peer else self._is_dead(worker)
            self._verdicts[worker, by_peer] = task = self.loop.create_task(verdict)
            task.add_done_callback(lambda done: self._verdicts.pop((worker, by_peer), None))
        task.add_done_callback(lambda done: then(not (done.cancelled() or done.exception()) and done.result()))

    async def _is_dead_soon(self, worker: Worker) -> bool:
        if await self._is_dead(worker):
            return True
        await asyncio.sleep(_AGAIN_SECONDS)
        return await self._is_dead(worker)

    async def _is_dead(self, worker: Worker) -> bool:
        if worker not in self._dispatcher.registry:  # An administrator's doing.
            return False
        if worker.state != "healthy":
            return True
        path, seconds = self._check
        if worker.always_healthy:
            return not await self._listens(worker, seconds)
        answer = await ask(self._dispatcher, worker, get(path), seconds)
        if not answer.ok:
            self._dispatcher.report_dead(worker, answer.detail or f"{worker.url} answered {path} with {answer.status}")
        return not answer.ok

    async def _listens(self, worker: Worker, seconds: float) -> bool:
        endpoint = worker.endpoint
        try:
            transport, _ = await asyncio.wait_for(
                self.loop.create_connection(asyncio.Protocol, endpoint.host, endpoint.port), seconds)
        except (OSError, asyncio.TimeoutError):
            return False
        transport.close()
        return True
