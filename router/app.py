"""The router: its components, workers and sockets, how they start and stop."""

from __future__ import annotations

import asyncio
import gc
import logging
import ssl
from collections import Counter
from collections.abc import Callable, Sequence
from random import Random

from ..common.api.errors import ConfigError, WorkerUnavailable
from ..common.config.addresses import cannot_listen
from ..common.obs.tracing import exporter_for
from .components import Components, LocalComponents
from .config import RouterConfig
from .config.endpoint import Endpoint
from .entry import RequestHandler
from .monitoring.activity import log_activity
from .monitoring.dashboard import Sampler
from .monitoring.discovery import Discovery
from .monitoring.worker_reports import WorkerReports
from .net.deadlines import ClientLimits, Deadlines
from .net.http_server import ClientConnection, Serve
from .net.request_reader import HeadRules
from .net.tls import server_context
from .obs.metrics import Metrics
from .obs.tracing import Tracer
from .policies.cache_exact import CacheExact
from .relay.admission_gate import AdmissionGate
from .relay.dispatcher import RETRY_AFTER_SECONDS, Dispatcher, Watch
from .relay.pair import PairRelay
from .workers.registry import Worker, WorkerMetadata

logger = logging.getLogger("baton.router")
_LAST_ERRORS_SECONDS = 1.0
"""Time for clients that are slow to read to take the errors of requests that were cut at shutdown."""


