"""Entry of requests: authorization, the route, and the relay or the router's own handler that serves it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from functools import partial
from random import Random
from typing import Any

from ..common.api.errors import NotFound, ServingError
from .admin.endpoints import OPEN_PATHS, admin_routes
from .admin.model_routes import MODELS, READING, answer_models
from .admin.rights import check_path, is_loopback, needs_admin
from .admin.worker_routes import WORKERS
from .monitoring.cluster_view import ClusterView
from .net.access import ApiKeys, Cors
from .net.body import RoutingFields, require_object, routing_fields, with_model
from .net.http_server import ClientConnection
from .net.request import Request
from .net.responses import Response, check_method
from .obs.access_log import AccessLog
from .obs.tracing import Tracer
from .relay import stored_objects, stored_responses
from .relay.admission_gate import AdmissionGate
from .relay.client_response import ClientResponse, note_failure
from .relay.continuation import TOKEN_IDS_HEADER, StreamLog, is_continuable
from .relay.first_checks import FirstChecks
from .relay.local_prefill import LocalPrefill
from .relay.pair import PairRelay
from .relay.retry import Backoff, Retries
from .relay.session_affinity import STORE_PATHS, affine_worker, affine_worker_unavailable, affinity_key, with_session_id
from .relay.single import Relay
from .routes import COMPUTING, Route, RouteTable
from .workers.registry import Role, Worker
from .workers.roles import PAIR, SENDER, answering_role

logger = logging.getLogger("baton.router")

RouterHandler = Callable[[ClusterView, Request], "Response | Coroutine[Any, Any, Response]"]
"""Answers a request to the router itself, now or later; raises ServingError."""


def route_table() -> RouteTable:
    """The routes of a router; raises ConfigError for a command's plug-in that does not load."""
    return RouteTable(admin_routes(), open_paths=OPEN_PATHS, router_folder=WORKERS)


class _Task:
    """An asynchronous endpoint as a connection's handler: a client that leaves cancels it."""

    def __init__(self, coroutine: Coroutine[Any, Any, None], fail: Callable[[ServingError], None]):
        """``fail`` responds with an error instead."""
        self._task = asyncio.get_running_loop().create_task(coroutine)
        self._fail = fail

    def cancel(self) -> None:
        self._task.cancel()

    def pause(self) -> None:
        pass  # One short response: nothing to stop.

    def resume(self) -> None:
        pass

    def expire(self, error: ServingError) -> None:
        self._task.cancel()
        self._fail(error)


