"""One worker: an API server process whose engine is the main process."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import uvloop

from ...api.errors import ConfigError
from ...api.link import Link
from ...api.messages import OutputBatch
from ...config.server import ServerConfig
from ...engine_client.client import EngineClient
from ...models.registry import load_model_spec
from ...obs.logging import setup_logging
from ...process import die_with
from ..app import make_app
from ..context.serving_context import ServingContext
from ..forward import Forwarder
from ..host import load_tokenizer_of
from ..http_server import HTTPServer
from ..web import failures
from .messages import (
    AbortGroup,
    CollectCounts,
    Cut,
    Drain,
    GrammarReady,
    Listening,
    RequestFailed,
    ServerState,
    StartFailed,
    StateApplied,
    ToWorker,
    WorkerCounts,
)
from .remote import LinkChannel, RemoteGrammars
from .state import apply_state

log = logging.getLogger("baton.server")


@dataclass(frozen=True)
class WorkerSpec:
    """Arguments of a worker's process. ``address`` is the main process's Unix socket, ``max_requests`` what the engine
    holds at most."""

    config: ServerConfig
    index: int
    port: int
    address: str
    max_requests: int


def run_worker(spec: WorkerSpec, sock: socket.socket, parent: int) -> None:
    """Entry of the child process; ``sock`` is its end of the link to process ``parent``."""
    die_with(parent)
    setup_logging(spec.config.logs, f"{spec.config.role.component}.{spec.index}")
    uvloop.run(_run(spec, sock))
    os._exit(0)


async def _run(spec: WorkerSpec, sock: socket.socket) -> None:
    messages: asyncio.Queue[Any] = asyncio.Queue()
    receive: Callable[[Any], None] = messages.put_nowait
    link = await Link.over(sock, ToWorker, lambda message: receive(message), lambda: os._exit(1))
    try:
        async with contextlib.AsyncExitStack() as stack:
            worker = _Worker(spec, link, stack)
            worker.receive(await messages.get())  # the state, which is sent first
            while not messages.empty():
                worker.receive(messages.get_nowait())
            receive = worker.receive
            await worker.run()
            worker.send_counts(0)
    except ConfigError as error:
        link.send(StartFailed(str(error)))
    await link.close()


class _Worker:
    """Serves HTTP until the main process asks it to end, or a signal does."""

    def __init__(self, spec: WorkerSpec, link: Link, stack: contextlib.AsyncExitStack):
        self._spec = spec
        self._link = link
        self._stack = stack
        self._client = EngineClient(spec.max_requests, lambda message: None, channel=LinkChannel(link))
        self._grammars = RemoteGrammars(link)
        stack.callback(self._grammars.close)
        self._context = ServingContext(spec.config, load_model_spec(spec.config.model), self._client, self._grammars)
        self._context.telemetry.request_log.process = f"-{spec.index}"
        self._http = HTTPServer(self._context, stack)
        self._ended = asyncio.Event()
        self._ready = asyncio.Event()

    async def run(self) -> None:
        """Raises ConfigError where it cannot start."""
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, self._ended.set)
        self._http.export()
        self._http.observe_process(self._ready)
        forwarder = await self._stack.enter_async_context(Forwarder(self._spec.address))
        app = make_app(self._context, forwarder)
        if self._context.status.ready is None:  # then nobody serves yet, and clients may be told so
            await self._listen(app)
            await load_tokenizer_of(self._context, without_torch=True)
        else:
            await load_tokenizer_of(self._context, without_torch=True)
            await self._listen(app)
        self._link.send(Listening())
        self._check_ready()
        await self._ended.wait()
        await self._http.drain()

    def receive(self, message: Any) -> None:
        """Takes a message of the main process."""
        match message:
            case OutputBatch():
                self._client.dispatch(message)
            case RequestFailed(rid, error):
                self._client.fail(rid, error.rebuild())
            case ServerState(version):
                apply_state(self._context, message)
                self._link.send(StateApplied(version))
                self._check_ready()
            case GrammarReady():
                self._grammars.on_ready(message)
            case AbortGroup(rid):
                if rid:
                    self._client.abort_group(rid)
                else:
                    self._client.pending.abort("")
            case CollectCounts(seq):
                self.send_counts(seq)
            case Drain():
                self._ended.set()
            case Cut():
                self._http.hurry.set()

    def send_counts(self, seq: int) -> None:
        self._link.send(WorkerCounts(seq, self._context.telemetry.metrics.counts(), failures.count))

    def _check_ready(self) -> None:
        if self._context.status.is_ready:
            self._ready.set()

    async def _listen(self, app: Any) -> None:
        http, loop = self._spec.config.http, asyncio.get_running_loop()
        tls = self._spec.config.tls.context()
        await self._http.start(app, lambda make: loop.create_server(make, http.host, self._spec.port, backlog=1024,
                                                                    reuse_port=True, ssl=tls))
        self._http.keep_certificate(tls)
