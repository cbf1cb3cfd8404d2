"""Poison requests, which kill workers, are refused after the second death; requests that ran next to them are not.

A request that was in flight on a worker when that died is a *suspect*, and mostly innocent. It is retried like any
request whose worker failed, with one restriction: a worker runs one suspect at a time in *quarantine*, until it has
answered, or lived longer than it had on the worker that died. The others wait, for some seconds at most; youngest
first, since what kills a worker mostly does so at once. So when another worker dies, it is known which of its suspects
did it: its fingerprint, a hash of what it asks for, is refused for ``--poison-refusal-secs``.

Workers may die together, and the deaths be noticed one after the other. So a worker takes a suspect into quarantine
only right after its engine has answered a request that was sent when the suspect's last death was known.

A slow killer may leave quarantine before it strikes; what was in flight at three deaths is refused all the same. A
death counts once it is certain: an engine's last words, a refused connection, a health check without a good response.
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

MAX_RETAINED_BODY_BYTES = 64 * 1024
"""Longer bodies are dropped once the response has begun, unless the stream can be continued: a fingerprint is not worth
their memory."""
MAX_DEATHS = 3
_SUSPECT_SECONDS = 60.0
"""The time for which an unproven fingerprint is remembered."""
_MAX_RECORDS = 4096
_GATHER_SECONDS = 0.03
"""The suspects of one death arrive within this time; then they are ordered."""
_TICK_SECONDS = 0.02
_MAX_WAIT_SECONDS = 8.0
"""The longest wait for a quarantine. After it, a suspect runs without one."""
_MIN_QUARANTINE_SECONDS = 2.0
"""The shortest quarantine without a response: a worker under load takes a while to get to what kills it."""
_MAX_QUARANTINE_SECONDS = 6.0
"""The longest quarantine without a response, which may take minutes if it is not streamed."""
_MAX_CONTINUED_AGE_SECONDS = 0.5
"""A continued stream meets what killed its worker within this time, however long it had run before."""
_OUTLIVED_SECONDS = 10.0
"""A request that lives longer than twice its age at a death plus this is no suspect any more."""
_PROOF_SECONDS = 0.1
"""A worker whose engine has answered takes suspects into quarantine for this time."""
_ENGINE_CHECK = "/get_load"
"""Our servers answer it after their engine did; ``/health`` is answered by the API server, which may not yet know."""
_SECOND_CHECK_SECONDS = 0.25
"""A peer may hear of an engine's death a moment before the engine's own API server, which is then asked twice."""
_FIELDS_WITHOUT_CONTENT = frozenset((
    "rid", "request_id", "user", "safety_identifier", "prompt_cache_key", "metadata", "priority", "session_id",
    "bootstrap_host", "bootstrap_port", "bootstrap_room", "bootstrap_previous_room", "data_parallel_rank",
    "disagg_prefill_dp_rank", "stream_options", "continuation"))
"""Fields that name a request or its route, and change each time that a client sends it."""

_decode_fields = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode


class PoisonRequest(InvalidRequest):
    """The error of a refused request: a 400, so that clients do not retry by themselves."""

    code = "poison_request"


def fingerprint(path: bytes, body: bytes) -> bytes:
    """A hash of what a request asks for, equal when a client sends it again."""
    digest = blake2b(path, digest_size=16)
    try:
        fields = _decode_fields(body)
    except UNREADABLE:
        digest.update(body)
        return digest.digest()
    for name in sorted(fields.keys() - _FIELDS_WITHOUT_CONTENT):
        digest.update(b"%b\0%b\0" % (name.encode("utf-8", "surrogatepass"), bytes(fields[name])))
    return digest.digest()


class Deaths(msgspec.Struct, tag=True, frozen=True):
    """The deaths under a fingerprint, as the processes of one router report them to each other; 0 clears it."""

    fingerprint: bytes
    role: Role
    deaths: int
    age: float
    """Seconds from the beginning of the attempt to the death."""
    seconds: float
    """Seconds until this expires."""
    refused: bool = False


class Slots(Protocol):
    """The workers that have a suspect in quarantine, one each."""

    def is_free(self, worker: Worker) -> bool: ...
    def try_acquire(self, worker: Worker) -> bool: ...
    def release(self, worker: Worker) -> None: ...


class LocalSlots:
    """The quarantine slots of a router that is one process."""

    def __init__(self) -> None:
        self._acquired: set[Worker] = set()

    def is_free(self, worker: Worker) -> bool:
        return worker not in self._acquired

    def try_acquire(self, worker: Worker) -> bool:
        """Acquire a worker's slot; returns True if it was free."""
        if worker in self._acquired:
            return False
        self._acquired.add(worker)
        return True

    def release(self, worker: Worker) -> None:
        self._acquired.discard(worker)


