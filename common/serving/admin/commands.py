"""Administrative commands over HTTP and for ``baton.Engine``: decodes their arguments, and runs them on the engine.

With --admin-api-key they take that key alone, but for those that a command opens to clients.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import msgspec
from aiohttp import web

from ...commands.base import Endpoint
from ...commands.registry import COMMANDS, name_of
from ..context.serving_context import ServingContext
from ..protocol.decoding import BodyDecoder
from ..web import json_response


@dataclass(frozen=True)
class CommandServer:
    """The API server, as commands use it."""

    context: ServingContext

    async def execute(self, command: msgspec.Struct) -> str:
        self.context.status.check_serving()
        return await self.context.client.control(command, COMMANDS.get(name_of(command)).timeout)


@functools.cache
def _decoder(body: type[msgspec.Struct]) -> BodyDecoder[msgspec.Struct]:
    return BodyDecoder(body)


async def run_endpoint(context: ServingContext, endpoint: Endpoint, body: bytes) -> str:
    """Runs the command of an endpoint; ``body`` is JSON, empty for defaults. Returns a sentence; raises
    ServingError."""
    decoded = None if endpoint.body is None else _decoder(endpoint.body).decode(body or b"{}")
    return await endpoint.serve(CommandServer(context), decoded)


async def answer(endpoint: Endpoint, context: ServingContext, request: web.Request) -> web.Response:
    message = await run_endpoint(context, endpoint, await request.read())
    return json_response({"success": True, **endpoint.fields, "message": message})
