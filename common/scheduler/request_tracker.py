"""The ledger of accepted requests: each gets exactly one terminal message."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ..api.errors import AbortRequested, Conflict, InvalidRequest, Overloaded, ServingError
from ..api.messages import Failed, Finish, FromEngine, Generate, Logprobs, NewTokens, Output, OutputBatch
from ..api.token_ids import check_request_ids
from ..request.req import Req


class RequestTracker:
    """Opens an entry for every request the engine takes on and closes it once, with an output or an error.

    ``send`` takes messages for the front; ``flush`` sends what one step gathered as one message.
    """

    def __init__(self, send: Callable[[FromEngine], None], *, eos_ids: frozenset[int], vocab_size: int,
                 max_request_tokens: int, max_requests: int, timeout: float, reserves_output: bool = True):
        """``reserves_output``: whether this engine also decodes, so that prompt and output must both fit."""
        self._send = send
        self.eos_ids = eos_ids
        self.vocab_size = vocab_size
        self._max_request_tokens = max_request_tokens
        self._max_requests = max_requests
        self._timeout = timeout
        self._reserves_output = reserves_output
        self._outputs: list[Output] = []
        self._gained: NewTokens | None = None
        self.live: dict[str, Req] = {}
        self.counters: dict[str, float] = dict.fromkeys(
            ("prompt_tokens", "cached_tokens", "generation_tokens", "finished_requests", "failed_requests"), 0)

    def accept(self, message: Generate, now: float) -> Req | None:
        """A new entry, or None: then the request was refused and its terminal message is on its way."""
        try:
            self._check(message)
            req = Req.from_message(message, eos_ids=self.eos_ids, now=now, timeout=self._timeout)
        except ServingError as error:
            self._send(Failed(message.rid, error.wire_code, error.message))
            return None
        self.live[req.rid] = req
        return req

    def _check(self, message: Generate) -> None:
        if message.rid in self.live:
            raise Conflict(f"Request id {message.rid!r} is in use; choose another.")
        if len(self.live) >= self._max_requests:
            raise Overloaded(f"The server holds {len(self.live)} requests, its limit; try again later.")
        if not message.input_ids:
            raise InvalidRequest("The prompt is empty; send at least one token.")
        check_request_ids(message, self.vocab_size)
        needed = len(message.input_ids) + message.sampling.max_new_tokens
        if not self._reserves_output:
            needed = len(message.input_ids) + min(1, message.sampling.max_new_tokens)
        if needed > self._max_request_tokens:
            raise InvalidRequest(
                f"The request needs {needed} tokens of KV cache (prompt and output), this server has room for "
                f"{self._max_request_tokens}; shorten the prompt or lower the output limit.")

    def gain(self, req: Req, token_ids: list[int], logprobs: Logprobs | None) -> None:
        """Report tokens; closes the entry where ``req.finish`` is set."""
        output = req.output(token_ids, logprobs)
        self._outputs.append(output)
        self.counters["generation_tokens"] += len(token_ids)
        if req.finish is not None:
            self._close(req)
            self.counters["finished_requests"] += 1
            self.counters["prompt_tokens"] += req.num_prompt_tokens
            self.counters["cached_tokens"] += req.num_cached_tokens

    def gain_each(self, reqs: Sequence[Req], gained: NewTokens) -> None:
        """Each of ``reqs`` gains its pending token and goes on; all have told of themselves before."""
        for req, token_id in zip(reqs, gained.token_ids):
            req.num_pending -= 1
            req.tokens.append(token_id)
        if self._outputs or self._gained is not None:
            self.flush()  # what a message has gained stands before what it tells
        self._gained = gained
        self.counters["generation_tokens"] += len(reqs)

    def fail(self, req: Req, error: ServingError) -> None:
        """Close with an error; a request whose end was asked for ends with the tokens so far instead."""
        if isinstance(error, AbortRequested):
            req.finish = Finish("abort")
            self.gain(req, [], None)
            return
        self._close(req)
        self.counters["failed_requests"] += 1
        self.flush()  # tokens gained before the error are reported before it
        self._send(Failed(req.rid, error.wire_code, error.message))

    def drop(self, req: Req) -> None:
        """Close without a message: the front has answered the request itself."""
        self._close(req)

    def _close(self, req: Req) -> None:
        assert self.live.pop(req.rid, None) is req, f"{req} was ended twice"

    def flush(self) -> None:
        if self._outputs or self._gained is not None:
            self._send(OutputBatch(self._outputs, self._gained))
            self._outputs, self._gained = [], None
