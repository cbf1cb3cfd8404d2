"""The API server process: start-up, service, graceful stop."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import ssl
import sys
from collections.abc import Sequence

import uvloop

from ..api.errors import ConfigError
from ..config.addresses import bound, cannot_listen
from ..config.command import INTERRUPTED, describe_error
from ..config.server import HttpArgs, ServerConfig
from ..config.shared_port import reserve
from ..engine_client.rank_processes import RankTarget
from ..engine_client.worker_node import run_node
from ..obs.logging import setup_logging
from .app import make_app
from .host import EngineHost, Service
from .http_server import HTTPServer
from .stats_logger import StatsLogger
from .workers.supervisor import Workers

log = logging.getLogger("baton.server")

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
        tls = config.tls.context()
        with _listen(config.http) as listener:
            host = EngineHost(config, rank_target, without_torch=True)
            if config.answers.enable_custom_logit_processor:
                log.warning("--enable-custom-logit-processor lets whoever may send requests run any code on this "
                            "machine: requests name modules to import, or bring pickles.")
            uvloop.run(_Server(host, tls).run(listener, services))
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


def _listen(http: HttpArgs) -> socket.socket:
    """A listening socket, or one that reserves the port for workers. Raises ConfigError for a port that is in use or an
    address that this host does not have."""
    if http.tokenizer_worker_num > 1:
        return reserve(http.host, http.port)[0][0]
    try:
        listener = bound(http.host, http.port)
        listener.listen(1024)
    except OSError as error:
        raise cannot_listen(http.host, http.port, error) from None
    return listener


class _Server:
    """One run of a server: an engine host served over HTTP, until a signal or the engine's end."""

    def __init__(self, host: EngineHost, tls: ssl.SSLContext | None):
        self._host = host
        self._tls = tls

    async def run(self, listener: socket.socket, services: Sequence[Service]) -> None:
        """Raises ConfigError, with a sentence for the operator, where the server cannot start or continue."""
        async with contextlib.AsyncExitStack() as stack:
            host = await stack.enter_async_context(self._host)
            self._http = http = HTTPServer(host.context, stack)
            self._workers: Workers | None = None
            for number in (signal.SIGTERM, signal.SIGINT):
                asyncio.get_running_loop().add_signal_handler(number, self._on_signal)
            http.export()
            await self._serve_http(stack, listener)
            await host.start(services)
            http.observe_process(host.ready)
            for task in (self._note_throughput(), self._log_stats()):
                stack.callback(asyncio.create_task(task).cancel)
            reason = await host.ended
            if reason is None:
                if self._workers is not None:
                    await self._workers.drain(http.hurry)
                await http.drain()
            elif host.context.status.ready is not None:
                await asyncio.sleep(_DEAD_GRACE_SECONDS)
        if reason is not None:
            raise ConfigError(reason)

    async def _serve_http(self, stack: contextlib.AsyncExitStack, listener: socket.socket) -> None:
        """Serves the port in this process, or in workers, which forward to a Unix socket of this process."""
        host, loop = self._host, asyncio.get_running_loop()
        context, count = host.context, host.config.http.tokenizer_worker_num
        app = make_app(context)
        if count == 1:
            await self._http.start(app, lambda make: loop.create_server(make, sock=listener, backlog=1024,
                                                                        ssl=self._tls))
            self._http.keep_certificate(self._tls)
        else:
            self._workers = workers = Workers(host, count, listener.getsockname()[1])
            app.on_response_prepare.append(workers.before_answer)
            await self._http.start(app, lambda make: loop.create_unix_server(make, workers.address, backlog=1024),
                                   behind_workers=True)
            await stack.enter_async_context(workers)
        log.info("listening on %s://%s:%d, model %s", host.config.tls.scheme, *listener.getsockname()[:2],
                 context.model.name)

    async def _note_throughput(self) -> None:
        while True:
            if self._workers is not None:
                await self._workers.collect_counts()
            self._host.context.telemetry.metrics.note_throughput()
            await asyncio.sleep(1.0)

    async def _log_stats(self) -> None:
        await self._host.ready.wait()
        if interval := self._host.config.logs.log_interval:
            await StatsLogger(self._host.context, interval).run()

    def _on_signal(self) -> None:
        if self._host.ended.done():
            self._http.hurry.set()
        self._host.finish(None)
