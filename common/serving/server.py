"""The life of a server's front process: start-up, service, graceful stop."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import sys
from collections.abc import Sequence

import uvloop
from aiohttp import web

from ..api.errors import ConfigError
from ..config.addresses import bound, cannot_listen
from ..config.command import INTERRUPTED, sentence_of
from ..config.server import ServerConfig
from ..engine.garbage_collector import freeze_collector
from ..engine_client.rank_processes import RankTarget
from ..engine_client.worker_node import run_node
from ..obs.logging import setup_logging
from ..obs.tracing import Tracing, exporter_for
from .app import make_app
from .host import EngineHost, Service
from .lifecycle.activity import Activity
from .lifecycle.loop_lag import note_lateness
from .lifecycle.traces import Traces

log = logging.getLogger("baton.front")

_IDLE_SECONDS = 75.0  # a connection is kept so long whose client asks nothing, or asks half of something
_SHOW_DEATH_SECONDS = 1.0  # clients read their errors, and health checks see the 503, before a dead server ends


def run_server(config: ServerConfig, rank_target: RankTarget, services: Sequence[Service] = ()) -> int:
    """Serve until SIGTERM or SIGINT; returns the process's exit code, with a sentence on stderr where it is not 0.

    ``rank_target`` runs in every rank's process. HTTP answers (``/health``: starting) while the ranks load; a
    node beside the first serves none.
    """
    if config.nodes.node_rank > 0:
        return run_node(config, rank_target)
    setup_logging(config.logs, _name(config))
    try:
        with _listen(config.http.host, config.http.port) as listener:
            host = EngineHost(config, rank_target, spare_torch=True)
            uvloop.run(_Server(host).run(listener, services))
    except ConfigError as error:
        sentence = str(error)
    except KeyboardInterrupt:  # before there was a server that could stop in order
        return INTERRUPTED
    except Exception as error:
        sentence = sentence_of(error)
    else:
        return 0
    print(f"error: {sentence}", file=sys.stderr, flush=True)
    return 1


def _name(config: ServerConfig) -> str:
    """What a server of this role is called in logs and traces."""
    return "server" if config.mode == "null" else config.mode


def _listen(host: str, port: int) -> socket.socket:
    """A listening socket; raises ConfigError for a port that is taken or an address that is not ours."""
    try:
        listener = bound(host, port)
        listener.listen(1024)
    except OSError as error:
        raise cannot_listen(host, port, error) from None
    return listener


class _Server:
    """One run of a server: an engine's host behind HTTP, until a signal or the engine's end."""

    def __init__(self, host: EngineHost):
        self._host = host

    async def run(self, listener: socket.socket, services: Sequence[Service]) -> None:
        """Raises ConfigError, with a sentence for the operator, where the server cannot start or go on."""
        self._again = asyncio.Event()  # a second signal
        async with contextlib.AsyncExitStack() as stack:
            host = await stack.enter_async_context(self._host)
            for number in (signal.SIGTERM, signal.SIGINT):
                asyncio.get_running_loop().add_signal_handler(number, self._on_signal)
            if to := host.config.observe.traces_to:
                host.front.traces = Traces(Tracing(f"baton-{_name(host.config)}", exporter_for(to)), host.config.mode)
                stack.push_async_callback(asyncio.to_thread, host.front.traces.close)
            listening = await self._serve_http(stack, listener)
            await host.start(services)
            for task in (self._settle(), self._note_lateness(), self._note_throughput(), self._tell_activity()):
                stack.callback(asyncio.create_task(task).cancel)
            reason = await host.ended
            if reason is None:
                await self._drain(listening)
            elif host.front.ready is not None:
                await asyncio.sleep(_SHOW_DEATH_SECONDS)
        if reason is not None:
            raise ConfigError(reason)

    async def _settle(self) -> None:
        """Once all is loaded: a full collection stops every stream, for 80 ms where 256 of them run."""
        await self._host.ready.wait()
        freeze_collector()

    async def _note_lateness(self) -> None:
        await self._host.ready.wait()
        await note_lateness(self._host.front.metrics.late.observe)

    async def _note_throughput(self) -> None:
        while True:
            self._host.front.metrics.note_throughput()
            await asyncio.sleep(1.0)

    async def _tell_activity(self) -> None:
        await self._host.ready.wait()
        if interval := self._host.config.logs.log_interval:
            await Activity(self._host.front, interval).run()

    async def _serve_http(self, stack: contextlib.AsyncExitStack, listener: socket.socket) -> asyncio.Server:
        front = self._host.front
        runner = web.AppRunner(make_app(front), handler_cancellation=True, access_log=None, shutdown_timeout=1.0,
                               handle_signals=False, keepalive_timeout=_IDLE_SECONDS)
        await runner.setup()
        stack.push_async_callback(runner.cleanup)
        make = runner.server
        assert make is not None
        server = await asyncio.get_running_loop().create_server(
            lambda: front.arrivals.connecting(make), sock=listener, backlog=1024)
        stack.callback(server.close)
        stack.callback(asyncio.create_task(front.arrivals.watch()).cancel)
        log.info("listening on http://%s:%d, model %s", *listener.getsockname()[:2], front.config.model_name)
        return server

    def _on_signal(self) -> None:
        if self._host.ended.done():
            self._again.set()
        self._host.finish(None)

    async def _drain(self, listening: asyncio.Server) -> None:
        """Take no new requests, and let the running ones end."""
        front = self._host.front
        front.stopping = True
        listening.close()
        log.info("stopping: %d requests are running", front.client.num_open)
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._idle(), front.config.http.shutdown_grace_secs)
        if front.in_flight and (count := await front.in_flight.give_up(front.client)):
            log.warning("%d %s cut at the end of --shutdown-grace-secs", count,
                        "request was" if count == 1 else "requests were")

    async def _idle(self) -> None:
        """Until what has been received is answered, or a second signal comes."""
        front = self._host.front
        while ((front.client.num_open or front.in_flight.num_received)
               and not self._again.is_set() and front.dead is None):
            await asyncio.sleep(0.02)
