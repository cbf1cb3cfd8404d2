"""Trials of prefill and decode workers, which show if they are compatible before requests do.

When a worker joins, restarts or loads other weights, decode workers are asked to connect with prefill workers
(``/connect_prefill``). That runs the complete handshake, and leaves the connection open for the first request. The
first pair of each kind decides before either gets requests from this router; all others follow a few at a time, each
worker in one trial at a time.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import msgspec

from ..net.request import Request
from ..workers.ask import WorkerClient, ask, get
from ..workers.compatibility import Misfit
from ..workers.registry import DEFAULT_BOOTSTRAP_PORT, Registry, Worker
from ..workers.roles import PAIR

logger = logging.getLogger("baton.router")

MAX_CONCURRENT_TRIALS = 16
"""Trials that may run at a time: one takes up to a second if it sets up RDMA or NVLink."""
MAX_PARTNERS = 128
"""Connections that are opened ahead for one worker; beyond that, the first request waits for its own."""
TRIAL_TIMEOUT_SECONDS = 10.0
_MIN_RETRIAL_SECONDS = 1.0
"""The shortest time between two retrials of a worker's pairs, which start when a request meets a refusal."""
_RETRY_SECONDS = 30.0
"""The time after which a pair that could not be tried is tried again."""


class _Pair(NamedTuple):
    prefill: Worker
    decode: Worker

    @property
    def kinds(self) -> tuple[str | None, str | None]:
        return self.prefill.pair_key, self.decode.pair_key

    @property
    def epochs(self) -> tuple[str, ...]:
        """The servers' URLs and epochs, which differ from before if either server may have restarted."""
        return (self.prefill.endpoint.url, str(self.prefill.epoch), self.decode.endpoint.url, str(self.decode.epoch))


class _Outcome(NamedTuple):
    """The result of a trial. ``fits`` is None if the trial gave none; ``retriable``: a later one may."""

    fits: bool | None
    why: str = ""
    retriable: bool = True


