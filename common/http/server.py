"""The life of a server's front process: start-up, service, graceful stop."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable, Sequence
from typing import Any

import uvloop
from aiohttp import web

from ..api.errors import ConfigError
from ..api.messages import Loading, Ready, StartFailed
from ..config.model import ModelSpec, load_model_spec
from ..config.server import ServerConfig
from ..engine.client import EngineClient
from ..engine.ranks import RankProcesses, RankSpec, RankTarget
from ..obs.logging import setup_logging
from ..tokenizer.tokenizer import Tokenizer, load_tokenizer
from .app import make_app
from .front import Front

log = logging.getLogger("baton.front")

Service = Callable[[], contextlib.AbstractAsyncContextManager[Any]]
"""Something that runs beside the server, from before its ranks start until after they stopped; entering may raise
ConfigError."""

_SHOW_DEATH_SECONDS = 1.0  # clients read their errors, and health checks see the 503, before a dead server ends
_RANK_GRACE_SECONDS = 5.0
_LAST_WORDS_SECONDS = 0.5  # a rank that exits while starting may have sent its reason just before


def run_server(config: ServerConfig, rank_target: RankTarget, services: Sequence[Service] = ()) -> int:
    """Serve until SIGTERM or SIGINT; returns the process's exit code, with a sentence on stderr where it is not 0.

    ``rank_target`` runs in every rank's process. HTTP answers (``/health``: starting) while the ranks load.
    """
    setup_logging(config.http.log_level, "server" if config.mode == "null" else config.mode)
    try:
        model = load_model_spec(config.model)
        with _listen(config.http.host, config.http.port) as listener:
            uvloop.run(_Server(config, model, rank_target).run(listener, services))
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        return 1
    return 0


def _listen(host: str, port: int) -> socket.socket:
    """A listening socket; raises ConfigError for a port that is taken or an address that is not ours."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, kind, proto, _, address = found[0]
        listener = socket.socket(family, kind, proto)
    except OSError as error:
        raise ConfigError(f"--host {host} is no address of this machine ({error.strerror}).") from None
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(address)
        listener.listen(1024)
    except OSError as error:
        listener.close()
        raise ConfigError(f"Cannot listen on {host} port {port}: {error.strerror}; choose another --port.") from None
    return listener


