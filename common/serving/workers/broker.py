"""The main process's side of its workers' requests: to a worker it is the engine."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import msgspec

from ...api.errors import Conflict, ServingError
from ...api.messages import Abort, Finish, Generate, Output, OutputBatch, OutputExtras, PromptUsage
from ..context.serving_context import ServingContext
from .messages import GrammarReady, PrepareGrammar, RequestFailed, WireError

_CONFLICT_RETRY_SECONDS = 0.02
_CONFLICT_TRIES = 25
"""A client that leaves one worker and comes to another one at once, with the same request id, may overtake the first
worker's abort."""


class Broker:
    """Sends the requests of one worker to the engine, and their outputs back: those of a step in one message."""

    def __init__(self, context: ServingContext, send: Callable[[msgspec.Struct], None],
                 publish_state: Callable[[], object]):
        self._context = context
        self._send = send
        self._publish_state = publish_state
        self._weight_version = ""
        self._open: set[str] = set()
        self._retried: dict[str, tuple[Generate, asyncio.TimerHandle]] = {}
        self._outputs = OutputBatch([], [])
        self._calls: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        """Requests that have not ended."""
        return len(self._open)

    def generate(self, request: Generate, tries: int = _CONFLICT_TRIES) -> None:
        """Sends a request to the engine; a refusal is its end."""
        self._retried.pop(request.rid, None)
        try:
            if request.bootstrap is not None:
                self._context.status.check_weights_stable()
            self._context.client.submit(self, [request])
        except Conflict as error:
            if tries and request.rid not in self._open:
                self._retried[request.rid] = request, asyncio.get_running_loop().call_later(
                    _CONFLICT_RETRY_SECONDS, self.generate, request, tries - 1)
            else:
                self._refuse(request.rid, error)
        except ServingError as error:
            self._refuse(request.rid, error)
        else:
            self._open.add(request.rid)

    def abort(self, message: Abort) -> None:
        """Aborts a request of the worker, or all of them for an empty id."""
        client = self._context.client
        for rid in [message.rid] if message.rid else [*self._retried, *self._open]:
            if rid in self._retried:
                request, timer = self._retried.pop(rid)
                timer.cancel()
                if not message.silent:
                    usage = PromptUsage(len(request.input_ids), 0)
                    self.put(Output(rid, [], OutputExtras(usage, Finish("abort"))))
            elif rid in self._open and message.silent:
                self._open.discard(rid)
                client.abandon(rid)
            elif rid in self._open:
                client.abort(rid)

    def prepare_grammar(self, message: PrepareGrammar) -> None:
        """Compiles a grammar, for all workers in one place, and answers when requests may name it."""
        call = asyncio.create_task(self._prepare_grammar(message))
        self._calls.add(call)
        call.add_done_callback(self._calls.discard)

    def close(self) -> int:
        """Drops the requests of a worker that is gone; returns how many there were."""
        count = len(self._open) + len(self._retried)
        self.abort(Abort("", silent=True))
        for call in self._calls:
            call.cancel()
        return count

    async def _prepare_grammar(self, message: PrepareGrammar) -> None:
        error: ServingError | None = None
        try:
            tokenizer = self._context.status.serving_tokenizer()
            await self._context.planner.grammars.prepare(message.spec, tokenizer, message.param, message.client)
        except ServingError as refusal:
            error = refusal
        self._send(GrammarReady(message.seq, None if error is None else WireError.of(error)))

    def _refuse(self, rid: str, error: ServingError) -> None:
        self._send(RequestFailed(rid, WireError.of(error)))

    # Called by the client.

    def put(self, output: Output) -> None:
        if not self._outputs.rids:
            asyncio.get_running_loop().call_soon(self._flush)
        self._outputs.append(*output)
        if output.finish is not None:
            self._open.discard(output.rid)

    def fail(self, rid: str, error: ServingError) -> None:
        self._flush()
        self._open.discard(rid)
        self._refuse(rid, error)

    def _flush(self) -> None:
        if self._outputs.rids:
            if self._weight_version != self._context.model.weight_version:  # these tokens are counted as of it
                self._weight_version = self._context.model.weight_version
                self._publish_state()
            outputs, self._outputs = self._outputs, OutputBatch([], [])
            self._send(outputs)