class Router:
    """One router process: ``await start()``, requests are served, ``await stop()``."""

    def __init__(self, config: RouterConfig, *, rng: Random | None = None, components: Components | None = None):
        self.config = config
        self._components = components = components or LocalComponents()
        self.registry = components.registry(config, self._leave)
        self.metrics = Metrics(self.registry)
        self.reports = WorkerReports(self)
        self.sampler = Sampler(self)
        self._rng = rng or Random()
        self._health = components.health(config, self.registry, self._update_ranks if config.workers.dp_aware else None,
                                         self.change_role)
        self._connections: set[ClientConnection] = set()
        self._server: asyncio.Server | None = None
        self._metrics_server: asyncio.Server | None = None
        self._discovery: Discovery | None = None
        self.port = config.http.port
        self._sweep_task: asyncio.Task[None] | None = None
        self._activity_task: asyncio.Task[None] | None = None
        self._tracer = Tracer(exporter_for(config.observe.traces_to)) if config.observe.traces_to else None
        self._gate: AdmissionGate | None = None
        self.update_lock = asyncio.Lock()

    # ------------------------------------------------------------------ start and stop

    async def start(self) -> None:
        """Listens and begins to watch the workers; raises ConfigError when it cannot listen at the address."""
        loop = asyncio.get_running_loop()
        self._deadlines = Deadlines(loop, ClientLimits.of(self.config.http))
        components = self._components
        self.dispatcher = components.dispatcher(self.config, self.registry, self.metrics, self._rng,
                                                self._health.suspect)
        self.dispatcher.running = lambda: [connection.handler for connection in self._connections
                                           if isinstance(connection.handler, PairRelay)]
        if self.dispatcher.policies.exact is not None:
            self.dispatcher.watch = _kv_watch(self.dispatcher, self.dispatcher.policies.exact)
        rules = self.config.admission.rules
        if rules.active and components.accepts_clients:
            self._gate = AdmissionGate(components.admission(rules, loop), loop)
        self.metrics.admission = self._gate.admission if self._gate is not None else None
        self.entry = RequestHandler(self, components.answer, self._rng, self._tracer, self._gate)
        if components.accepts_clients:
            self._server = await self._listen(self.entry.serve, self.config.http.host, self.config.http.port,
                                              server_context(self.config.security))
            self.port = self._server.sockets[0].getsockname()[1]
        if self.config.observe.prometheus_port is not None:
            self._metrics_server = await self._listen(self.entry.serve_scrape, self.config.observe.prometheus_host,
                                               self.config.observe.prometheus_port, None)
        for spec in self.config.workers.specs:
            self.add_worker(Worker(Endpoint.parse(spec.url), spec.role, bootstrap_port=spec.bootstrap_port, named=True))
        if self.config.discovery.service_discovery:
            self._discovery = Discovery(self, self.config.discovery)
        self.sampler.start()
        self._sweep_task = loop.create_task(self._sweep())
        if self.config.logs.log_interval:
            self._activity_task = loop.create_task(log_activity(self, self.config.logs.log_interval))
        gc.freeze()  # Objects that live as long as the process need not be walked by every full collection.

    async def _listen(self, serve: Serve, host: str, port: int, tls: ssl.SSLContext | None) -> asyncio.Server:
        loop = asyncio.get_running_loop()
        rules = HeadRules([name.lower().encode() for name in self.config.http.request_id_headers],
                          own_traces=self._tracer is not None)
        try:
            return await loop.create_server(
                lambda: ClientConnection(serve, max_payload=self.config.http.max_payload_size,
                                         connections=self._connections, loop=loop, rules=rules,
                                         outbox=self.dispatcher.outbox, deadlines=self._deadlines,
                                         on_data=self.dispatcher.on_data),
                host, port, backlog=4096, ssl=tls, reuse_port=self.config.http.router_workers > 1 or None)
        except OSError as error:
            flags = ("--host", "--port") if serve == self.entry.serve else ("--prometheus-host", "--prometheus-port")
            raise cannot_listen(host, port, error, host_flag=flags[0], port_flag=flags[1]) from None

    async def stop(self) -> None:
        """Stops accepting, lets running requests end for up to ``--shutdown-grace-secs``, then cuts them."""
        assert self._sweep_task is not None
        if self._server is not None:
            self._server.close()
        if self._metrics_server is not None:
            self._metrics_server.close()
        for connection in list(self._connections):
            connection.close_when_idle()
        deadline = self.dispatcher.loop.time() + self.config.http.shutdown_grace_secs
        while self._connections and self.dispatcher.loop.time() < deadline:
            await asyncio.sleep(0.02)
        await self._cut_requests()
        for connection in list(self._connections):
            connection.transport.abort()
        self._sweep_task.cancel()
        if self._activity_task is not None:
            self._activity_task.cancel()
        self.sampler.stop()
        self.reports.stop()
        if self._discovery is not None:
            self._discovery.stop()
        if self._gate is not None:
            self._gate.close()
        await self._health.close()
        self.dispatcher.close()
        if self.entry.access_log is not None:
            self.entry.access_log.flush()
        if self._server is not None:
            await self._server.wait_closed()
        if self._tracer is not None:
            await asyncio.to_thread(self._tracer.close)

    async def _cut_requests(self) -> None:
        """Ends all running requests, each with an error of its API, and gives clients a moment to read it."""
        error = WorkerUnavailable("The router was shut down before the answer was complete.",
                                  retry_after=RETRY_AFTER_SECONDS)
        cut = 0
        for connection in list(self._connections):
            if connection.handler is not None:
                cut += 1
                connection.handler.expire(error)
        if cut:
            logger.warning("%d %s cut at the end of --shutdown-grace-secs.", cut,
                           "request was" if cut == 1 else "requests were")
        deadline = self.dispatcher.loop.time() + _LAST_ERRORS_SECONDS
        while any(connection.transport.get_write_buffer_size() for connection in self._connections):
            if self.dispatcher.loop.time() > deadline:
                break
            await asyncio.sleep(0.02)

    async def _sweep(self) -> None:
        limit = self.config.http.request_timeout_secs
        pause = min(self._deadlines.limits.tick, limit / 4 or 1.0)
        while True:
            await asyncio.sleep(pause)
            self.dispatcher.sweep(limit)
            self._deadlines.advance()

    # ------------------------------------------------------------------ membership

    def add_worker(self, worker: Worker) -> None:
        """Registers a worker and begins to watch it; raises Conflict when its URL is taken."""
        worker.always_healthy |= self.config.health.disable_health_check
        self.registry.add(worker)
        self.dispatcher.open_pool(worker)
        self._health.watch(worker, self.dispatcher)

    def drain_worker(self, url: str) -> list[Worker]:
        """Removes a worker, or all ranks of a server, from new decisions; each is unregistered when its running
        requests have ended. Raises NotFound."""
        drained = [self.registry.drain(worker.url) for worker in self.registry.workers_at(url)]
        for worker in drained:
            if worker in self.registry:
                logger.info("Worker %s drains; %d requests run on it.", worker.url, worker.load)
        return drained

    def remove_worker(self, url: str, *, force: bool = False) -> list[Worker]:
        """Unregisters a worker, or all ranks of a server; running requests end undisturbed, unless ``force`` cuts them.
        Raises NotFound."""
        removed = self.registry.workers_at(url)
        for worker in removed:
            if force:
                self._components.fail_calls(self.dispatcher, worker)
            self._leave(worker)
        return removed

    def update_worker(self, url: str, metadata: WorkerMetadata, api_key: str | None) -> None:
        """Changes the metadata of a worker, or of all ranks of a server, and its key. Raises NotFound."""
        for worker in self.registry.workers_at(url):
            worker.metadata = metadata
            if api_key is not None:
                worker.api_key = api_key
                self.dispatcher.update_key(worker)
        self.registry.rebuild()

    def take_out(self, url: str, reason: str, epoch: str | None) -> None:
        """Cuts all requests of a server, and lets it take none as long as it has this epoch. Raises NotFound."""
        worker = self.remove_worker(url, force=True)[0].renewed()
        self.add_worker(worker)
        self._health.take_out(worker, reason, epoch)

    def change_role(self, worker: Worker, role: str) -> Worker:
        """Lets a worker's server, with all of its ranks, serve in another role; running requests end undisturbed.
        Returns its new worker."""
        changed = self.remove_worker(worker.endpoint.url)[0].renewed(role)
        self.add_worker(changed)
        return changed

    async def apply_changes(self) -> None:
        """Returns once all processes of the router act on what the registry says, and the workers' loads are those of
        all of them."""
        await self._components.apply_changes()

    async def relearn(self, seconds: float) -> None:
        """Reads anew what healthy workers say of themselves, and tries their pairs; returns once that is done, or after
        so many seconds."""
        await self._health.relearn(self.dispatcher, seconds)

    def settle_weights(self, updated: Sequence[Worker]) -> None:
        """Lets the weights of these workers be those of the cluster: who has others gets no requests."""
        self._health.settle_weights(updated)

    def _leave(self, worker: Worker) -> None:
        self.registry.remove(worker.url)
        self._health.unwatch(worker)
        self.dispatcher.close_pool(worker)
        logger.info("Worker %s is removed; %d requests still run on it.", worker.url, worker.load)

    def _update_ranks(self, worker: Worker, count: int) -> None:
        """Makes each of the ranks that a server reports a worker."""
        ranks: set[int | None] = set(range(count)) if count > 1 else {None}
        present = {known.rank: known for known in self.registry if known.root is worker.root}
        if worker.draining or present.keys() == ranks:
            return
        for rank, known in present.items():
            if rank not in ranks:
                self._leave(known)
        for rank in ranks - present.keys():
            self.add_worker(worker.for_rank(rank))

    def counts(self) -> dict[str, int]:
        """Counts workers by role and state, as ``{"prefill_healthy": 2}``."""
        return dict(Counter(f"{worker.role}_{worker.state}" for worker in self.registry))


def _kv_watch(dispatcher: Dispatcher, policy: CacheExact) -> Watch:
    """Follows the workers' KV events for cache_exact, the only policy that needs ZMQ; raises ConfigError without it."""
    try:
        from .monitoring.kv_event_watch import KVWatch
    except ImportError:
        raise ConfigError("--policy cache_exact listens to the workers' KV events over ZMQ: "
                          "pip install pyzmq, or choose another policy.") from None
    metrics = dispatcher.metrics

    def count_resync() -> None:
        metrics.kv_resyncs += 1

    return KVWatch(dispatcher, policy, count_resync)


async def serve(config: RouterConfig, *, ready: Callable[[Router], None] | None = None,
                stop: asyncio.Event | None = None) -> None:
    """Runs a router until ``stop`` is set (without one: until cancelled); ``ready`` is called once it listens."""
    router = Router(config)
    await router.start()
    try:
        if ready is not None:
            ready(router)
        await (stop or asyncio.Event()).wait()
    finally:
        await router.stop()
