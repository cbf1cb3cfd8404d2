"""Where requests come in: who may, what each is for, and which relay or answer of our own serves it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from functools import partial
from random import Random
from typing import Any

from ..common.api.errors import NotFound, ServingError
from .admin.endpoints import ADMIN_ROUTES, OPEN_PATHS
from .admin.model_routes import MODELS, READING, answer_models
from .admin.rights import check_path, is_loopback, needs_admin
from .admin.worker_routes import WORKERS
from .monitoring.cluster_view import ClusterView
from .net.access import ApiKeys, Cors
from .net.body import Peek, peek, require_object, with_model
from .net.http_server import ClientConnection
from .net.request import Request
from .net.responses import Response, check_method
from .obs.access_log import AccessLog
from .obs.tracing import Tracer
from .relay import stored_objects
from .relay.admission_gate import AdmissionGate
from .relay.client_response import ClientResponse, note_failure
from .relay.continuation import ASK_FOR_IDS, StreamLog, continuable
from .relay.first_checks import FirstChecks
from .relay.local_prefill import LocalPrefill
from .relay.pair import PairRelay
from .relay.retry import Backoff, Retries
from .relay.session_affinity import STORES, away, keeper, key_of, with_session_id
from .relay.single import Relay
from .routes import ANY_METHOD, ELSEWHERE, LABELS, PAIR_PATHS, PREFIXES, RELAYED, label
from .workers.registry import Role, Worker

logger = logging.getLogger("baton.router")

_OWN_PATHS = frozenset(ADMIN_ROUTES)

AnswerOwn = Callable[[ClusterView, Request], "Response | Coroutine[Any, Any, Response]"]
"""Answers a request to the router itself, now or later; raises ServingError."""


class _Task:
    """An asynchronous endpoint as a connection's handler: a client that leaves cancels it."""

    def __init__(self, coroutine: Coroutine[Any, Any, None], fail: Callable[[ServingError], None]):
        """``fail`` answers with an error instead."""
        self._task = asyncio.get_running_loop().create_task(coroutine)
        self._fail = fail

    def cancel(self) -> None:
        self._task.cancel()

    def pause(self) -> None:
        pass  # One short answer: nothing to hold back.

    def resume(self) -> None:
        pass

    def expire(self, error: ServingError) -> None:
        self._task.cancel()
        self._fail(error)


