"""The router, put together: routes, workers, sockets, and their beginning and end."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import ssl
from collections import Counter
from collections.abc import Callable, Coroutine
from random import Random
from typing import Any

from ..common.api.errors import ConfigError, NotFound, ServingError
from ..common.obs.tracing import exporter_for
from .access import Cors, Keys
from .admin import ADMIN_ROUTES, CHANGING, OPEN_PATHS
from .body import peek, require_object
from .config import RouterConfig
from .continuation import ASK_FOR_IDS, StreamLog, continuable
from .dashboard import Sampler
from .discovery import Discovery
from .endpoint import Endpoint
from .exchange import Exchange
from .gate import Gate
from .http_server import ClientConnection, Serve
from .local_prefill import LocalPrefill
from .metrics import Metrics
from .parts import Parts
from .pd import PairRelay
from .registry import Role, Worker
from .relay import Relay
from .request import Request
from .request_reader import HeadRules
from .retry import Backoff, Retries
from .routes import ANY_METHOD, CONTINUED_PATHS, ELSEWHERE, LABELS, PAIR_PATHS, PREFIXES, RELAYED, label
from .sticky import away, keeper, key_of, with_session_id
from .tls import server_context
from .tracing import Tracer
from .wire import Response, check_method
from .worker_routes import WORKERS, changes_workers

logger = logging.getLogger("baton.router")
_OWN_PATHS = frozenset(ADMIN_ROUTES)


class _Task:
    """An asynchronous endpoint as a connection's handler: a client that leaves cancels it."""

    def __init__(self, coroutine: Coroutine[Any, Any, None]):
        self._task = asyncio.get_running_loop().create_task(coroutine)

    def cancel(self) -> None:
        self._task.cancel()

    def pause(self) -> None:
        pass  # One short answer: nothing to hold back.

    def resume(self) -> None:
        pass