class Suspect:
    """A request that ran on a worker when that died, or may have: see ``PoisonGuard``.

    ``from_record``: the worker died in an earlier request of equal content, perhaps in the middle of its response, so
    that the first byte proves nothing.
    """

    __slots__ = ("fingerprint", "role", "deaths", "age", "from_record", "noticed_at", "entered_at", "deadline",
                 "finished", "start", "dead_worker", "_guard", "_quarantined_on", "_runs_on", "_timer")

    def __init__(self, guard: PoisonGuard, mark: bytes, role: Role, deaths: int, age: float, *, from_record: bool):
        self.fingerprint = mark
        self.role = role
        """The role of the worker that died last."""
        self.deaths = deaths
        self.age = age
        """Seconds that the request had run when the worker died."""
        self.from_record = from_record
        self.noticed_at = guard.loop.time()
        """The time at which its last death was known."""
        self.entered_at = self.deadline = 0.0
        self.finished = False
        self.dead_worker: Worker | None = None
        self.start: Callable[[], None] = lambda: None
        self._guard = guard
        self._quarantined_on: Worker | None = None
        self._runs_on: Worker | None = None
        self._timer: asyncio.TimerHandle | None = None

    def enter(self, worker: Worker) -> None:
        """Begin an attempt on a worker, in quarantine if that is known to live and has no other suspect in it."""
        guard = self._guard
        self.entered_at, self.deadline = guard.loop.time(), 0.0
        if self.deaths:
            self._runs_on = worker
            guard.running[worker] += 1
        if self.deaths and guard.is_alive(worker, self.noticed_at) and guard.slots.try_acquire(worker):
            self._quarantined_on = worker
            seconds = min(3 * self.age + _MIN_QUARANTINE_SECONDS, _MAX_QUARANTINE_SECONDS)
            self._timer = guard.loop.call_later(seconds, self.leave_quarantine)

    def was_alone_on(self, worker: Worker) -> bool:
        """True if it was in quarantine on a worker that died, and the only suspect there: none ran next to it that had
        waited in vain, or had left quarantine without a response. The quarantine lasts until the death is judged, so
        that no other suspect is sent into the same death."""
        if self._timer is not None:
            self._timer.cancel()
        return self._quarantined_on is worker and self._guard.running[worker] == 1

    def stop(self) -> None:
        """End the attempt: it is over, or has shown that it is harmless."""
        self.leave_quarantine()
        on, self._runs_on = self._runs_on, None
        if on is not None:
            self._guard.running[on] -= 1
            if not self._guard.running[on]:
                del self._guard.running[on]

    def leave_quarantine(self) -> None:
        """End the quarantine, if it lasts."""
        on, self._quarantined_on = self._quarantined_on, None
        if self._timer is not None:
            self._timer.cancel()
        if on is not None:
            self._guard.slots.release(on)
            self._guard.on_slot_released()

    def on_first_byte(self) -> None:
        """Take note of the first byte of the response, or of its continuation."""
        if not self.from_record:
            self.stop()

    def clear(self) -> None:
        """Clear the fingerprint: the response is complete."""
        self._guard.clear(self)

    def finish(self) -> None:
        """The request has ended, one way or another."""
        self.finished = True
        self.stop()


