"""A context's application on its sockets, what is measured of its process, and its graceful end."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import ssl
import time
from collections.abc import Awaitable, Callable
from typing import Any

from aiohttp import web
from aiohttp.http import RawRequestMessage
from aiohttp.web_log import AccessLogger
from yarl import URL

from ..config.server import ServerConfig
from ..garbage_collector import freeze_collector, warn_of_collections
from ..obs.tracing import Tracing, exporter_for
from .context.serving_context import ServingContext
from .context.traces import Traces
from .tls_refresh import refresh_certificate

log = logging.getLogger("baton.server")

_KEEPALIVE_SECONDS = 75.0  # an idle connection, or one that sent only the beginning of a request, is closed after it

Listen = Callable[[Callable[[], asyncio.Protocol]], Awaitable[asyncio.Server]]
"""Creates the server whose connections are served by the protocols of a factory."""


class HTTPServer:
    """Serves a context's application. ``stack`` ends it at once; ``drain`` before that lets requests end."""

    def __init__(self, context: ServingContext, stack: contextlib.AsyncExitStack):
        self._context = context
        self._stack = stack
        self._listening: asyncio.Server | None = None
        self.hurry = asyncio.Event()
        """Set it to end the wait for running requests."""

    async def start(self, app: web.Application, listen: Listen, *, behind_workers: bool = False) -> asyncio.Server:
        """Accepts connections; raises OSError. ``behind_workers``: they are those of processes that have logged the
        requests, and have read their paths."""
        context, stack = self._context, self._stack
        runner = web.AppRunner(app, handler_cancellation=True,
                               access_log=None if behind_workers else _http_log(context.config),
                               access_log_class=_access_log_without(context.config.http.
                                                                    uvicorn_access_log_exclude_prefixes),
                               access_log_format='%a "%r" %s in %Tf s',
                               shutdown_timeout=1.0, handle_signals=False, keepalive_timeout=_KEEPALIVE_SECONDS)
        await runner.setup()
        stack.push_async_callback(runner.cleanup)
        make: Any = runner.server
        if not behind_workers and (root := context.config.http.fastapi_root_path.rstrip("/")):
            make.request_factory = _without_root(root, make.request_factory)
        server = self._listening = await listen(lambda: context.client_timeouts.connect(make))
        stack.callback(server.close)
        stack.callback(asyncio.create_task(context.client_timeouts.watch()).cancel)
        return server

    def keep_certificate(self, context: ssl.SSLContext | None) -> None:
        """Renews the certificate of the connections' ``context`` where --enable-ssl-refresh says so."""
        args = self._context.config.tls
        if context is not None and args.enable_ssl_refresh:
            self._stack.callback(asyncio.create_task(refresh_certificate(context, args)).cancel)

    def export(self) -> None:
        """Exports spans of requests, and lines about them, where the configuration says so."""
        context = self._context
        if (lines := context.telemetry.request_export) is not None:
            self._stack.push_async_callback(asyncio.to_thread, lines.close)
        if to := context.config.observe.traces_to:
            name = context.config.observe.otlp_service_name or f"baton-{context.config.role.component}"
            traces = Traces(Tracing(name, exporter_for(to)), context.config.role.component)
            context.telemetry.traces = traces
            self._stack.push_async_callback(asyncio.to_thread, traces.close)

    def observe_process(self, ready: asyncio.Event) -> None:
        """Once the server is ready: measures the event loop's lag, and freezes the loaded objects. A full collection
        over them stops all streams, for 80 ms with 256 of them."""
        async def observe() -> None:
            await ready.wait()
            freeze_collector()
            warn_of_collections(self._context.config.observe.gc_warning_threshold_secs)
            await observe_loop_lag(self._context.telemetry.metrics.event_loop_lag.observe)

        self._stack.callback(asyncio.create_task(observe()).cancel)

    async def drain(self) -> None:
        """Takes no new requests, and lets the running ones end."""
        context = self._context
        context.status.stopping = True
        if self._listening is not None:
            self._listening.close()
        log.info("stopping: %d requests are running", context.client.num_open)
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._wait_until_idle(), context.config.http.shutdown_grace_secs)
        if context.in_flight and (count := await context.in_flight.give_up(context.client)):
            log.warning("%d %s cut at the end of --shutdown-grace-secs", count,
                        "request was" if count == 1 else "requests were")

    async def _wait_until_idle(self) -> None:
        """Returns when all received requests are answered, or it must hurry."""
        context = self._context
        while ((context.client.num_open or context.in_flight.num_received)
               and not self.hurry.is_set() and context.status.dead is None):
            await asyncio.sleep(0.02)


def _without_root(root: str, make: Callable[..., web.BaseRequest]) -> Callable[..., web.BaseRequest]:
    """Wraps aiohttp's factory of requests: paths below ``root`` become those of the API."""
    def made(message: RawRequestMessage, *others: Any) -> web.BaseRequest:
        if message.path.startswith(f"{root}/"):
            path = message.path[len(root):]
            message = message._replace(path=path, url=URL(path, encoded=True))
        return make(message, *others)

    return made


def _access_log_without(prefixes: tuple[str, ...]) -> type[AccessLogger]:
    """aiohttp's log of requests, without those whose path begins with one of the ``prefixes``."""
    class Filtered(AccessLogger):
        def log(self, request: web.BaseRequest, response: web.StreamResponse, time: float) -> None:
            if not request.path.startswith(prefixes):
                super().log(request, response, time)

    return Filtered if prefixes else AccessLogger


def _http_log(config: ServerConfig) -> logging.Logger | None:
    """The log of HTTP requests, which has a line for each at the level of info; None without --log-level-http."""
    level = config.http.log_level_http
    if level is None:
        return None
    http = logging.getLogger("baton.http")
    http.setLevel(level.upper())
    return http


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
