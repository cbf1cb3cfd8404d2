"""Decisions of which worker serves a request, and the connections that carry it: shared by all relays."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Sequence
from random import Random
from typing import Protocol

from ...common.api.errors import WorkerUnavailable
from ...common.config.roles import ROLE_HEADER
from ..config import RouterConfig
from ..net.body import Body, LargeBody, RoutingFields
from ..net.busy_poll import BusyPoll
from ..net.heads import KnownHeads
from ..net.outbox import Bytes, Outbox
from ..net.request import Group, Request
from ..net.tls import worker_context
from ..net.upstream import Call
from ..net.upstream_pool import UpstreamPool, read_plain_response
from ..net.upstream_response import Failure, ResponseSink
from ..obs.metrics import Metrics
from ..policies import PolicySets, Subject
from ..policies.base import Amendment
from ..policies.cache_exact import CacheExact
from ..workers.compatibility import Pairs
from ..workers.dp_ranks import with_rank
from ..workers.registry import Registry, Reservation, Role, Worker, without
from ..workers.roles import PAIR, REGULAR, WORKER_ROLES
from .poison_guard import PoisonGuard
from .request_hold import RequestHold, Running
from .retry import FAILURES, Backoff, Outcome, Retries

logger = logging.getLogger("baton.router")

RETRY_AFTER_SECONDS = 1.0
_ROLE_LINES = {role: f"{ROLE_HEADER}: {role}\r\n".encode() for role in WORKER_ROLES}
_COPIED_BODY_BYTES = 16 * 1024
"""Bodies up to this size are appended to their head: a second buffer costs more than such a small copy."""


class Watch(Protocol):
    """Follows the workers independently of requests."""

    def join(self, worker: Worker) -> None: ...
    def leave(self, worker: Worker) -> None: ...
    def close(self) -> None: ...


class Dispatcher:
    """Decides synchronously over the registry and reserves at the decision; sends through one pool a worker.

    ``report_failure(worker, failure)`` is called for every attempt that failed below HTTP.
    """

    def __init__(self, config: RouterConfig, registry: Registry, metrics: Metrics, rng: Random,
                 report_failure: Callable[[Worker, Failure], None]):
        self.registry = registry
        self.metrics = metrics
        self.rng = rng
        self.loop = asyncio.get_running_loop()
        self._report_failure = report_failure
        self._circuit_seconds = config.circuit.cb_timeout_duration_secs
        self.policies = PolicySets({role: config.policy.policy_for(role) for role in WORKER_ROLES}, config.policy, rng)
        self.watch: Watch | None = None
        self.running: Callable[[], Iterable[Running]] = tuple
        """Gives the pairs' requests that run in this process."""
        self.hold = RequestHold(registry, lambda: self.running())
        self._hung_seconds = config.health.health_check_timeout_secs
        self.poison = PoisonGuard(self, config.retry.poison_refusal_secs,
                                  (config.health.health_check_endpoint, config.health.health_check_timeout_secs))
        self._connect_timeout = config.health.connect_timeout_secs
        self._backoff = Backoff(config.retry.most, config.retry.retry_initial_backoff_ms / 1e3,
                                config.retry.retry_max_backoff_ms / 1e3, config.retry.retry_backoff_multiplier,
                                config.retry.retry_jitter_factor)
        self._pools: dict[Worker, UpstreamPool] = {}
        self._tls = worker_context(config.security)
        self._known_heads = KnownHeads(read_plain_response)
        microseconds = config.http.busy_poll_us
        self.on_data = BusyPoll(self.loop, microseconds / 1e6).heard if microseconds else None
        """Called by connections whenever data arrives."""
        self.outbox = Outbox(self.loop)
        """Collects the writes of clients' and workers' connections."""
        self._worker_key = config.security.worker_api_key
        self._strips_client_keys = bool(config.security.client_keys)
        self._unauthorized: set[str] = set()
        """URLs of workers that refuse the router, each of which was logged once."""

    # ------------------------------------------------------------------ connections

    def open_pool(self, worker: Worker) -> UpstreamPool:
        self._pools[worker] = pool = UpstreamPool(
            worker.endpoint, connect_timeout=self._connect_timeout, authorization=self._authorization_of(worker),
            tls=self._tls if worker.endpoint.scheme == "https" else None, known_heads=self._known_heads,
            outbox=self.outbox, on_data=self.on_data)
        if self.watch is not None:
            self.watch.join(worker)
        return pool

    def update_key(self, worker: Worker) -> None:
        """Send a worker its new API key from now on."""
        self._pools[worker].authorization = self._authorization_of(worker)

    def _authorization_of(self, worker: Worker) -> bytes:
        key = worker.api_key or self._worker_key
        return bearer(key) if key else b""

    def pool(self, worker: Worker) -> UpstreamPool:
        return self._pools[worker]

    def close_pool(self, worker: Worker) -> None:
        """Close idle connections; running calls end undisturbed and their connections close after them."""
        self._pools[worker].close()
        if self.watch is not None:
            self.watch.leave(worker)

    def fail_calls(self, worker: Worker) -> None:
        """Fail all calls that run on a worker."""
        self._pools[worker].fail_calls(Failure("removed", f"{worker.url} was removed by force"))

    def fail_silent_calls(self, worker: Worker) -> None:
        """Fail the calls for which a hung worker has sent no byte for as long as a health check may take."""
        if worker in self._pools:
            self._pools[worker].fail_silent_calls(self._hung_seconds)

    def sweep(self, silence_limit: float) -> None:
        """Sweep policies and pools (see UpstreamPool.sweep), and forget the pools of workers that are gone."""
        self.policies.sweep(self.loop.time(), self.registry.models.groups)
        self.poison.sweep()
        for worker, pool in list(self._pools.items()):
            pool.sweep(silence_limit)
            if worker.hung:
                pool.fail_silent_calls(self._hung_seconds)
            if worker not in self.registry and not worker.load and not pool.busy:
                del self._pools[worker]

    def close(self) -> None:
        if self.watch is not None:
            self.watch.close()
        for pool in self._pools.values():
            pool.close()

    def send(self, worker: Worker, request: Request, body: Body, sink: ResponseSink, *, resend: bool = True) -> Call:
        """Send ``request`` to a worker, with ``body`` instead of its own."""
        if worker.rank is not None:
            body = with_rank(request.path, body, worker.rank)
        pool = self._pools[worker]
        method = request.method
        end = b"\r\ncontent-length: %d\r\n\r\n" % len(body) if body or method == b"POST" else b"\r\n\r\n"
        copied: bytes = b""
        parts: tuple[Bytes, ...] = ()
        if isinstance(body, LargeBody):
            parts = body.parts
        elif len(body) > _COPIED_BODY_BYTES:
            parts = (body,)
        else:
            copied = body
        head = b"".join((
            method, b" ", pool.prefix, request.target, b" HTTP/1.0\r\n" if request.is_http_1_0 else b" HTTP/1.1\r\n",
            pool.host_line, request.headers, pool.authorization or request.authorization_line,
            _ROLE_LINES[worker.role] if worker.switches else b"",
            b"x-request-id: ", request.request_id, end, copied))
        return pool.send(sink, head, parts, method == b"HEAD", resend)

    # ------------------------------------------------------------------ decisions

    def subject(self, role: Role, request: Request, fields: RoutingFields | None) -> Subject:
        """The role's policy's view of a request, for ``place``; its amendment is made once a request."""
        subject = self.policies.of(request.group)[role].read(request, fields)
        if self.policies.exact is not None:  # No other policy amends requests.
            amendment: Amendment | None = getattr(subject, "amendment", None)
            if amendment is not None and request.on_head is None:
                request.headers += amendment.headers
                request.on_head = amendment.on_head
        return subject

    def place_pair(self, prefills: Sequence[Worker], decodes: Sequence[Worker], request: Request,
                   fields: RoutingFields) -> tuple[Reservation, Reservation]:
        """Choose and reserve a prefill and a decode worker that fit together (neither sequence is empty).

        Raises WorkerUnavailable, as a policy may, and then reserves none.
        """
        policies = self.policies.of(request.group)
        pairs = self.registry.pairs(request.group)
        if not pairs.all_fit:
            return self._place_fitting(pairs, prefills, decodes, request, fields)
        pairing = policies["prefill"]
        if isinstance(pairing, CacheExact) and pairing is policies["decode"]:
            chosen = pairing.choose_pair(prefills, decodes, self.subject("prefill", request, fields))
            return self._reserve("prefill", chosen.prefill, chosen.reason), self._reserve(
                "decode", chosen.decode, chosen.reason)
        subject = self.subject("prefill", request, fields)
        prefill = pairing.choose(prefills, subject)
        if policies["decode"].read is not pairing.read:
            subject = self.subject("decode", request, fields)
        decode = policies["decode"].choose(decodes, subject)
        return self._reserve("prefill", prefill.worker, prefill.reason), self._reserve(
            "decode", decode.worker, decode.reason)

    def _place_fitting(self, pairs: Pairs, prefills: Sequence[Worker], decodes: Sequence[Worker], request: Request,
                       fields: RoutingFields) -> tuple[Reservation, Reservation]:
        """Choose a prefill worker among those that have a partner, then one of its partners."""
        prefills = pairs.with_partner(prefills, decodes)
        if not prefills:  # The workers that remain for a retry form no pair.
            prefills, decodes = pairs.prefills, pairs.decodes
        policies = self.policies.of(request.group)
        prefill = policies["prefill"].choose(prefills, self.subject("prefill", request, fields))
        partners = pairs.partners(prefill.worker, decodes)
        decode = policies["decode"].choose(partners, self.subject("decode", request, fields))
        return self._reserve("prefill", prefill.worker, prefill.reason), self._reserve(
            "decode", decode.worker, decode.reason)

    def place(self, role: Role, workers: Sequence[Worker], subject: Subject, group: Group = None) -> Reservation:
        """Choose one of ``workers`` (not empty, all of ``group``) and reserve it.

        Raises WorkerUnavailable, as a policy may.
        """
        chosen = self.policies.of(group)[role].choose(workers, subject)
        return self._reserve(role, chosen.worker, chosen.reason)

    def _reserve(self, role: Role, worker: Worker, reason: str) -> Reservation:
        self.metrics.decisions[role, reason] += 1
        worker.change_load(1)
        reservation = Reservation(worker)
        if worker.circuit.state != "closed":
            self.registry.start_probe(reservation)
        return reservation

    def candidates(self, role: Role, retries: Retries | None, group: Group = None, *, baton_only: bool = False,
                   pinned: Worker | None = None, fingerprint: str | None = None) -> Sequence[Worker]:
        """Workers of a role and group that may be tried; those that failed this request only if there is no other.

        ``baton_only``: only our servers, for what no other engine understands. ``pinned``: no worker but this one.
        ``fingerprint``: only workers whose model has it.
        """
        return self._eligible(self.registry.available(role, group), retries, baton_only, pinned, fingerprint)

    def pair_candidates(self, retries: Retries | None, group: Group = None, *, baton_only: bool = False,
                        pinned: Worker | None = None,
                        fingerprint: str | None = None) -> tuple[Sequence[Worker], Sequence[Worker]]:
        """``candidates`` of both roles that have a partner; ``pinned`` is a decode worker."""
        pairs = self.registry.pairs(group)
        return (self._eligible(pairs.prefills, retries, baton_only, None, fingerprint),
                self._eligible(pairs.decodes, retries, baton_only, pinned, fingerprint))

    def _eligible(self, available: Sequence[Worker], retries: Retries | None, baton_only: bool, pinned: Worker | None,
                  fingerprint: str | None) -> Sequence[Worker]:
        if retries is None and pinned is None and not baton_only:
            return available
        if pinned is not None:
            available = [pinned] if pinned in available else []
        if baton_only and not all(worker.is_baton for worker in available):
            available = [worker for worker in available if worker.is_baton]
        if fingerprint is not None:
            available = [worker for worker in available if worker.model_fingerprint == fingerprint]
        return (without(available, retries.excluded) or available) if retries is not None else available

    def has_untried(self, role: Role, retries: Retries, group: Group = None) -> bool:
        """True if there is a worker that has not failed this request."""
        return any(worker not in retries.excluded for worker in self.registry.available(role, group))

    # ------------------------------------------------------------------ outcomes

    def on_misfit(self, prefill: Worker, decode: Worker) -> None:
        """Check two workers that refused each other at once: one of them is not what it was."""
        for worker in (prefill, decode):
            self._report_failure(worker, Failure("misfit", f"{prefill.url} and {decode.url} do not fit together"))

    def on_failure(self, worker: Worker, failure: Failure) -> None:
        """Account for an attempt that failed below HTTP, or in the middle of its stream."""
        outcome = FAILURES[failure.reason]
        if outcome.excludes or failure.refused:
            self._report_failure(worker, failure)
        if outcome.counts:
            self.on_server_error(worker)

    def report_dead(self, worker: Worker, detail: str) -> None:
        """Report a worker that failed a request and does not pass a health check either."""
        self._report_failure(worker, Failure("dead", detail, refused=True))

    def on_server_error(self, worker: Worker) -> None:
        """Count an attempt that failed by its worker's fault."""
        self.metrics.worker_failures[worker.url] += 1
        if self.registry.record_failure(worker, self.loop.time()):
            logger.warning("Worker %s fails requests: it gets none for %g s.", worker.url, self._circuit_seconds)
            self.metrics.circuits_opened[worker.url] += 1
            # 10 ms later: uvloop counts in milliseconds, and a timer that is early by one would change nothing.
            self.loop.call_later(self._circuit_seconds + 0.01, self._half_open, worker)

    def on_status(self, worker: Worker, status: int, outcome: Outcome, retries: Retries | None) -> None:
        """Account for a worker's status; a 4xx says nothing about the worker, nor does being busy.

        A worker's error counts once another worker has served the same request: a request that fails on all of them
        may be sent as often as its client likes. Without retries this cannot be known, and each error counts.
        """
        if outcome.counts and not self._backoff.max_retries:
            self.on_server_error(worker)
        elif status < 400:
            if retries is not None:
                for accused in retries.accused:
                    self.on_server_error(accused)
                retries.accused.clear()
            if worker.circuit.troubled and self.registry.record_success(worker):
                logger.info("Worker %s answers again: its circuit is closed.", worker.url)
        elif status == 401 and self._strips_client_keys and worker.url not in self._unauthorized:
            self._unauthorized.add(worker.url)
            logger.error("Worker %s asks for a key that the router does not send: clients' keys are not forwarded, so "
                         "give the worker's with --worker-api-key.", worker.url)

    def _half_open(self, worker: Worker) -> None:
        if self.registry.try_half_open(worker, self.loop.time()):
            logger.info("Worker %s gets one request at a time, as a probe of whether it answers again.", worker.url)

    def new_retries(self) -> Retries:
        return Retries(self._backoff, self.rng, self.loop)


def no_pair_error(registry: Registry, group: Group) -> WorkerUnavailable:
    """The error when no pair of workers can take a request for a group."""
    for role in PAIR:
        if not registry.available(role, group):
            return no_worker_error(role, group)
    return WorkerUnavailable("No prefill worker fits with a decode worker.", retry_after=RETRY_AFTER_SECONDS)


def no_worker_error(role: Role, group: Group = None) -> WorkerUnavailable:
    """The error when no worker of a role can take a request for a group."""
    name = "worker" if role == REGULAR else f"{role} worker"
    named = f" for the model `{group}`" if group else ""
    return WorkerUnavailable(f"No healthy {name} is available{named}.", retry_after=RETRY_AFTER_SECONDS)


def bearer(key: str) -> bytes:
    """The Authorization header line of an API key."""
    return b"authorization: Bearer " + key.encode() + b"\r\n"
