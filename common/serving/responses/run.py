"""One response, round by round: the model answers, the server runs the tools that it calls, and the model goes on."""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import AsyncExitStack, aclosing
from typing import Any

import msgspec

from ...api.errors import Aborted, InvalidRequest, ServingError
from ..chat.handler import PlannedChat, plan_chat
from ..chat.schema import check_chat
from ..context.generation import refuse_aborted
from ..context.server_status import CONTINUES
from ..context.serving_context import ServingContext
from ..protocol.continuation import ResponseHeader
from ..protocol.encoding import encode
from ..sse import client_error
from ..tool_servers.base import ToolResult, ToolSession
from ..web import log_failure
from .formatter import ResponseObjectFormatter, ServerCall
from .items import as_input
from .request_tools import RequestTools
from .schema import InputItem, ResponseObject, ResponseRequest
from .to_chat import as_chat, translate_error

log = logging.getLogger("baton.server")


class ResponseRun:
    """A response that is planned: ask it for either ``full`` or ``events``, once.

    Rounds after the first are computed by this server alone, also by a decode server: its prefix cache has all but what
    the tools answered. In the last round that ``--max-tool-rounds`` or ``max_tool_calls`` leaves, the model is offered
    no tools of the server's, so that it answers.
    """

    def __init__(self, context: ServingContext, body: ResponseRequest, header: ResponseHeader,
                 before: Sequence[InputItem], tools: RequestTools, *, with_ids: bool, stored: bool):
        """``before``: the conversation that the request continues. ``with_ids``: events are followed by token ids, for
        a router that continues streams."""
        self.body = body
        self.header = header
        self.formatter = ResponseObjectFormatter(body, header, tools, stored=stored)
        self._context = context
        self._before = before
        self._tools = tools
        self._with_ids = with_ids
        self._num_rounds = self._num_calls = 0
        self._may_compute_alone = bool(body.background)
        self.planned: PlannedChat

    async def plan(self, arrived: float) -> None:
        """Plans the first round; raises ServingError."""
        self.planned = await self._plan(self.body, self._tools, arrived)

    async def full(self) -> ResponseObject:
        """The complete answer; raises the ServingError of a round that fails."""
        async with AsyncExitStack() as stack:
            sessions: dict[str, ToolSession] = {}
            while True:
                completion = await self.planned.full()
                refuse_aborted(choice.finish_reason for choice in completion.choices)
                self.formatter.add_answer(completion.choices[0], completion)
                calls = self.formatter.server_calls()
                for call in calls:
                    self.formatter.add_result(call, await self._call(call, sessions, stack))
                if not calls or not await self._next_round():
                    return self.formatter.object(self.formatter.end_status)

    async def events(self) -> AsyncGenerator[list[bytes], None]:
        """Events as they come, those that are ready together in one list. An error before the first of them is raised:
        it has an HTTP status of its own. A later one is the last event.

        The last list holds the complete end.
        """
        started = False
        try:
            async with AsyncExitStack() as stack:
                sessions: dict[str, ToolSession] = {}
                while True:
                    async with aclosing(self._round()) as events:
                        async for ready in events:
                            started = True
                            yield ready
                    calls = self.formatter.server_calls()
                    for call in calls:
                        yield self.formatter.add_result(call, await self._call(call, sessions, stack))
                    if not calls:
                        return
                    if not await self._next_round():
                        yield self.formatter.finish()
                        return
        except Exception as error:
            if not started or isinstance(error, ConnectionError):
                raise
            shown = client_error(error)
            log_failure(shown, rid=self.planned.requests[0].rid)
            comment = [_comment(shown.to_openai())] if self._with_ids else []
            yield [self.formatter.fail(shown), *comment]

    # ------------------------------------------------------------------ rounds

    async def _round(self) -> AsyncGenerator[list[bytes], None]:
        """The events of one round, with the end of the response where it is the last one."""
        while True:
            started = False
            try:
                async for ready in self._chunks():
                    started = True
                    yield ready
                return
            except ServingError as error:
                # The pair's other half goes with the connection that began a response of the background: as an error
                # of the transfer, or as the abort of a client that left.
                lost = error.status >= 500 or error.code == Aborted.code
                if started or not self._may_compute_alone or self.body.bootstrap_room is None or not lost:
                    raise
                log.info("%s: %s It is computed by this server alone.", self.header.id, error.message)
                self._may_compute_alone = False
                self.planned = await self._plan(_alone(self.body), self._tools, time.monotonic())

    async def _chunks(self) -> AsyncGenerator[list[bytes], None]:
        formatter, planned, started = self.formatter, self.planned, False
        async with aclosing(planned.chunks()) as chunks:
            async for ready in chunks:
                events: list[bytes] = []
                if not started and not self._num_rounds:
                    if self.body.continuation is not None:
                        formatter.resume(planned.continued_deltas)
                    else:
                        events += formatter.start()
                started = True
                refuse_aborted(choice.finish_reason for chunk in ready for choice in chunk.choices)
                for chunk in ready:
                    events += formatter.delta(chunk)
                if not planned.live:
                    events += formatter.end_round()
                    if not formatter.server_calls():
                        events += formatter.finish()
                ids = [token for chunk in ready for choice in chunk.choices for token in choice.token_ids or ()]
                if ids:
                    events.append(_comment({"token_ids": ids}))
                if events:
                    yield events

    async def _next_round(self) -> bool:
        """Plans the next round, behind the results of the last one; False where there is none: the client is to run
        functions of its own, or no token is left."""
        formatter, body = self.formatter, self.body
        if formatter.calls_client:
            return False
        left = None if body.max_output_tokens is None else body.max_output_tokens - formatter.num_output_tokens
        if left is not None and left < 1:
            return False
        formatter.next_round()
        self._num_rounds += 1
        rounds_left = self._context.config.responses.max_tool_rounds - self._num_rounds
        calls_left = None if body.max_tool_calls is None else body.max_tool_calls - self._num_calls
        ends = rounds_left < 1 or (calls_left is not None and calls_left < 1)
        further = msgspec.structs.replace(
            _alone(body), max_output_tokens=left, continuation=None, tool_choice="none" if ends else "auto",
            rid=body.rid and f"{body.rid}-{self._num_rounds}")
        token = CONTINUES.set(True)
        try:
            self.planned = await self._plan(further, self._tools, time.monotonic())
        finally:
            CONTINUES.reset(token)
        return True

    async def _plan(self, body: ResponseRequest, tools: RequestTools, arrived: float) -> PlannedChat:
        try:
            chat = as_chat(body, self._before, tools, as_input(self.formatter.output))
            return await plan_chat(self._context, check_chat(chat), arrived=arrived, with_ids=self._with_ids,
                                   name=self.header.id)
        except InvalidRequest as error:
            raise translate_error(error) from None

    # ------------------------------------------------------------------ tools

    async def _call(self, call: ServerCall, sessions: dict[str, ToolSession], stack: AsyncExitStack) -> ToolResult:
        """Runs a tool; whatever goes wrong is a result that the model reads."""
        block, tool = call
        self._num_calls += 1
        limit = self.body.max_tool_calls
        if limit is not None and self._num_calls > limit:
            return ToolResult(f"The call was not made: max_tool_calls is {limit}.", is_error=True)
        try:
            arguments: Any = msgspec.json.decode(block.text or "{}")
        except (msgspec.DecodeError, UnicodeDecodeError):
            arguments = None
        if not isinstance(arguments, dict):
            return ToolResult("The arguments are no JSON object.", is_error=True)
        try:
            session = sessions.get(tool.server)
            if session is None:
                server = self._context.tool_servers[tool.server]
                session = sessions[tool.server] = await stack.enter_async_context(server.session())
            return await session.call(tool.name, arguments)
        except Exception as error:
            log.warning("%s: the tool %s of %s failed: %s", self.header.id, tool.name, tool.server, error)
            return ToolResult(f"The tool failed: {type(error).__name__}.", is_error=True)


def _alone(body: ResponseRequest) -> ResponseRequest:
    """The request without its pair's other half."""
    return msgspec.structs.replace(body, bootstrap_host=None, bootstrap_port=None, bootstrap_room=None,
                                   bootstrap_previous_room=None, disagg_prefill_dp_rank=None)


def _comment(value: Any) -> bytes:
    return b": " + encode(value) + b"\n\n"