class Router:
    """One router process: ``await start()``, requests are served, ``await stop()``."""

    def __init__(self, config: RouterConfig, *, rng: Random | None = None, parts: Parts | None = None):
        self.config = config
        self._parts = parts = parts or Parts()
        self.registry = parts.registry(config, self._leave)
        self.metrics = Metrics(self.registry)
        self.sampler = Sampler(self)
        self._rng = rng or Random()
        self._health = parts.health(config, self.registry, self._regroup if config.workers.dp_aware else None)
        self._connections: set[ClientConnection] = set()
        self._server: asyncio.Server | None = None
        self._scraped: asyncio.Server | None = None
        self._discovery: Discovery | None = None
        self.port = config.http.port
        self._sweeper: asyncio.Task[None] | None = None
        self._home: Role = "decode" if config.workers.pd_disaggregation else "regular"
        self._keys = Keys(config.security.client_keys, config.security.admin_keys)
        self._guarded = bool(self._keys)
        self._cors = Cors(config.security.cors_allowed_origins) if config.security.cors_allowed_origins else None
        self._tracer = Tracer(exporter_for(config.logs.traces_to)) if config.logs.traces_to else None
        self._gate: Gate | None = None
        self._continues = config.retry.stream_continuation
        self._local_prefill: LocalPrefill | None = None
        self._log_access = logger.isEnabledFor(logging.INFO)

    # ------------------------------------------------------------------ life

    async def start(self) -> None:
        """Listen and begin to watch the workers; raises ConfigError when the address cannot be had."""
        loop = asyncio.get_running_loop()
        parts = self._parts
        self.dispatcher = parts.dispatcher(self.config, self.registry, self.metrics, self._rng, self._health.suspect)
        if self.config.retry.local_prefill_tokens:
            self._local_prefill = LocalPrefill(self.dispatcher, self.config.retry.local_prefill_tokens)
        entry = self.config.admission.rules
        self._gate = Gate(parts.admission(entry, loop), loop) if entry.active and parts.accepts else None
        self.metrics.admission = self._gate.admission if self._gate is not None else None
        if parts.accepts:
            self._server = await self._listen(self.serve, self.config.http.host, self.config.http.port,
                                              server_context(self.config.security))
            self.port = self._server.sockets[0].getsockname()[1]
        if self.config.logs.prometheus_port is not None:
            self._scraped = await self._listen(self._serve_scrape, self.config.logs.prometheus_host,
                                               self.config.logs.prometheus_port, None)
        for spec in self.config.workers.specs:
            self.add_worker(Worker(Endpoint.parse(spec.url), spec.role, bootstrap_port=spec.bootstrap_port))
        if self.config.discovery.service_discovery:
            self._discovery = Discovery(self, self.config.discovery)
        self.sampler.start()
        self._sweeper = loop.create_task(self._sweep())
        gc.freeze()  # What lives as long as the process need not be walked by every full collection.

    async def _listen(self, serve: Serve, host: str, port: int, tls: ssl.SSLContext | None) -> asyncio.Server:
        loop = asyncio.get_running_loop()
        rules = HeadRules([name.lower().encode() for name in self.config.http.request_id_headers],
                          own_traces=self._tracer is not None)
        try:
            return await loop.create_server(
                lambda: ClientConnection(serve, max_payload=self.config.http.max_payload_size,
                                         connections=self._connections, loop=loop, rules=rules),
                host, port, backlog=4096, ssl=tls, reuse_port=self.config.http.router_workers > 1 or None)
        except OSError as error:
            reason = os.strerror(error.errno) if error.errno else error
            raise ConfigError(f"Cannot listen on {host}:{port}: {reason}.") from None

    async def stop(self) -> None:
        """Stop accepting, let running requests end for up to ``--shutdown-grace-secs``, then cut them."""
        assert self._sweeper is not None
        if self._server is not None:
            self._server.close()
        if self._scraped is not None:
            self._scraped.close()
        for connection in list(self._connections):
            connection.close_when_idle()
        deadline = self.dispatcher.loop.time() + self.config.http.shutdown_grace_secs
        while self._connections and self.dispatcher.loop.time() < deadline:
            await asyncio.sleep(0.02)
        if self._connections:
            logger.warning("Cut %d connections at the end of --shutdown-grace-secs.", len(self._connections))
        for connection in list(self._connections):
            connection.transport.abort()
        self._sweeper.cancel()
        self.sampler.stop()
        if self._discovery is not None:
            self._discovery.stop()
        if self._gate is not None:
            self._gate.close()
        await self._health.close()
        self.dispatcher.close()
        if self._server is not None:
            await self._server.wait_closed()
        if self._tracer is not None:
            await asyncio.to_thread(self._tracer.close)

    async def _sweep(self) -> None:
        limit = self.config.http.request_timeout_secs
        idle_limit = self.config.http.keep_alive_secs
        pause = min(1.0, limit / 4 or 1.0, idle_limit / 4 or 1.0)
        while True:
            await asyncio.sleep(pause)
            self.dispatcher.sweep(limit)
            now = self.dispatcher.loop.time()
            for connection in list(self._connections):
                connection.sweep(now, limit)
                if idle_limit and connection.idle_sweeps > idle_limit / pause:
                    connection.close_when_idle()

    # ------------------------------------------------------------------ membership

    def add_worker(self, worker: Worker) -> None:
        """Register a worker and begin to watch it; raises Conflict when its URL is taken."""
        self.registry.add(worker)
        self.dispatcher.open_pool(worker)
        self._health.watch(worker, self.dispatcher)

    def drain_worker(self, url: str) -> list[Worker]:
        """Take a worker, or all ranks of a server, out of new decisions; each is removed when its running requests have
        ended. Raises NotFound."""
        drained = [self.registry.drain(worker.url) for worker in self.registry.at(url)]
        for worker in drained:
            if worker in self.registry:
                logger.info("Worker %s drains; %d requests run on it.", worker.url, worker.load)
        return drained

    def remove_worker(self, url: str, *, force: bool = False) -> list[Worker]:
        """Take a worker, or all ranks of a server, off the list; running requests end undisturbed, unless ``force``
        cuts them. Raises NotFound."""
        removed = self.registry.at(url)
        for worker in removed:
            if force:
                self.dispatcher.cut(worker)
            self._leave(worker)
        return removed

    def _leave(self, worker: Worker) -> None:
        self.registry.remove(worker.url)
        self._health.unwatch(worker)
        self.dispatcher.close_pool(worker)
        logger.info("Worker %s is removed; %d requests still run on it.", worker.url, worker.load)

    def _regroup(self, worker: Worker, count: int) -> None:
        """A server told how many ranks it has: make each of them a worker."""
        wanted: set[int | None] = set(range(count)) if count > 1 else {None}
        present = {known.rank: known for known in self.registry if known.root is worker.root}
        if worker.draining or present.keys() == wanted:
            return
        for rank, known in present.items():
            if rank not in wanted:
                self._leave(known)
        for rank in wanted - present.keys():
            self.add_worker(worker.of_rank(rank))

    def counts(self) -> dict[str, int]:
        """Workers by role and state, as ``{"prefill_healthy": 2}``."""
        return dict(Counter(f"{worker.role}_{worker.state}" for worker in self.registry))

    # ------------------------------------------------------------------ requests

    def serve(self, connection: ClientConnection, request: Request) -> None:
        """Begin to serve one request."""
        path = request.path
        try:
            if self._cors is not None:
                request.reply_headers = self._cors.grant(request.origin)
                if request.method == b"OPTIONS" and request.origin:
                    self._answer(connection, request, self._cors.preflight(request))
                    return
            if self._guarded and path not in OPEN_PATHS:
                self._keys.check(request, admin=path in CHANGING or changes_workers(request))
            methods = RELAYED.get(path)
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
            self._answer(connection, request, Response.error(error, path))

    def _serve_scrape(self, connection: ClientConnection, request: Request) -> None:
        """Serve a request on --prometheus-port."""
        if request.path == b"/metrics":
            self._serve_own(connection, request)
        else:
            self._answer(connection, request, Response.error(NotFound("Only /metrics is served here.")))

    def _relay(self, connection: ClientConnection, request: Request) -> None:
        path = request.path
        pair = self._home == "decode" and path in PAIR_PATHS
        found = require_object(request.body) if pair else peek(request.body) if request.body else None
        usual = found is not None and path in PAIR_PATHS and not found.session_params
        kept = self._keeper_of(request) if not usual else None
        span = self._tracer.begin(request) if self._tracer is not None else None
        route = LABELS.get(path) or label(path, _OWN_PATHS)
        exchange = Exchange(connection, request, route, self.metrics, self._log_access, span)
        relay: Relay | PairRelay
        if (self._continues and found is not None and found.streamed and path in CONTINUED_PATHS
                and continuable(request.body)):
            exchange.log = StreamLog(request.body, cumulative=path == b"/generate")
            request.headers += ASK_FOR_IDS
        alone = self._local_prefill.subject(request, found) if pair and self._local_prefill and kept is None else []
        if alone:
            relay = Relay(self.dispatcher, exchange, "decode", alone[0], own=True)
        elif pair and (kept is None or not kept.is_baton):  # Ours serve a session alone: prefill knows nothing of it.
            assert found is not None
            relay = PairRelay(self.dispatcher, exchange, found, only=kept)
        else:
            role = self._home if request.method == b"POST" else self._role_for(request)
            subject = self.dispatcher.policies[role].read(request, found)
            relay = Relay(self.dispatcher, exchange, role, subject, only=kept,
                          retries=self._no_retries() if kept is not None else None)
        if self._gate is not None and request.method == b"POST":
            exchange.ticket = self._gate.admission.walk_in()
            if exchange.ticket is None:
                self._gate.start(exchange, relay)
                return
        connection.handler = relay
        relay.start()

    def _keeper_of(self, request: Request) -> Worker | None:
        """The one worker that can answer, where it is one; raises WorkerUnavailable while that one is away."""
        if request.path == b"/open_session":
            request.body = with_session_id(self.registry, self._home, request.body)
        key = key_of(request.path, request.body)
        worker = keeper(self.registry, self._home, key) if key is not None else None
        if worker is not None and worker not in self.registry.available(self._home):
            raise away()
        return worker

    def _no_retries(self) -> Retries:
        """What a worker keeps may have changed by the request that failed."""
        return Retries(Backoff(0, 0.0, 0.0, 1.0, 0.0), self._rng, self.dispatcher.loop)

    def _role_for(self, request: Request) -> Role:
        """Where questions go: in a cluster of pairs to decode, or to whoever is there."""
        if self._home == "decode" and not self.registry.available("decode"):
            return "prefill"
        return self._home

    def _serve_own(self, connection: ClientConnection, request: Request) -> None:
        result = self._parts.answer(self, request)
        if isinstance(result, Response):
            self._answer(connection, request, result)
        else:
            connection.handler = _Task(self._answer_later(connection, request, result))

    async def _answer_later(self, connection: ClientConnection, request: Request,
                            result: Coroutine[Any, Any, Response]) -> None:
        self._answer(connection, request, await result)

    def _answer(self, connection: ClientConnection, request: Request, response: Response) -> None:
        self.metrics.requests[label(request.path, _OWN_PATHS), response.status] += 1
        connection.respond(request, response)
        connection.done(keep_alive=request.keep_alive)


async def serve(config: RouterConfig, *, ready: Callable[[Router], None] | None = None,
                stop: asyncio.Event | None = None) -> None:
    """Run a router until ``stop`` is set (without one: until cancelled); ``ready`` is called once it listens."""
    router = Router(config)
    await router.start()
    try:
        if ready is not None:
            ready(router)
        await (stop or asyncio.Event()).wait()
    finally:
        await router.stop()