class RequestHandler:
    """Serves each request that a connection has read: ``serve`` is the connections' callback."""

    def __init__(self, cluster: ClusterView, answer_own: AnswerOwn, rng: Random, tracer: Tracer | None,
                 gate: AdmissionGate | None):
        """``gate``: where requests may have to wait, or to be refused; None where none ever is."""
        config = cluster.config
        self._cluster = cluster
        self._answer_own = answer_own
        self._rng = rng
        self._tracer = tracer
        self._gate = gate
        self._registry = cluster.registry
        self._metrics = cluster.metrics
        self._dispatcher = cluster.dispatcher
        self._home: Role = "decode" if config.workers.pd_disaggregation else "regular"
        self._keys = ApiKeys(config.security.client_keys, config.security.admin_keys)
        self._guarded = bool(self._keys)
        self._exposed = not self._guarded and not is_loopback(config.http.host)
        self._cors = Cors(config.security.cors_allowed_origins) if config.security.cors_allowed_origins else None
        self._continues = config.retry.stream_continuation
        self._local_prefill: LocalPrefill | None = None
        if config.retry.local_prefill_tokens:
            self._local_prefill = LocalPrefill(self._dispatcher, config.retry.local_prefill_tokens)
        self._first_checks = FirstChecks(self._registry, self._serve_held, self._refuse)
        self.access_log = AccessLog(self._dispatcher.loop) if logger.isEnabledFor(logging.INFO) else None

    def serve(self, connection: ClientConnection, request: Request) -> None:
        """Begin to serve one request."""
        path = request.path
        try:
            if self._cors is not None:
                request.reply_headers = self._cors.grant(request.origin)
                if request.method == b"OPTIONS" and request.origin:
                    self._answer(connection, request, self._cors.preflight(request))
                    return
            methods = RELAYED.get(path)
            if methods is None:
                check_path(path)
            if self._guarded and path not in OPEN_PATHS:
                self._keys.check(request, admin=methods is None and needs_admin(request))
            elif self._exposed and methods is None and needs_admin(request):
                self._warn_of(connection, request)
            if methods is None and path in ADMIN_ROUTES:
                self._serve_own(connection, request)
                return
            if methods is None and path.startswith(PREFIXES):
                methods = ANY_METHOD
            if methods is None and (path == WORKERS or path.startswith(WORKERS + b"/")):
                self._serve_own(connection, request)
                return
            if methods is None:
                instead = next((words for known, words in ELSEWHERE.items() if path.startswith(known)), None)
                raise NotFound(f"There is no {path.decode('latin-1')} here{': ' + instead if instead else ''}.")
            if request.method not in methods:
                check_method(request, methods)
            self._relay(connection, request)
        except ServingError as error:
            self._refuse(connection, request, error)

    @staticmethod
    def _warn_of(connection: ClientConnection, request: Request) -> None:
        peer = connection.transport.get_extra_info("peername")
        logger.warning("%s %s by %s, without a key: whoever reaches this router may (see --admin-api-key).",
                       request.method.decode(), request.path.decode("latin-1"), peer[0] if peer else "somebody")

    def _serve_held(self, connection: ClientConnection, request: Request) -> None:
        """Go on with a request that waited for the workers' first checks."""
        try:
            self._relay(connection, request)
        except ServingError as error:
            self._refuse(connection, request, error)

    def _refuse(self, connection: ClientConnection, request: Request, error: ServingError) -> None:
        note_failure(error.status, error.message, request)
        self._answer(connection, request, Response.error(error, request.path))

    def serve_scrape(self, connection: ClientConnection, request: Request) -> None:
        """Serve a request on --prometheus-port."""
        if request.path == b"/metrics":
            self._serve_own(connection, request)
        else:
            self._answer(connection, request, Response.error(NotFound("Only /metrics is served here.")))

    def _relay(self, connection: ClientConnection, request: Request) -> None:
        path = request.path
        pair = self._home == "decode" and path in PAIR_PATHS
        found = require_object(request.body) if pair else peek(request.body) if request.body else None
        if self._registry.unchecked and self._first_checks.hold(
                connection, request, ("prefill", "decode") if pair else (self._home,),
                found.model_name if found is not None else ""):
            return
        if self._registry.models.checked:
            if (path == MODELS or path.startswith(MODELS + b"/")) and request.method in READING:
                self._answer(connection, request, answer_models(self._registry.models, request))
                return
            self._find_group(request, found)
            if path.startswith(STORES) and self._registry.models.apart and stored_objects.is_known(request):
                connection.handler = _Task(self._relay_stored(connection, request),
                                           partial(self._refuse, connection, request))
                return
        usual = found is not None and path in PAIR_PATHS and not found.session_params
        self._begin(connection, request, found, self._keeper_of(request) if not usual else None, pair)

    async def _relay_stored(self, connection: ClientConnection, request: Request) -> None:
        """Serve a request that speaks of what the keeper of one of several models has."""
        try:
            if stored_objects.is_list(request):
                self._answer(connection, request, await stored_objects.listed(self._dispatcher, self._home, request))
                return
            kept = await stored_objects.find(self._dispatcher, self._home, request, stored_objects.described_at(request))
            if kept is not None:
                request.group = None  # Whatever its model is.
            self._begin(connection, request, None, kept or self._keeper_of(request), pair=False)
        except ServingError as error:
            self._refuse(connection, request, error)

    def _begin(self, connection: ClientConnection, request: Request, found: Peek | None, kept: Worker | None,
               pair: bool) -> None:
        """Begin to relay; ``kept``: the one worker that can answer."""
        path = request.path
        span = self._tracer.begin(request) if self._tracer is not None else None
        exchange = ClientResponse(connection, request, LABELS.get(path) or label(path, _OWN_PATHS), self._metrics,
                                  self.access_log, span)
        if self._dispatcher.poison.records and request.body:
            exchange.suspect = self._dispatcher.poison.suspect(request)
        if (self._continues and found is not None and found.streamed and path in PAIR_PATHS
                and continuable(request.body)):
            exchange.log = StreamLog(request.body, cumulative=path == b"/generate")
            request.headers += ASK_FOR_IDS
        relay = self._relay_for(exchange, found, kept, pair)
        if self._gate is not None and request.method == b"POST":
            exchange.ticket = self._gate.admission.walk_in()
            if exchange.ticket is None:
                self._gate.start(exchange, relay)
                return
        connection.handler = relay
        relay.start()

    def _relay_for(self, exchange: ClientResponse, found: Peek | None, kept: Worker | None,
                   pair: bool) -> Relay | PairRelay:
        """``kept``: the one worker that can answer. ``pair``: a pair serves it, unless one worker does so alone."""
        request, dispatcher = exchange.request, self._dispatcher
        if pair and (kept is None or not kept.is_baton):  # Ours serve a session alone: prefill knows nothing of it.
            assert found is not None
            if kept is None and self._local_prefill is not None:
                alone = self._local_prefill.subject(request, found)
                if alone:
                    return Relay(dispatcher, exchange, "decode", alone[0], own=True)
            return PairRelay(dispatcher, exchange, found, only=kept)
        role = self._home if request.method == b"POST" else self._role_for(request)
        subject = dispatcher.subject(role, request, found)
        return Relay(dispatcher, exchange, role, subject, only=kept,
                     retries=self._no_retries() if kept is not None else None)

    def _find_group(self, request: Request, found: Peek | None) -> None:
        """Read which model is asked for, by its real name from here on; raises ModelNotFound."""
        models = self._registry.models
        asked = found.model_name if found is not None else ""
        if stored_objects.is_upload(request):
            asked = stored_objects.model_of_upload(request.body)
            request.group = models.group(models.real_name(asked))
            return
        name = models.real_name(asked)
        if name != asked:
            request.body = with_model(request.body, name)
        request.group = models.group(name)

    def _keeper_of(self, request: Request) -> Worker | None:
        """The one worker that can answer, where it is one; raises WorkerUnavailable while that one is away."""
        if request.path == b"/open_session":
            request.body = with_session_id(self._registry, self._home, request.body, request.group)
        key = key_of(request.path, request.body)
        worker = keeper(self._registry, self._home, key, request.group) if key is not None else None
        if worker is not None and worker not in self._registry.available(self._home):
            raise away()
        return worker

    def _no_retries(self) -> Retries:
        """What a worker keeps may have changed by the request that failed."""
        return Retries(Backoff(0, 0.0, 0.0, 1.0, 0.0), self._rng, self._dispatcher.loop)

    def _role_for(self, request: Request) -> Role:
        """Where questions go: in a cluster of pairs to decode, or to whoever is there."""
        if self._home == "decode" and not self._registry.available("decode", request.group):
            return "prefill"
        return self._home

    def _serve_own(self, connection: ClientConnection, request: Request) -> None:
        result = self._answer_own(self._cluster, request)
        if isinstance(result, Response):
            self._answer(connection, request, result)
        else:
            connection.handler = _Task(
                self._answer_later(connection, request, result),
                lambda error: self._answer(connection, request, Response.error(error, request.path)))

    async def _answer_later(self, connection: ClientConnection, request: Request,
                            result: Coroutine[Any, Any, Response]) -> None:
        try:
            response = await result
        except ServingError as error:
            self._refuse(connection, request, error)
        else:
            self._answer(connection, request, response)

    def _answer(self, connection: ClientConnection, request: Request, response: Response) -> None:
        self._metrics.requests[label(request.path, _OWN_PATHS), response.status] += 1
        connection.respond(request, response)
        connection.done(keep_alive=request.keep_alive)