class PoisonGuard:
    """All suspects of a router process, and the records of fingerprints. ``seconds`` 0 turns it off."""

    def __init__(self, dispatcher: Dispatcher, seconds: float, check: tuple[str, float]):
        """``check``: path and time limit of a health check. A worker without checks lives if it accepts connections."""
        self.loop = dispatcher.loop
        self.slots: Slots = LocalSlots()
        self.publish: Callable[[Deaths], None] = lambda deaths: None
        """Sends a record to the other processes of the router."""
        self.records: dict[bytes, tuple[Deaths, float]] = {}
        """Records by fingerprint, with the time at which they expire. While it is empty, requests are not checked."""
        self._dispatcher = dispatcher
        self._seconds = seconds
        self._check = check
        self.running: Counter[Worker] = Counter()
        """Suspects that have not answered, in quarantine or not."""
        self._waiting: list[Suspect] = []
        self._timer: asyncio.TimerHandle | None = None
        self._proofs: dict[Worker, tuple[float, float]] = {}
        """When a worker's engine was last asked whether it lives, and when its answer came."""
        self._proving: dict[Worker, asyncio.Task[None]] = {}
        self._verdicts: dict[tuple[Worker, bool], asyncio.Task[bool]] = {}

    # ------------------------------------------------------------------ fingerprints

    def suspect(self, request: Request) -> Suspect | None:
        """The suspect that a new request is, or None; raises PoisonRequest for one that is refused."""
        found = self.records.get(mark := fingerprint(request.path, request.body))
        if found is None or found[1] <= self.loop.time():
            return None
        known, until = found
        if known.refused:
            self._dispatcher.metrics.poison_requests += 1
            raise self._refusal(until - self.loop.time())
        return Suspect(self, mark, known.role, known.deaths, known.age, from_record=True)

    def learn(self, deaths: Deaths) -> None:
        """Store a record, of this or another process. A refusal is not taken back."""
        found = self.records.get(deaths.fingerprint)
        if found is not None and found[0].refused and not deaths.refused:
            return
        if not deaths.deaths:
            self.records.pop(deaths.fingerprint, None)
            return
        if len(self.records) >= _MAX_RECORDS and found is None:
            del self.records[next((mark for mark, (known, _) in self.records.items() if not known.refused),
                                  next(iter(self.records)))]
        self.records[deaths.fingerprint] = deaths, self.loop.time() + deaths.seconds

    def known(self) -> tuple[Deaths, ...]:
        """All records, for a process that starts."""
        now = self.loop.time()
        return tuple(msgspec.structs.replace(deaths, seconds=until - now)
                     for deaths, until in self.records.values() if until > now)

    def sweep(self) -> None:
        """Forget expired records and proofs."""
        now = self.loop.time()
        self._proofs = {worker: proof for worker, proof in self._proofs.items() if now - proof[1] <= _PROOF_SECONDS}
        for mark in [mark for mark, (_, until) in self.records.items() if until <= now]:
            del self.records[mark]

    def clear(self, suspect: Suspect) -> None:
        """Clear the record of a suspect that has answered."""
        if suspect.fingerprint in self.records:
            self._record(Deaths(suspect.fingerprint, suspect.role, 0, 0.0, 0.0))

    def _record(self, deaths: Deaths) -> None:
        self.learn(deaths)
        self.publish(deaths)

    def _refusal(self, seconds: float) -> PoisonRequest:
        return PoisonRequest("This request was running when one worker after the other died, so it is refused for "
                             f"{max(1, round(seconds))} s; change it, and tell the operator.")

    # ------------------------------------------------------------------ quarantine

    def admit(self, suspect: Suspect, workers: Sequence[Worker], start: Callable[[], None]) -> Sequence[Worker]:
        """The workers that a suspect may be sent to now. If there is none, ``start`` is called when there may be."""
        suspect.stop()
        now = self.loop.time()
        free = [worker for worker in workers if self.slots.is_free(worker)]
        gathered = suspect.from_record  # A client's next try: the other suspects of the death are gone.
        if suspect.deadline:
            gathered = True
        else:
            suspect.deadline = now + _MAX_WAIT_SECONDS
        if now >= suspect.deadline or (suspect.from_record and not free):
            return free or workers
        if gathered:
            if alive := [worker for worker in free if self.is_alive(worker, suspect.noticed_at)]:
                return alive
            for worker in free:
                self._prove(worker)
        suspect.start = start
        self._waiting.append(suspect)
        if self._timer is None:
            self._timer = self.loop.call_later(_GATHER_SECONDS, self._start_waiting)
        return ()

    def is_alive(self, worker: Worker, since: float) -> bool:
        """True if a worker's engine answered a moment ago, to what it was asked after ``since``."""
        asked, answered = self._proofs.get(worker, (0.0, 0.0))
        return asked >= since and self.loop.time() - answered <= _PROOF_SECONDS

    def _prove(self, worker: Worker) -> None:
        """Ask a worker's engine whether it lives, unless that is under way."""
        if worker not in self._proving:
            self._proving[worker] = self.loop.create_task(self._ask_engine(worker))

    async def _ask_engine(self, worker: Worker) -> None:
        asked, (path, seconds) = self.loop.time(), self._check
        lives = False
        try:
            if worker not in self._dispatcher.registry:  # An administrator removed it.
                return
            if worker.always_healthy and not worker.is_baton:
                lives = await self._listens(worker, seconds)
            else:
                response = await ask(self._dispatcher, worker, get(_ENGINE_CHECK if worker.is_baton else path), seconds)
                lives = 0 < response.status < 500  # Even if it has no such path, or another key.
                if not lives and not response.silent:
                    self._dispatcher.report_dead(worker, response.detail or f"{worker.url} answered {response.status}")
        finally:
            del self._proving[worker]
        if lives:
            self._proofs[worker] = asked, self.loop.time()
        self.on_slot_released()

    def on_slot_released(self) -> None:
        """Start waiting suspects soon: a worker lives that has no suspect in quarantine, or not any more."""
        if self._timer is not None and self.loop.time() + _TICK_SECONDS / 4 < self._timer.when():
            self._timer.cancel()
            self._timer = self.loop.call_later(_TICK_SECONDS / 4, self._start_waiting)

    def _start_waiting(self) -> None:
        waiting, self._waiting, self._timer = sorted(self._waiting, key=lambda suspect: suspect.age), [], None
        for suspect in waiting:
            if not suspect.finished:
                suspect.start()
        if self._waiting and self._timer is not None:
            self._timer.cancel()
            self._timer = self.loop.call_later(_TICK_SECONDS, self._start_waiting)

    # ------------------------------------------------------------------ deaths

    def on_death(self, response: ClientResponse, worker: Worker, role: Role, *, proceed: Callable[[], None],
                 certain: bool = False, by_peer: bool = False, at_boundary: bool = False) -> None:
        """Judge a request on whose worker died, for ``certain`` or perhaps, which is checked first.

        Calls ``proceed`` unless the request is refused. ``by_peer``: the other call of a pair reports the death.
        """
        if not self._seconds:
            proceed()
            return
        suspect, quarantined = self._suspect_of(response, worker, role)
        if suspect.dead_worker is worker:
            proceed()  # It is still the same death: there was no other worker to try.
            return

        def decide(dead: bool) -> None:
            if dead:
                suspect.dead_worker = worker
                self._count_death(suspect, quarantined)
            suspect.leave_quarantine()
            if suspect.finished:
                return
            if suspect.deaths >= MAX_DEATHS:
                response.refuse(self._refusal(self._seconds), at_boundary)
            else:
                proceed()

        if certain:
            decide(True)
        else:
            self._check_death(worker, by_peer, decide)

    def on_last_words(self, response: ClientResponse, worker: Worker, role: Role) -> None:
        """Count the death of an engine that announced it at the end of a stream, which was relayed."""
        if self._seconds:
            self._count_death(*self._suspect_of(response, worker, role))

    def _suspect_of(self, response: ClientResponse, worker: Worker, role: Role) -> tuple[Suspect, bool]:
        """The suspect that a request is, and True if it was alone in quarantine on the worker."""
        suspect, now = response.suspect, self.loop.time()
        if suspect is None:
            age = perf_counter() - response.begun_at
            response.suspect = suspect = Suspect(self, self._fingerprint_of(response), role, 0, age, from_record=False)
        elif suspect.entered_at:
            age = now - suspect.entered_at
            if age > 2 * suspect.age + _OUTLIVED_SECONDS:
                suspect.deaths = 0
            suspect.age = age
        if response.began and response.log is not None:
            suspect.age = min(suspect.age, _MAX_CONTINUED_AGE_SECONDS)
        suspect.role, suspect.from_record = role, False
        return suspect, suspect.was_alone_on(worker)

    def _count_death(self, suspect: Suspect, quarantined: bool) -> None:
        suspect.deaths = MAX_DEATHS if quarantined and suspect.deaths else suspect.deaths + 1
        suspect.noticed_at = self.loop.time()
        refused = suspect.deaths >= MAX_DEATHS
        self._record(Deaths(suspect.fingerprint, suspect.role, suspect.deaths, suspect.age,
                            self._seconds if refused else min(self._seconds, _SUSPECT_SECONDS), refused))
        if refused:
            self._dispatcher.metrics.poison_requests += 1
            logger.error("A request killed one %s worker after the other: equal requests are refused for %g s.",
                         suspect.role, self._seconds, extra={"fields": {"fingerprint": suspect.fingerprint.hex()}})

    def _fingerprint_of(self, response: ClientResponse) -> bytes:
        request = response.request
        body = request.body or (response.log.body if response.log is not None else b"")
        # A request whose body is gone cannot be compared with another one.
        return fingerprint(request.path, body) if body else b"request " + request.request_id

    def _check_death(self, worker: Worker, by_peer: bool, then: Callable[[bool], None]) -> None:
        """Call ``then`` with True if a worker is dead, else with False; concurrent requests share one check."""
        task = self._verdicts.get((worker, by_peer))
        if task is None:
            verdict = self._is_dead_soon(worker) if by_peer else self._is_dead(worker)
            self._verdicts[worker, by_peer] = task = self.loop.create_task(verdict)
            task.add_done_callback(lambda done: self._verdicts.pop((worker, by_peer), None))
        task.add_done_callback(lambda done: then(not (done.cancelled() or done.exception()) and done.result()))

    async def _is_dead_soon(self, worker: Worker) -> bool:
        if await self._is_dead(worker):
            return True
        await asyncio.sleep(_SECOND_CHECK_SECONDS)
        return await self._is_dead(worker)

    async def _is_dead(self, worker: Worker) -> bool:
        if worker not in self._dispatcher.registry:  # An administrator removed it.
            return False
        if worker.state != "healthy":
            return True
        path, seconds = self._check
        if worker.always_healthy:
            return not await self._listens(worker, seconds)
        response = await ask(self._dispatcher, worker, get(path), seconds)
        if not response.ok:
            detail = response.detail or f"{worker.url} answered {path} with {response.status}"
            self._dispatcher.report_dead(worker, detail)
        return not response.ok

    async def _listens(self, worker: Worker, seconds: float) -> bool:
        endpoint = worker.endpoint
        try:
            transport, _ = await asyncio.wait_for(
                self.loop.create_connection(asyncio.Protocol, endpoint.host, endpoint.port), seconds)
        except (OSError, asyncio.TimeoutError):
            return False
        transport.close()
        return True
