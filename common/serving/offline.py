"""An engine, or a prefill and a decode engine, in a caller's process, used by calls instead of HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from ..api.errors import ConfigError, InvalidRequest, WorkerUnavailable
from ..commands.base import Endpoint
from ..config.server import ServerConfig
from ..engine_client.rank_processes import RankTarget
from .admin.commands import run_endpoint
from .admin.handler import server_facts
from .chat.handler import plan_chat
from .chat.schema import ChatRequest, decode_chat
from .context.serving_context import ServingContext
from .embeddings.handler import rerank_body
from .host import EngineHost, Service
from .native.handler import plan_generate
from .native.schema import GenerateRequest, decode_generate
from .respond import PlannedResponse, PlanRequest
from .tokens.handler import detokenize_body, tokenize_body
from .tokens.schema import decode_detokenize, decode_tokenize


@dataclass(frozen=True)
class EngineProcesses:
    """One engine of a cluster: its configuration, the main function of its ranks, and its services."""

    config: ServerConfig
    rank_target: RankTarget
    services: Sequence[Service] = field(default=())


class Cluster:
    """A unified engine, or a pair, on the running event loop. Use as an asynchronous context manager.

    The last engine answers. With a prefill engine before it, every request goes to both, as a router sends it, with a
    random bootstrap room.
    """

    def __init__(self, parts: Sequence[EngineProcesses]):
        *senders, last = (part.config.role for part in parts)
        assert last.answers_clients and last.receives_kv is bool(senders) and all(role.sends_kv for role in senders)
        if any(part.config.http.tokenizer_worker_num > 1 for part in parts):
            raise ConfigError("tokenizer_worker_num is of servers: an engine within a program is called there; leave "
                              "it out.")
        self._parts = parts
        self._hosts = [EngineHost(part.config, part.rank_target, without_torch=False)
                       for part in parts]
        self._stack = contextlib.AsyncExitStack()

    async def __aenter__(self) -> Cluster:
        """Returns when requests can be served; raises ConfigError where an engine cannot start."""
        async with self._stack:
            for host, part in zip(self._hosts, self._parts):
                await self._stack.enter_async_context(host)
                await host.start(part.services)
            for host in self._hosts:
                await _until_ready(host)
            self._stack = self._stack.pop_all()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._stack.aclose()

    @property
    def context(self) -> ServingContext:
        """The context of the engine that answers."""
        return self._hosts[-1].context

    @property
    def contexts(self) -> list[ServingContext]:
        return [host.context for host in self._hosts]

    # ------------------------------------------------------------------ requests

    async def generate(self, body: Mapping[str, Any]) -> Any:
        """The answer to a body of ``/generate``, as plain data; raises ServingError."""
        return msgspec.to_builtins(await self._full(_generate(body), plan_generate))

    async def chat(self, body: Mapping[str, Any]) -> Any:
        """The answer to a body of ``/v1/chat/completions``, as plain data; raises ServingError."""
        return msgspec.to_builtins(await self._full(_chat(body), plan_chat))

    async def tokenize(self, body: Mapping[str, Any]) -> Any:
        """The answer to a body of ``/tokenize``, as plain data; raises ServingError."""
        request = decode_tokenize(msgspec.json.encode(body))
        return msgspec.to_builtins(await tokenize_body(self.context, request))

    async def detokenize(self, body: Mapping[str, Any]) -> Any:
        """The answer to a body of ``/detokenize``, as plain data; raises ServingError."""
        request = decode_detokenize(msgspec.json.encode(body))
        return msgspec.to_builtins(await detokenize_body(self.context, request))

    async def answer(self, handler: Callable[[ServingContext, bytes], Awaitable[Any]], body: Mapping[str, Any]) -> Any:
        """What the handler of an endpoint answers to a body on the last engine, as plain data; raises ServingError."""
        return msgspec.to_builtins(await handler(self.context, msgspec.json.encode(body)))

    async def rerank_pairs(self, pairs: Sequence[Sequence[str]]) -> list[dict[str, Any]]:
        """Scores of query and document, pair by pair; raises ServingError."""
        if any(len(pair) != 2 for pair in pairs):
            raise InvalidRequest("Each prompt to rerank is a pair: a query and a document.", param="prompt")
        bodies = [{"query": query, "documents": [document]} for query, document in pairs]
        ranked = await asyncio.gather(*(self.answer(rerank_body, body) for body in bodies))
        return [{"embedding": one["score"], "meta_info": one["meta_info"]} for (one,) in ranked]

    async def server_info(self) -> dict[str, Any]:
        """The answer of ``/get_server_info`` of the last engine, as plain data."""
        info: dict[str, Any] = msgspec.to_builtins(await server_facts(self.context))
        return info

    def hf_tokenizer(self) -> Any:
        """The tokenizer of transformers, None with --skip-tokenizer-init."""
        tokenizer = self.context.status.serving_tokenizer()
        return tokenizer.hf if tokenizer.has_texts else None

    async def abort(self, rid: str) -> None:
        """Aborts a request on all engines; all requests with an empty ``rid``."""
        for context in self.contexts:
            if rid:
                context.client.abort_group(rid)
            else:
                context.client.abort("")

    async def run_endpoint(self, endpoint: Endpoint, arguments: Mapping[str, Any]) -> list[str]:
        """Runs the command of an endpoint on one engine after the other; returns their sentences. Raises ServingError,
        as over HTTP."""
        body = msgspec.json.encode(arguments)
        return [await run_endpoint(context, endpoint, body) for context in self.contexts]

    def stream_generate(self, body: Mapping[str, Any]) -> AsyncGenerator[Any, None]:
        """The stream's events, each with a choice's complete answer so far."""
        return self._chunks(_generate(body), plan_generate)

    def stream_chat(self, body: Mapping[str, Any]) -> AsyncGenerator[Any, None]:
        return self._chunks(_chat(body), plan_chat)

    async def _full(self, body: Any, plan: PlanRequest[Any]) -> Any:
        async with self._prefilled(body, plan):
            run: PlannedResponse[Any, Any] = await plan(self.context, body, arrived=time.monotonic(), with_ids=False)
            return await run.full()

    async def _chunks(self, body: Any, plan: PlanRequest[Any]) -> AsyncGenerator[Any, None]:
        async with self._prefilled(body, plan):
            run: PlannedResponse[Any, Any] = await plan(self.context, body, arrived=time.monotonic(), with_ids=False)
            async with contextlib.aclosing(run.chunks()) as chunks:
                async for ready in chunks:
                    for chunk in ready:
                        yield msgspec.to_builtins(chunk)

    @contextlib.asynccontextmanager
    async def _prefilled(self, body: Any, plan: PlanRequest[Any]) -> AsyncGenerator[None, None]:
        """Runs the request on the prefill engine, where there is one, until it ends or the block is left.

        A session's request runs on the last engine alone, which has the conversation.
        """
        if len(self._hosts) == 1 or (isinstance(body, GenerateRequest) and body.session_params):
            yield
            return
        args = self._parts[0].config
        body.bootstrap_host, body.bootstrap_room = args.http.host, secrets.randbits(62)
        body.bootstrap_port = args.disaggregation.disaggregation_bootstrap_port
        run: PlannedResponse[Any, Any] = await plan(self.contexts[0], body, arrived=time.monotonic(), with_ids=False)
        prefill = asyncio.create_task(run.full())
        try:
            yield
        finally:
            prefill.cancel()
            await asyncio.gather(prefill, return_exceptions=True)  # its errors have reached the decode engine


async def _until_ready(host: EngineHost) -> None:
    ready = asyncio.create_task(host.ready.wait())
    try:
        await asyncio.wait((ready, host.ended), return_when=asyncio.FIRST_COMPLETED)
    finally:
        ready.cancel()
    if host.ended.done():
        raise ConfigError(host.ended.result() or "The engine was stopped.")
    if host.context.status.dead is not None:
        raise WorkerUnavailable(host.context.status.dead)


def _generate(body: Mapping[str, Any]) -> GenerateRequest:
    """Raises InvalidRequest, as over HTTP."""
    return decode_generate(msgspec.json.encode(body))


def _chat(body: Mapping[str, Any]) -> ChatRequest:
    return decode_chat(msgspec.json.encode(body))
