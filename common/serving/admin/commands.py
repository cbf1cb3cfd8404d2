"""Administrative commands over HTTP and for ``baton.Engine``: decodes their arguments, and runs them on the engine.

With --admin-api-key they take that key alone, but for those that a command opens to clients.
"""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import msgspec
from aiohttp import web

from ...api.errors import ServingError
from ...commands.base import Endpoint
from ...commands.registry import COMMANDS, name_of
from ..context.serving_context import ServingContext
from ..protocol.decoding import BodyDecoder
from ..web import error_response, json_response, log_failure


@dataclass(frozen=True)
class CommandServer:
    """The API server, as commands use it."""

    context: ServingContext

    async def execute(self, command: msgspec.Struct) -> str:
        self.context.status.check_serving()
        return await self.context.client.control(command, COMMANDS.get(name_of(command)).timeout)


@functools.cache
def decoder(body: type[msgspec.Struct]) -> BodyDecoder[msgspec.Struct]:
    """Raises TypeError for a body with a number that has no bounds."""
    return BodyDecoder(body)


async def run_endpoint(context: ServingContext, endpoint: Endpoint, body: bytes) -> str:
    """Runs the command of an endpoint; ``body`` is JSON, empty for defaults. Returns a sentence; raises
    ServingError."""
    decoded = None if endpoint.body is None else decoder(endpoint.body).decode(body or b"{}")
    return await endpoint.serve(CommandServer(context), decoded)


def route(endpoint: Endpoint) -> Callable[[ServingContext, web.Request], Awaitable[web.Response]]:
    """The HTTP handler of an endpoint; an answer has ``success`` and ``message``, that of an error its error object
    too. Raises TypeError for a body with a number that has no bounds."""
    if endpoint.body is not None:
        decoder(endpoint.body)

    async def answer(context: ServingContext, request: web.Request) -> web.Response:
        try:
            message = await run_endpoint(context, endpoint, await request.read())
        except ServingError as error:
            log_failure(error, request)
            return error_response(error, {"success": False, **error.response_body()})
        if endpoint.returns_json:
            return web.Response(text=message, content_type="application/json")
        return json_response({"success": True, **endpoint.fields, "message": message})

    return answer