class PairTrials:
    """Keeps ``fitting`` and ``misfits`` of all workers up to date.

    A pair with a worker of unknown kind (another system's server, or an older one of ours) is never tried, and fits.
    """

    def __init__(self, registry: Registry, on_misfit: Callable[[Worker], None]):
        """``on_misfit`` is called for a worker that fitted with all others so far."""
        self._registry = registry
        self._on_misfit = on_misfit
        self._verdicts: dict[tuple[str | None, str | None], str] = {}
        """By pair of kinds that were tried: the reason why they do not fit, "" if they do."""
        self._pending: dict[_Pair, None] = {}
        self._done: set[tuple[str, ...]] = set()
        self._busy: set[Worker] = set()
        self._next_retrial: dict[Worker, float] = {}
        self._logged: set[tuple[str, str]] = set()
        self._running: set[asyncio.Task[None]] = set()
        self._client: WorkerClient | None = None

    def update(self, worker: Worker, info: dict[str, Any], client: WorkerClient) -> bool:
        """Takes in a worker's ``/get_server_info``; returns True if its weights changed."""
        self._client = client
        if not info:
            return False  # It will be asked again.
        before = worker.model_fingerprint
        if (epoch := _text(info.get("epoch"))) != worker.epoch:
            worker.epoch = epoch
            worker.pair_key = _kind(info) if worker.facts.transfers_kv else None
            self._forget_trials(worker)
        worker.model_fingerprint = _text(info.get("model_fingerprint"))
        worker.weight_version = _text(info.get("weight_version"))
        self._refit()
        self._schedule(worker)
        return before is not None and before != worker.model_fingerprint

    @property
    def untried(self) -> bool:
        """True while it is not known if two kinds of healthy workers, which may serve together, fit."""
        able = [worker for worker in self._registry if worker.state == "healthy" and worker.pair_key is not None
                and not worker.outdated]
        senders, receivers = ({worker.pair_key: worker for worker in able if worker.role == role} for role in PAIR)
        return any(_may_share_model(prefill, decode) and self._verdict(_Pair(prefill, decode)) is None
                   for prefill in senders.values() for decode in receivers.values())

    def retry(self, worker: Worker) -> None:
        """Try a worker's pairs again, as its peer refused a request. Many requests may be refused at the same time."""
        now = asyncio.get_running_loop().time()
        if now < self._next_retrial.get(worker, 0.0):
            return
        self._next_retrial[worker] = now + _MIN_RETRIAL_SECONDS
        self._forget_trials(worker)
        self._schedule(worker)

    def forget(self, worker: Worker) -> None:
        """Forget a worker that was removed."""
        self._pending = {pair: None for pair in self._pending if worker not in pair}
        self._next_retrial.pop(worker, None)
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
        """The reason why a pair does not fit, "" if it does; None while its kinds have not been tried."""
        prefill, decode = pair
        if prefill.pair_key is None or decode.pair_key is None:
            return ""
        verdict = self._verdicts.get(pair.kinds)
        if not verdict and None not in (prefill.weight_version, decode.weight_version) \
                and prefill.weight_version != decode.weight_version:
            return (f"the weight version is {decode.weight_version} here and {prefill.weight_version} there (decode, "
                    "prefill)")
        if not verdict and None not in (prefill.model_fingerprint, decode.model_fingerprint) \
                and prefill.model_fingerprint != decode.model_fingerprint:
            return (f"the model is of fingerprint {decode.model_fingerprint} here and {prefill.model_fingerprint} "
                    "there (decode, prefill)")
        return verdict

    def _refit(self) -> None:
        """Derive the kinds that each worker fits with from one worker of each kind."""
        workers = list(self._registry)
        prefills, decodes = ([worker for worker in workers if worker.role == role] for role in PAIR)
        senders, receivers = ({worker.pair_key: worker for worker in reversed(same_role)}
                              for same_role in (prefills, decodes))
        verdicts = {kinds: self._verdict(_Pair(prefill, decode)) for prefill in senders.values()
                    for decode in receivers.values() if (kinds := (prefill.pair_key, decode.pair_key))}
        changed = False
        for worker in prefills:
            fitting = None if worker.pair_key is None else frozenset(
                kind for kind in receivers if kind is not None and verdicts[worker.pair_key, kind] == "")
            changed |= worker.fitting != fitting
            worker.fitting = fitting
        for worker in (*prefills, *decodes):
            others = receivers if worker.facts.sends_kv else senders
            misfits = tuple(Misfit(other.url, why) for kind, other in others.items() if (
                why := verdicts[(worker.pair_key, kind) if worker.facts.sends_kv else (kind, worker.pair_key)])
                and _may_share_model(worker, other))
            changed |= worker.misfits != misfits
            before, worker.misfits = worker.misfits, misfits
            if misfits and not before:
                self._on_misfit(worker)
        if changed:
            self._registry.update_available()

    # ------------------------------------------------------------------ trials

    def _schedule(self, worker: Worker) -> None:
        """Schedule trials of a worker with those of the other role, untried kinds first."""
        if worker.pair_key is None:
            return
        pairs = [pair for pair in self._pairs_of(worker) if pair.epochs not in self._done]
        pairs.sort(key=lambda pair: self._verdict(pair) is not None)
        for pair in pairs[:MAX_PARTNERS]:
            self._pending.setdefault(pair)
        self._start_trials()

    def _pairs_of(self, worker: Worker) -> Iterator[_Pair]:
        """The pairs of a worker with healthy ones; others are tried once they are healthy.

        A server of several ranks is tried once, by its first rank. Servers of other models are tried only if there is
        none of the worker's own model.
        """
        others = [other for other in self._registry if {worker.role, other.role} == {*PAIR}]
        same_model = [other for other in others if _may_share_model(worker, other)]
        for other in () if worker.rank else same_model or others:
            if other.pair_key is not None and not other.rank and other.state == "healthy":
                yield _Pair(worker, other) if worker.facts.sends_kv else _Pair(other, worker)

    def _start_trials(self) -> None:
        while len(self._running) < MAX_CONCURRENT_TRIALS and (pair := self._next()) is not None:
            del self._pending[pair]
            self._busy.update(pair)
            task = asyncio.get_running_loop().create_task(self._run(pair))
            self._running.add(task)
            task.add_done_callback(self._running.discard)

    def _next(self) -> _Pair | None:
        """A pair whose workers are in no other trial, preferably of untried kinds."""
        free = (pair for pair in self._pending if self._busy.isdisjoint(pair))
        first = next(free, None)
        if first is None or self._verdict(first) is None:
            return first
        return next((pair for pair in free if self._verdict(pair) is None), first)

    async def _run(self, pair: _Pair) -> None:
        epochs = pair.epochs
        try:
            outcome = await self._try(pair)
            is_valid = not self._is_news(pair, outcome) or await self._is_unchanged(pair)
        finally:
            self._busy.difference_update(pair)
        if not is_valid:
            asyncio.get_running_loop().call_later(_MIN_RETRIAL_SECONDS, self._reschedule, pair)
        elif pair.epochs == epochs and all(worker in self._registry for worker in pair):
            self._done.add(epochs)
            self._apply(pair, outcome)
        asyncio.get_running_loop().call_soon(self._start_trials)

    async def _try(self, pair: _Pair) -> _Outcome:
        prefill, decode = pair
        assert self._client is not None
        request = Request(b"POST", b"/connect_prefill")
        request.path, request.request_id = b"/connect_prefill", b"router"
        request.headers = b"content-type: application/json\r\n"
        request.body = msgspec.json.encode({
            "bootstrap_host": prefill.endpoint.host,
            "bootstrap_port": prefill.bootstrap_port or DEFAULT_BOOTSTRAP_PORT})
        response = await ask(self._client, decode, request, TRIAL_TIMEOUT_SECONDS)
        if response.status in (404, 405):
            return _Outcome(None, retriable=False)  # The server has no trials: requests will show it.
        result = response.json_object()
        fits = result.get("fits")
        why = result.get("message") or response.detail or f"{decode.url} answered {response.status}"
        return _Outcome(fits if isinstance(fits, bool) else None, str(why))

    def _is_news(self, pair: _Pair, outcome: _Outcome) -> bool:
        """True if an outcome adds to the verdicts, or contradicts one."""
        known = self._verdicts.get(pair.kinds)
        return outcome.fits is not None and (known is None or outcome.fits is bool(known))

    async def _is_unchanged(self, pair: _Pair) -> bool:
        """True if both servers are still those that were to be tried: else the outcome is of other kinds."""
        assert self._client is not None
        for worker in pair:
            if worker not in self._registry:
                return False
            info = (await ask(self._client, worker, get("/get_server_info"), TRIAL_TIMEOUT_SECONDS)).json_object()
            if _text(info.get("epoch")) != worker.epoch:
                return False
        return True

    def _apply(self, pair: _Pair, outcome: _Outcome) -> None:
        known = self._verdicts.get(pair.kinds)
        if outcome.fits is None:
            if outcome.retriable:
                self._log(pair, f"could not be tried: {outcome.why}")
                asyncio.get_running_loop().call_later(_RETRY_SECONDS, self._reschedule, pair)
            if known is None:
                self._verdicts[pair.kinds] = ""  # Requests will show it.
        else:
            verdict = "" if outcome.fits else outcome.why
            if known is not None and bool(known) != bool(verdict):
                self._make_own_kinds(pair)
            self._verdicts[pair.kinds] = verdict
            if verdict:
                self._log(pair, f"get no requests together: {verdict}")
        self._refit()

    def _make_own_kinds(self, pair: _Pair) -> None:
        """Gives two workers kinds of their own: they differ from others of their kinds in what keys do not show."""
        for worker in pair:
            worker.pair_key = f"{worker.pair_key}#{worker.id}"
            self._forget_trials(worker)
        self._done.add(pair.epochs)
        for worker in pair:
            self._schedule(worker)

    def _reschedule(self, pair: _Pair) -> None:
        self._done.discard(pair.epochs)
        if all(worker in self._registry and worker.state == "healthy" for worker in pair):
            self._pending.setdefault(pair)
            self._start_trials()

    def _log(self, pair: _Pair, what: str) -> None:
        """Log a problem once for each worker and each kind of partner: not for every pair of thousands."""
        prefill, decode = pair
        lines = {(prefill.url, f"{decode.pair_key} {what}"), (decode.url, f"{prefill.pair_key} {what}")} - self._logged
        if lines:
            self._logged |= lines
            logger.warning("Workers %s (prefill) and %s (decode) %s.", prefill.url, decode.url, what)


def _may_share_model(one: Worker, other: Worker) -> bool:
    """True if requests for one model may go to both."""
    return not (one.model_ids and other.model_ids and set(one.model_ids).isdisjoint(other.model_ids))


def _kind(info: dict[str, Any]) -> str | None:
    """The kind of a server, by its ``/get_server_info``: weights of another version make another kind."""
    key, version = _text(info.get("pair_key")), _text(info.get("weight_version"))
    return key if key is None or version is None else f"{key}@{version}"


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) else None
