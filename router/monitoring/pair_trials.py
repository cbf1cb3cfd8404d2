"""Finding out which prefill workers fit with which decode workers, before requests do.

When a worker joins, restarts or loads other weights, decode workers are asked to connect with prefill workers
(``/connect_prefill``). That tries the whole handshake, and leaves the connection open for the first request. The first
pair of each kind decides before either gets requests from this router; all others follow a few at a time, each worker
in one at once.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import msgspec

from ..net.request import Request
from ..relay.dispatcher import Dispatcher
from ..workers.ask import ask, get
from ..workers.compatibility import Misfit
from ..workers.registry import DEFAULT_BOOTSTRAP_PORT, Registry, Worker

logger = logging.getLogger("baton.router")

MOST_AT_ONCE = 16
"""Trials under way: one takes up to a second where RDMA or NVLink has to be set up."""
MOST_PARTNERS = 128
"""Connections that are opened ahead for one worker; beyond that the first request pays for its own."""
TRIAL_SECONDS = 10.0
_CROWD_SECONDS = 1.0
"""Between two times that all pairs of a worker are tried again because requests were refused."""
_LATER_SECONDS = 30.0
"""Until a pair that could not be tried is tried again."""


class _Pair(NamedTuple):
    prefill: Worker
    decode: Worker

    @property
    def kinds(self) -> tuple[str | None, str | None]:
        return self.prefill.pair_key, self.decode.pair_key

    @property
    def epochs(self) -> tuple[str, ...]:
        """Other ones once either server may have become another."""
        return (self.prefill.endpoint.url, str(self.prefill.epoch), self.decode.endpoint.url, str(self.decode.epoch))


class _Outcome(NamedTuple):
    """``fits`` None: it could not be found out; ``again``: it may be later."""

    fits: bool | None
    why: str = ""
    again: bool = True


class PairTrials:
    """Keeps ``fitting`` and ``misfits`` of all workers true. A pair of which one cannot tell its kind (another
    system's server, or an older one of ours) is never tried, and fits."""

    def __init__(self, registry: Registry, found_misfit: Callable[[Worker], None]):
        """``found_misfit`` is called for a worker that fitted with all others so far."""
        self._registry = registry
        self._found_misfit = found_misfit
        self._verdicts: dict[tuple[str | None, str | None], str] = {}
        """Of kinds that were tried: why they do not fit, "" where they do."""
        self._pending: dict[_Pair, None] = {}
        self._done: set[tuple[str, ...]] = set()
        self._busy: set[Worker] = set()
        self._next_again: dict[Worker, float] = {}
        self._told: set[tuple[str, str]] = set()
        self._running: set[asyncio.Task[None]] = set()
        self._dispatcher: Dispatcher | None = None

    def learnt(self, worker: Worker, info: dict[str, Any], dispatcher: Dispatcher) -> bool:
        """Take in what a worker says of itself (``/get_server_info``); returns whether its weights are others than
        before."""
        self._dispatcher = dispatcher
        if not info:
            return False  # It will be asked again.
        before = worker.model_fingerprint
        if (epoch := _text(info.get("epoch"))) != worker.epoch:
            worker.epoch = epoch
            worker.pair_key = _text(info.get("pair_key")) if worker.role != "regular" else None
            self._forget_trials(worker)
        worker.model_fingerprint = _text(info.get("model_fingerprint"))
        self._refit()
        self._schedule(worker)
        return before is not None and before != worker.model_fingerprint

    def again(self, worker: Worker) -> None:
        """A request met with a refusal: what was found of the worker's pairs may be wrong. Many may come at once."""
        now = asyncio.get_running_loop().time()
        if now < self._next_again.get(worker, 0.0):
            return
        self._next_again[worker] = now + _CROWD_SECONDS
        self._forget_trials(worker)
        self._schedule(worker)

    def forget(self, worker: Worker) -> None:
        """The worker is gone."""
        self._pending = {pair: None for pair in self._pending if worker not in pair}
        self._next_again.pop(worker, None)
        self._forget_trials(worker)
        self._refit()

    def _forget_trials(self, worker: Worker) -> None:
        self._done = {epochs for epochs in self._done if worker.endpoint.url not in epochs}

    async def close(self) -> None:
        self._pending.clear()
        for task in self._running:
            task.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)

    # ------------------------------------------------------------------ verdicts

    def _verdict(self, pair: _Pair) -> str | None:
        """Why a pair does not fit, "" where it does; None while its kinds have not been tried."""
        prefill, decode = pair
        if prefill.pair_key is None or decode.pair_key is None:
            return ""
        found = self._verdicts.get(pair.kinds)
        if not found and None not in (prefill.model_fingerprint, decode.model_fingerprint) \
                and prefill.model_fingerprint != decode.model_fingerprint:
            return (f"the model is of fingerprint {decode.model_fingerprint} here and {prefill.model_fingerprint} "
                    "there (decode, prefill)")
        return found

    def _refit(self) -> None:
        """Derive what each worker fits with from one worker of each kind."""
        workers = list(self._registry)
        prefills, decodes = ([worker for worker in workers if worker.role == role] for role in ("prefill", "decode"))
        some = {role: {worker.pair_key: worker for worker in reversed(found)}
                for role, found in (("prefill", prefills), ("decode", decodes))}
        found = {kinds: self._verdict(_Pair(prefill, decode)) for prefill in some["prefill"].values()
                 for decode in some["decode"].values() if (kinds := (prefill.pair_key, decode.pair_key))}
        changed = False
        for worker in prefills:
            fitting = None if worker.pair_key is None else frozenset(
                kind for kind in some["decode"] if kind is not None and found[worker.pair_key, kind] == "")
            changed |= worker.fitting != fitting
            worker.fitting = fitting
        for worker in (*prefills, *decodes):
            others = some["decode" if worker.role == "prefill" else "prefill"]
            misfits = tuple(Misfit(other.url, why) for kind, other in others.items() if (
                why := found[(worker.pair_key, kind) if worker.role == "prefill" else (kind, worker.pair_key)])
                and _share_names(worker, other))
            changed |= worker.misfits != misfits
            before, worker.misfits = worker.misfits, misfits
            if misfits and not before:
                self._found_misfit(worker)
        if changed:
            self._registry.refit()

    # ------------------------------------------------------------------ trials

    def _schedule(self, worker: Worker) -> None:
        """Try a worker with those of the other role, those of unknown kinds first."""
        if worker.pair_key is None:
            return
        pairs = [pair for pair in self._pairs_of(worker) if pair.epochs not in self._done]
        pairs.sort(key=lambda pair: self._verdict(pair) is not None)
        for pair in pairs[:MOST_PARTNERS]:
            self._pending.setdefault(pair)
        self._start_some()

    def _pairs_of(self, worker: Worker) -> Iterator[_Pair]:
        """With workers that are healthy; others are learnt of when they are. A server of several ranks is tried once,
        by its first; and servers of other models where there are none of the worker's own."""
        others = [other for other in self._registry if {worker.role, other.role} == {"prefill", "decode"}]
        alike = [other for other in others if _share_names(worker, other)]
        for other in () if worker.rank else alike or others:
            if other.pair_key is not None and not other.rank and other.state == "healthy":
                yield _Pair(worker, other) if worker.role == "prefill" else _Pair(other, worker)

    def _start_some(self) -> None:
        while len(self._running) < MOST_AT_ONCE and (pair := self._next()) is not None:
            del self._pending[pair]
            self._busy.update(pair)
            task = asyncio.get_running_loop().create_task(self._run(pair))
            self._running.add(task)
            task.add_done_callback(self._running.discard)

    def _next(self) -> _Pair | None:
        """A pair whose workers are in no other trial, of unknown kinds if there is one."""
        free = (pair for pair in self._pending if self._busy.isdisjoint(pair))
        first = next(free, None)
        if first is None or self._verdict(first) is None:
            return first
        return next((pair for pair in free if self._verdict(pair) is None), first)

    async def _run(self, pair: _Pair) -> None:
        epochs = pair.epochs
        try:
            outcome = await self._try(pair)
            stands = not self._is_news(pair, outcome) or await self._unchanged(pair)
        finally:
            self._busy.difference_update(pair)
        if not stands:
            asyncio.get_running_loop().call_later(_CROWD_SECONDS, self._later, pair)
        elif pair.epochs == epochs and all(worker in self._registry for worker in pair):
            self._done.add(epochs)
            self._take(pair, outcome)
        asyncio.get_running_loop().call_soon(self._start_some)

    async def _try(self, pair: _Pair) -> _Outcome:
        prefill, decode = pair
        assert self._dispatcher is not None
        request = Request(b"POST", b"/connect_prefill")
        request.path, request.request_id = b"/connect_prefill", b"router"
        request.headers = b"content-type: application/json\r\n"
        request.body = msgspec.json.encode({
            "bootstrap_host": prefill.endpoint.host,
            "bootstrap_port": prefill.bootstrap_port or DEFAULT_BOOTSTRAP_PORT})
        answer = await ask(self._dispatcher, decode, request, TRIAL_SECONDS)
        if answer.status in (404, 405):
            return _Outcome(None, again=False)  # It cannot be asked: requests will tell.
        told = answer.json_object()
        fits = told.get("fits")
        why = told.get("message") or answer.detail or f"{decode.url} answered {answer.status}"
        return _Outcome(fits if isinstance(fits, bool) else None, str(why))

    def _is_news(self, pair: _Pair, outcome: _Outcome) -> bool:
        """Whether an outcome tells of the workers' kinds what was not known, or thought otherwise."""
        known = self._verdicts.get(pair.kinds)
        return outcome.fits is not None and (known is None or outcome.fits is bool(known))

    async def _unchanged(self, pair: _Pair) -> bool:
        """Whether both servers are still those that were to be tried: else the outcome is of other kinds."""
        assert self._dispatcher is not None
        for worker in pair:
            if worker not in self._registry:
                return False
            info = (await ask(self._dispatcher, worker, get("/get_server_info"), TRIAL_SECONDS)).json_object()
            if _text(info.get("epoch")) != worker.epoch:
                return False
        return True

    def _take(self, pair: _Pair, outcome: _Outcome) -> None:
        known = self._verdicts.get(pair.kinds)
        if outcome.fits is None:
            if outcome.again:
                self._tell(pair, f"could not be tried: {outcome.why}")
                asyncio.get_running_loop().call_later(_LATER_SECONDS, self._later, pair)
            if known is None:
                self._verdicts[pair.kinds] = ""  # Requests will tell.
        else:
            found = "" if outcome.fits else outcome.why
            if known is not None and bool(known) != bool(found):
                self._set_apart(pair)
            self._verdicts[pair.kinds] = found
            if found:
                self._tell(pair, f"get no requests together: {found}")
        self._refit()

    def _set_apart(self, pair: _Pair) -> None:
        """These two differ from others of their kinds in what keys do not tell: they become kinds of their own."""
        for worker in pair:
            worker.pair_key = f"{worker.pair_key}#{worker.id}"
            self._forget_trials(worker)
        self._done.add(pair.epochs)
        for worker in pair:
            self._schedule(worker)

    def _later(self, pair: _Pair) -> None:
        self._done.discard(pair.epochs)
        if all(worker in self._registry and worker.state == "healthy" for worker in pair):
            self._pending.setdefault(pair)
            self._start_some()

    def _tell(self, pair: _Pair, what: str) -> None:
        """Once for each worker and each kind that it meets: every worker is named, not every pair of thousands."""
        prefill, decode = pair
        news = {(prefill.url, f"{decode.pair_key} {what}"), (decode.url, f"{prefill.pair_key} {what}")} - self._told
        if news:
            self._told |= news
            logger.warning("Workers %s (prefill) and %s (decode) %s.", prefill.url, decode.url, what)


def _share_names(one: Worker, other: Worker) -> bool:
    """Whether requests for a model may go to both."""
    return not (one.model_ids and other.model_ids and set(one.model_ids).isdisjoint(other.model_ids))


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) else None