class RequestHandler:
    """Serves each request that a connection has parsed: ``serve`` is the connections' callback."""

    def __init__(self, cluster: ClusterView, router_handler: RouterHandler, rng: Random, tracer: Tracer | None,
                 gate: AdmissionGate | None):
        """``gate``: admission, where requests may have to wait or be refused; None without any limit."""
        config = cluster.config
        self._routes = route_table()
        self._cluster = cluster
        self._router_handler = router_handler
        self._rng = rng
        self._tracer = tracer
        self._gate = gate
        self._registry = cluster.registry
        self._metrics = cluster.metrics
        self._dispatcher = cluster.dispatcher
        self._pairs = config.workers.pd_disaggregation
        self._role: Role = answering_role(pairs=self._pairs)
        """The role that serves requests which need no pair."""
        self._keys = ApiKeys(config.security.client_keys, config.security.admin_keys)
        self._has_keys = bool(self._keys)
        self._is_exposed = not self._has_keys and not is_loopback(config.http.host)
        self._cors = Cors(config.security.cors_allowed_origins) if config.security.cors_allowed_origins else None
        self._continues_streams = config.retry.stream_continuation
        self._local_prefill: LocalPrefill | None = None
        if config.retry.local_prefill_tokens:
            self._local_prefill = LocalPrefill(self._dispatcher, config.retry.local_prefill_tokens)
        self._first_checks = FirstChecks(self._registry, self._serve_after_checks, self._refuse)
        self.access_log = AccessLog(self._dispatcher.loop) if logger.isEnabledFor(logging.INFO) else None

    def serve(self, connection: ClientConnection, request: Request) -> None:
        """Begin to serve one request."""
        try:
            if self._cors is not None:
                request.reply_headers = self._cors.grant(request.origin)
                if request.method == b"OPTIONS" and request.origin:
                    self._respond(connection, request, self._cors.preflight(request))
                    return
            route = self._routes[request.path]
            if not route.is_plain:
                check_path(request.path)
            if self._has_keys or self._is_exposed:
                self._authorize(connection, request, route)
            if route.kind == "relay":
                if request.method not in route.methods:
                    check_method(request, route.methods)
                self._relay(connection, request, route)
            elif route.kind == "router":
                self._serve_router(connection, request)
            else:
                raise NotFound(f"There is no {request.path.decode('latin-1')} here"
                               f"{': ' + route.hint if route.hint else ''}.")
        except ServingError as error:
            self._refuse(connection, request, error)

    def _authorize(self, connection: ClientConnection, request: Request, route: Route) -> None:
        """Raises Unauthorized; without any keys, logs who changes workers from another machine."""
        if self._has_keys:
            if not route.is_open:
                self._keys.check(request, admin=not route.is_plain and needs_admin(request))
        elif not route.is_plain and needs_admin(request):
            peer = connection.transport.get_extra_info("peername")
            logger.warning("%s %s by %s, without a key: whoever reaches this router may (see --admin-api-key).",
                           request.method.decode(), request.path.decode("latin-1"), peer[0] if peer else "somebody")

    def _serve_after_checks(self, connection: ClientConnection, request: Request) -> None:
        """Relay a request that waited for the workers' first checks."""
        try:
            self._relay(connection, request, self._routes[request.path])
        except ServingError as error:
            self._refuse(connection, request, error)

    def _refuse(self, connection: ClientConnection, request: Request, error: ServingError) -> None:
        note_failure(error.status, error.message, request)
        self._respond(connection, request, Response.error(error, request.path))

    def serve_scrape(self, connection: ClientConnection, request: Request) -> None:
        """Serve a request on --prometheus-port."""
        if request.path == b"/metrics":
            self._serve_router(connection, request)
        else:
            self._respond(connection, request, Response.error(NotFound("Only /metrics is served here.")))

    def _relay(self, connection: ClientConnection, request: Request, route: Route) -> None:
        path = request.path
        pair = self._pairs and route.runs_on_pair
        fields = require_object(request.body) if pair else routing_fields(request.body) if request.body else None
        if self._registry.unchecked and self._first_checks.wait(
                connection, request, PAIR if pair else (self._role,),
                fields.model_name if fields is not None else ""):
            return
        if self._registry.models.checked:
            if (path == MODELS or path.startswith(MODELS + b"/")) and request.method in READING:
                self._respond(connection, request, answer_models(self._registry.models, request))
                return
            self._resolve_model(request, fields)
            if (path.startswith(STORE_PATHS) and self._registry.models.grouped
                    and stored_objects.refers_to_stored(request)):
                connection.handler = _Task(self._relay_stored(connection, request, route),
                                           partial(self._refuse, connection, request))
                return
        if path.startswith(stored_responses.PATH) and self._relay_response(connection, request, route, fields, pair):
            return
        needs_no_affinity = fields is not None and route.runs_on_pair and not fields.session_params
        pinned = None if needs_no_affinity else self._pinned_worker(request)
        self._start_relay(connection, request, route, fields, pinned, pair)

    async def _relay_stored(self, connection: ClientConnection, request: Request, route: Route) -> None:
        """Relay a request for a file or batch of one of several models to the worker that stores it."""
        try:
            if stored_objects.is_list(request):
                merged = await stored_objects.merged_list(self._dispatcher, self._role, request)
                self._respond(connection, request, merged)
                return
            path = stored_objects.resource_path(request)
            worker = await stored_objects.find_worker(self._dispatcher, self._role, request, path)
            if worker is not None:
                request.group = None  # Whatever its model is.
            self._start_relay(connection, request, route, None, worker or self._pinned_worker(request), pair=False)
        except ServingError as error:
            self._refuse(connection, request, error)

    def _relay_response(self, connection: ClientConnection, request: Request, route: Route,
                        fields: RoutingFields | None, pair: bool) -> bool:
        """Relay a request that concerns a stored answer of /v1/responses, or one with tools that its worker runs; False
        if it is neither."""
        if name := stored_responses.stored_id(request):
            task = self._relay_to_holder(connection, request, route, name)
        else:
            needs = stored_responses.needs_of(request.body)
            if needs.previous_id is None:
                if needs.server_tools and pair:
                    self._start_relay(connection, request, route, fields, None, pair=False)
                    return True
                return False
            task = self._relay_continued(connection, request, route, needs, pair)
        connection.handler = _Task(task, partial(self._refuse, connection, request))
        return True

    async def _relay_to_holder(self, connection: ClientConnection, request: Request, route: Route, name: str) -> None:
        """Relay a request for a stored answer to the worker that stores it."""
        try:
            worker = await stored_responses.find_worker(self._dispatcher, self._role, request, name, "response_id")
            request.group = None  # Whatever its model is.
            self._start_relay(connection, request, route, None, worker, pair=False)
        except ServingError as error:
            self._refuse(connection, request, error)

    async def _relay_continued(self, connection: ClientConnection, request: Request, route: Route,
                               needs: stored_responses.Needs, pair: bool) -> None:
        """Relay a request that continues a stored answer, with its conversation."""
        name = needs.previous_id
        assert name is not None
        try:
            worker = await stored_responses.find_worker(self._dispatcher, self._role, request, name,
                                                        "previous_response_id")
            pinned = None if worker.is_baton else worker
            if pinned is None:
                request.body = await stored_responses.with_conversation(self._dispatcher, worker, request, name)
            pair = pair and not needs.server_tools
            self._start_relay(connection, request, route, require_object(request.body), pinned, pair)
        except ServingError as error:
            self._refuse(connection, request, error)

    def _start_relay(self, connection: ClientConnection, request: Request, route: Route, fields: RoutingFields | None,
                     pinned: Worker | None, pair: bool) -> None:
        """Relay a request. ``pinned``: the one worker that can answer."""
        span = self._tracer.begin(request) if self._tracer is not None else None
        response = ClientResponse(connection, request, route.label, self._metrics, self.access_log, span)
        if self._dispatcher.poison.records and request.body:
            response.suspect = self._dispatcher.poison.suspect(request)
        if (self._continues_streams and fields is not None and fields.streamed and route.runs_on_pair
                and is_continuable(request.body)):
            response.log = StreamLog(request.body, cumulative=request.path == b"/generate")
            request.headers += TOKEN_IDS_HEADER
        relay = self._make_relay(response, fields, pinned, pair)
        if self._gate is not None and request.method in COMPUTING and not stored_responses.stored_id(request):
            response.permit = self._gate.admission.try_acquire()
            if response.permit is None:
                self._gate.start(response, relay)
                return
        connection.handler = relay
        relay.start()

    def _make_relay(self, response: ClientResponse, fields: RoutingFields | None, pinned: Worker | None,
                    pair: bool) -> Relay | PairRelay:
        """``pinned``: the one worker that can answer. ``pair``: a pair serves it, unless one worker does so alone."""
        request, dispatcher = response.request, self._dispatcher
        # Our servers serve a session alone: prefill knows nothing of it.
        if pair and (pinned is None or not pinned.is_baton):
            assert fields is not None
            if pinned is None and self._local_prefill is not None:
                alone = self._local_prefill.subject(request, fields)
                if alone:
                    return Relay(dispatcher, response, self._role, alone[0], baton_only=True)
            return PairRelay(dispatcher, response, fields, pinned=pinned)
        role = self._role if request.method in COMPUTING else self._role_of_query(request)
        subject = dispatcher.subject(role, request, fields)
        return Relay(dispatcher, response, role, subject, pinned=pinned,
                     retries=self._no_retries() if pinned is not None else None)

    def _resolve_model(self, request: Request, fields: RoutingFields | None) -> None:
        """Set the request's model group, and its body's model by its real name; raises ModelNotFound."""
        models = self._registry.models
        model = fields.model_name if fields is not None else ""
        if stored_objects.is_upload(request):
            model = stored_objects.model_of_upload(request.body)
            request.group = models.group(models.real_name(model))
            return
        name = models.real_name(model)
        if name != model:
            request.body = with_model(request.body, name)
        request.group = models.group(name)

    def _pinned_worker(self, request: Request) -> Worker | None:
        """The one worker that can answer, or None if any can; raises WorkerUnavailable while it is not available."""
        if request.path == b"/open_session":
            request.body = with_session_id(self._registry, self._role, request.body, request.group)
        key = affinity_key(request.path, request.body)
        worker = affine_worker(self._registry, self._role, key, request.group) if key is not None else None
        if worker is not None and worker not in self._registry.available(self._role):
            raise affine_worker_unavailable()
        return worker

    def _no_retries(self) -> Retries:
        """No retries, as the failed request may have changed what the worker stores."""
        return Retries(Backoff(0, 0.0, 0.0, 1.0, 0.0), self._rng, self._dispatcher.loop)

    def _role_of_query(self, request: Request) -> Role:
        """The role for a GET or HEAD: in a cluster of pairs decode, or prefill if there is no decode worker."""
        if self._pairs and not self._registry.available(self._role, request.group):
            return SENDER
        return self._role

    def _serve_router(self, connection: ClientConnection, request: Request) -> None:
        """Answer a request to the router itself."""
        result = self._router_handler(self._cluster, request)
        if isinstance(result, Response):
            self._respond(connection, request, result)
        else:
            connection.handler = _Task(
                self._respond_later(connection, request, result),
                lambda error: self._respond(connection, request, Response.error(error, request.path)))

    async def _respond_later(self, connection: ClientConnection, request: Request,
                             result: Coroutine[Any, Any, Response]) -> None:
        try:
            response = await result
        except ServingError as error:
            self._refuse(connection, request, error)
        else:
            self._respond(connection, request, response)

    def _respond(self, connection: ClientConnection, request: Request, response: Response) -> None:
        self._metrics.requests[self._routes[request.path].label, response.status] += 1
        connection.respond(request, response)
        connection.done(keep_alive=request.keep_alive)
