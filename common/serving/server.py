"""The API server process: start-up, service, graceful stop."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence

import uvloop
from aiohttp import web

from ..api.errors import ConfigError
from ..config.addresses import bound, cannot_listen
from ..config.command import INTERRUPTED, describe_error
from ..config.server import ServerConfig
from ..engine_client.rank_processes import RankTarget
from ..engine_client.worker_node import run_node
from ..garbage_collector import freeze_collector
from ..obs.logging import setup_logging
from ..obs.tracing import Tracing, exporter_for
from .app import make_app
from .context.traces import Traces
from .host import EngineHost, Service
from .stats_logger import StatsLogger

log = logging.getLogger("baton.server")

_KEEPALIVE_SECONDS = 75.0  # an idle connection, or one that sent only the beginning of a request, is closed after it
_DEAD_GRACE_SECONDS = 1.0  # clients read their errors, and health checks see the 503, before a dead server ends


def run_server(config: ServerConfig, rank_target: RankTarget, services: Sequence[Service] = ()) -> int:
    """Serve until SIGTERM or SIGINT; returns the process's exit code, with a sentence on stderr where it is not 0.

    ``rank_target`` runs in every rank's process. HTTP answers (``/health``: starting) while the ranks load; nodes other
    than the first serve no HTTP.
    """
    if config.nodes.node_rank > 0:
        return run_node(config, rank_target)
    setup_logging(config.logs, config.role.component)
    try:
        with _listen(config.http.host, config.http.port) as listener:
            host = EngineHost(config, rank_target, without_torch=True)
            if config.answers.enable_custom_logit_processor:
                log.warning("--enable-custom-logit-processor lets whoever may send requests run any code on this "
                            "machine: requests name modules to import, or bring pickles.")
            uvloop.run(_Server(host).run(listener, services))
    except ConfigError as error:
        sentence = str(error)
    except KeyboardInterrupt:  # before there was a server that could stop in order
        return INTERRUPTED
    except Exception as error:
        sentence = describe_error(error)
    else:
        return 0
    print(f"error: {sentence}", file=sys.stderr, flush=True)
    return 1


def _http_log(config: ServerConfig) -> logging.Logger | None:
    """The log of HTTP requests, which has a line for each at the level of info; None without --log-level-http."""
    level = config.http.log_level_http
    if level is None:
        return None
    http = logging.getLogger("baton.http")
    http.setLevel(level.upper())
    return http


def _listen(host: str, port: int) -> socket.socket:
    """A listening socket; raises ConfigError for a port that is in use or an address that this host does not have."""
    try:
        listener = bound(host, port)
        listener.listen(1024)
    except OSError as error:
        raise cannot_listen(host, port, error) from None
    return listener


class _Server:
    """One run of a server: an engine host served over HTTP, until a signal or the engine's end."""

    def __init__(self, host: EngineHost):
        self._host = host

    async def run(self, listener: socket.socket, services: Sequence[Service]) -> None:
        """Raises ConfigError, with a sentence for the operator, where the server cannot start or continue."""
        self._second_signal = asyncio.Event()
        async with contextlib.AsyncExitStack() as stack:
            host = await stack.enter_async_context(self._host)
            for number in (signal.SIGTERM, signal.SIGINT):
                asyncio.get_running_loop().add_signal_handler(number, self._on_signal)
            if to := host.config.observe.traces_to:
                traces = Traces(Tracing(f"baton-{host.config.role.component}", exporter_for(to)), host.config.role)
                host.context.telemetry.traces = traces
                stack.push_async_callback(asyncio.to_thread, traces.close)
            listening = await self._serve_http(stack, listener)
            await host.start(services)
            for task in (self._freeze_garbage(), self._observe_loop_lag(), self._note_throughput(), self._log_stats()):
                stack.callback(asyncio.create_task(task).cancel)
            reason = await host.ended
            if reason is None:
                await self._drain(listening)
            elif host.context.status.ready is not None:
                await asyncio.sleep(_DEAD_GRACE_SECONDS)
        if reason is not None:
            raise ConfigError(reason)

    async def _freeze_garbage(self) -> None:
        """Freezes the loaded objects: a full collection over them stops all streams, for 80 ms with 256 of them."""
        await self._host.ready.wait()
        freeze_collector()

    async def _observe_loop_lag(self) -> None:
        await self._host.ready.wait()
        await observe_loop_lag(self._host.context.telemetry.metrics.event_loop_lag.observe)

    async def _note_throughput(self) -> None:
        while True:
            self._host.context.telemetry.metrics.note_throughput()
            await asyncio.sleep(1.0)

    async def _log_stats(self) -> None:
        await self._host.ready.wait()
        if interval := self._host.config.logs.log_interval:
            await StatsLogger(self._host.context, interval).run()

    async def _serve_http(self, stack: contextlib.AsyncExitStack, listener: socket.socket) -> asyncio.Server:
        context = self._host.context
        runner = web.AppRunner(make_app(context), handler_cancellation=True, access_log=_http_log(context.config),
                               access_log_format='%a "%r" %s in %Tf s',
                               shutdown_timeout=1.0, handle_signals=False, keepalive_timeout=_KEEPALIVE_SECONDS)
        await runner.setup()
        stack.push_async_callback(runner.cleanup)
        make = runner.server
        assert make is not None
        server = await asyncio.get_running_loop().create_server(
            lambda: context.client_timeouts.connect(make), sock=listener, backlog=1024)
        stack.callback(server.close)
        stack.callback(asyncio.create_task(context.client_timeouts.watch()).cancel)
        log.info("listening on http://%s:%d, model %s", *listener.getsockname()[:2], context.model.name)
        return server

    def _on_signal(self) -> None:
        if self._host.ended.done():
            self._second_signal.set()
        self._host.finish(None)

    async def _drain(self, listening: asyncio.Server) -> None:
        """Takes no new requests, and lets the running ones end."""
        context = self._host.context
        context.status.stopping = True
        listening.close()
        log.info("stopping: %d requests are running", context.client.num_open)
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._wait_until_idle(), context.config.http.shutdown_grace_secs)
        if context.in_flight and (count := await context.in_flight.give_up(context.client)):
            log.warning("%d %s cut at the end of --shutdown-grace-secs", count,
                        "request was" if count == 1 else "requests were")

    async def _wait_until_idle(self) -> None:
        """Returns when all received requests are answered, or a second signal comes."""
        context = self._host.context
        while ((context.client.num_open or context.in_flight.num_received)
               and not self._second_signal.is_set() and context.status.dead is None):
            await asyncio.sleep(0.02)


async def observe_loop_lag(observe: Callable[[float], None], period: float = 0.1) -> None:
    """Calls ``observe`` every ``period`` seconds with the seconds by which the event loop ran it late, until cancelled.

    The tokens of all streams wait as long. The loop's timers alone add up to a millisecond.
    """
    due = time.monotonic() + period
    while True:
        await asyncio.sleep(max(0.0, due - time.monotonic()))
        now = time.monotonic()
        observe(max(0.0, now - due))
        due = now + period