class _Server:
    """One run of a server. What ends it is put into ``_end``: None for an ordered stop, or why it cannot go on."""

    def __init__(self, config: ServerConfig, model: ModelSpec, rank_target: RankTarget):
        self._config = config
        self._model = model
        self._rank_target = rank_target
        self._front: Front

    async def run(self, listener: socket.socket, services: Sequence[Service]) -> None:
        """Raises ConfigError, with a sentence for the operator, where the server cannot start or go on."""
        loop = asyncio.get_running_loop()
        self._end: asyncio.Future[str | None] = loop.create_future()
        self._again = asyncio.Event()  # a second signal
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal)
        async with contextlib.AsyncExitStack() as stack:
            client = await self._make_client(stack)
            self._front = Front(self._config, self._model, client)
            site = await self._serve_http(stack, listener)
            for service in services:
                await stack.enter_async_context(service())
            ranks = self._make_ranks(client)
            stack.push_async_callback(self._stop_ranks, client, ranks)
            ranks.start()
            tokenizer = asyncio.create_task(self._load_tokenizer())
            stack.callback(tokenizer.cancel)
            reason = await self._end
            if reason is None:
                await self._drain(site)
            elif self._front.ready is not None:
                await asyncio.sleep(_SHOW_DEATH_SECONDS)
        if reason is not None:
            raise ConfigError(reason)

    # ------------------------------------------------------------------ parts

    async def _make_client(self, stack: contextlib.AsyncExitStack) -> EngineClient:
        schedule = self._config.schedule
        client = EngineClient(schedule.max_queued_requests + schedule.max_running_requests, self._on_startup)
        stack.push_async_callback(client.close)
        client.start()
        return client

    async def _serve_http(self, stack: contextlib.AsyncExitStack, listener: socket.socket) -> web.SockSite:
        runner = web.AppRunner(make_app(self._front), handler_cancellation=True, access_log=None, shutdown_timeout=1.0,
                               handle_signals=False)
        await runner.setup()
        stack.push_async_callback(runner.cleanup)
        site = web.SockSite(runner, listener, backlog=1024)
        await site.start()
        log.info("listening on http://%s:%d, model %s", *listener.getsockname()[:2], self._config.model_name)
        return site

    def _make_ranks(self, client: EngineClient) -> RankProcesses:
        size = self._config.parallel.tp_size
        meeting = f"file://{client.folder}/ranks"
        specs = [RankSpec(self._config, rank, size, client.to_engine, client.from_engine, meeting)
                 for rank in range(size)]
        return RankProcesses(self._rank_target, specs, self._on_rank_exit)

    async def _stop_ranks(self, client: EngineClient, ranks: RankProcesses) -> None:
        """Ranks that serve leave their loop by themselves; others (loading, or stuck without a peer) are ended."""
        serving = self._front.ready is not None and client.dead is None
        if serving:
            client.shut_down()
        await ranks.stop(_RANK_GRACE_SECONDS if serving else 0.0)

    async def _load_tokenizer(self) -> None:
        args = self._config.model
        try:
            self._front.tokenizer = await asyncio.to_thread(_tokenizer, args.tokenizer_path or args.model_path,
                                                            args.revision, args.chat_template)
        except ConfigError as error:
            self._finish(str(error))
        except Exception as error:  # whatever a broken tokenizer file makes transformers raise
            log.exception("the tokenizer failed to load")
            self._finish(f"Cannot load the tokenizer: {type(error).__name__}.")
        self._announce()

    # ------------------------------------------------------------------ events

    def _finish(self, reason: str | None) -> None:
        if not self._end.done():
            self._end.set_result(reason)

    def _on_signal(self) -> None:
        if self._end.done():
            self._again.set()
        self._finish(None)

    def _on_startup(self, message: Loading | Ready | StartFailed) -> None:
        match message:
            case Loading():
                self._front.loading = message
            case Ready():
                self._front.ready = message
                self._announce()
            case StartFailed():
                self._front.client.engine_died(message.message)
                self._finish(message.message)

    def _announce(self) -> None:
        if self._front.is_ready:
            log.info("ready: %d tokens of KV cache", self._front.ready.max_total_tokens)  # type: ignore[union-attr]

    def _on_rank_exit(self, rank: int, code: int) -> None:
        if self._front.ready is None:
            asyncio.get_running_loop().call_later(_LAST_WORDS_SECONDS, self._finish,
                                                  f"Rank {rank} ended with exit code {code} while it started.")
            return
        reason = f"Rank {rank} of the engine ended with exit code {code}."
        log.error(reason)
        self._front.client.engine_died(reason)
        self._finish(reason)

    async def _drain(self, site: web.SockSite) -> None:
        """Take no new requests, and let the running ones end."""
        front = self._front
        front.stopping = True
        await site.stop()
        log.info("stopping: %d requests are running", front.client.num_open)
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._idle(), self._config.http.shutdown_grace_secs)

    async def _idle(self) -> None:
        while self._front.client.num_open and not self._again.is_set() and self._front.dead is None:
            await asyncio.sleep(0.02)


def _tokenizer(path: str, revision: str | None, chat_template: str | None) -> Tokenizer:
    """Load, without the torch that transformers would import beside it.

    Tokenizers do not need it, and it would cost every front process 300 MB and two seconds (transformers 5.17).
    """
    sys.modules.setdefault("torch", None)  # type: ignore[arg-type]  # an import of it fails
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # that torch is missing
    tokenizer = load_tokenizer(path, revision)
    return tokenizer.with_chat_template(chat_template) if chat_template else tokenizer
