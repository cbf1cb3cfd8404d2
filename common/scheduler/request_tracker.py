"""Request tracker: the accepted requests, each of which gets exactly one terminal message."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from ..api.errors import (
    NON_FINITE_LOGITS,
    AbortRequested,
    Conflict,
    InvalidRequest,
    Overloaded,
    PeerFailed,
    ServingError,
)
from ..api.messages import Failed, Finish, FromEngine, Generate, Logprobs, OutputBatch
from ..api.token_ids import check_request_ids
from ..request.req import Req
from ..request.seeds import seeded


class RequestTracker:
    """Registers every request that the engine accepts and closes it once, with an output or an error.

    ``send`` takes messages for the API server; ``flush`` sends the outputs of one step as one message.
    """

    def __init__(self, send: Callable[[FromEngine], None], *, eos_ids: frozenset[int], vocab_size: int,
                 max_request_tokens: int, max_requests: int, timeout: float, reserves_output: bool = True,
                 random_seed: int | None = None):
        """``reserves_output``: this engine also decodes, so that prompt and output must both fit. ``random_seed``:
        requests without a seed get one, see ``seeded``; None leaves them without."""
        self._send = send
        self.eos_ids = eos_ids
        self.vocab_size = vocab_size
        self._max_request_tokens = max_request_tokens
        self._max_requests = max_requests
        self._timeout = timeout
        self._reserves_output = reserves_output
        self._random_seed = random_seed
        self._weights = ""
        self._outputs = OutputBatch([], [])
        self.live: dict[str, Req] = {}
        self.counters: dict[str, float] = dict.fromkeys(
            ("prompt_tokens", "cached_tokens", "generation_tokens", "finished_requests", "failed_requests",
             "non_finite_requests"), 0)

    def accept(self, message: Generate, now: float) -> Req | None:
        """Register a request; returns None where it is refused, after sending its terminal message."""
        try:
            self._check(message)
            req = Req.from_message(message, eos_ids=self.eos_ids, now=now, timeout=self._timeout)
        except ServingError as error:
            self._send(Failed(message.rid, error.wire_code, error.message))
            return None
        if self._random_seed is not None:
            req.sampling = seeded(message, self._random_seed)
        if self._weights:
            req.namespace = msgspec.structs.replace(req.namespace, weights=self._weights)
        self.live[req.rid] = req
        return req

    def change_weights(self, weights: str) -> None:
        """Lets all requests look for pages in the namespaces of the new ``weights`` from now on; those that have pages
        keep them, in the old ones."""
        self._weights = weights
        for req in self.live.values():
            req.namespace = msgspec.structs.replace(req.namespace, weights=weights)

    def _check(self, message: Generate) -> None:
        if message.rid in self.live:
            raise Conflict(f"Request id {message.rid!r} is in use; choose another.")
        if len(self.live) >= self._max_requests:
            raise Overloaded(f"The server holds {len(self.live)} requests, its limit; try again later.")
        if not message.input_ids:
            raise InvalidRequest("The prompt is empty; send at least one token.")
        check_request_ids(message, self.vocab_size)
        needed = len(message.input_ids) + message.sampling.max_new_tokens
        if not self._reserves_output or message.sends_kv:
            needed = len(message.input_ids) + min(1, message.sampling.max_new_tokens)
        if needed > self._max_request_tokens:
            raise InvalidRequest(
                f"The request needs {needed} tokens of KV cache (prompt and output), this server has room for "
                f"{self._max_request_tokens}; shorten the prompt or lower the output limit.")

    def add_output(self, req: Req, token_ids: list[int], logprobs: Logprobs | None, num_drafts: int = 0) -> None:
        """Report new tokens, for which ``num_drafts`` were verified; closes the request where ``req.finish`` is set."""
        self._outputs.append(req.rid, token_ids, req.take_extras(logprobs if token_ids else None), num_drafts)
        self.counters["generation_tokens"] += len(token_ids)
        if req.finish is not None:
            self._close(req)
            self.counters["finished_requests"] += 1
            self.counters["prompt_tokens"] += req.num_prompt_tokens
            self.counters["cached_tokens"] += req.num_cached_tokens

    def add_new_tokens(self, rids: list[str], token_ids: list[int], counts: list[int] | None = None,
                       num_drafts: list[int] | None = None) -> None:
        """Report new tokens of several requests, one or ``counts`` of each, none of which ends with them; all have
        reported before. ``num_drafts`` were verified for them."""
        self._outputs.extend(rids, token_ids, counts, num_drafts)
        self.counters["generation_tokens"] += len(token_ids)

    def fail(self, req: Req, error: ServingError) -> None:
        """Close with an error; a request whose abort was requested ends with the tokens so far instead."""
        if isinstance(error, AbortRequested):
            req.finish = Finish("abort")
            self.add_output(req, [], None)
            return
        self._close(req)
        self.counters["failed_requests"] += 1
        is_own = not isinstance(error, PeerFailed)
        self.counters["non_finite_requests"] += is_own and error.code == NON_FINITE_LOGITS
        self.flush()  # tokens generated before the error are reported before it
        self._send(Failed(req.rid, error.wire_code, error.message))

    def drop(self, req: Req) -> None:
        """Close without a message: the API server has answered the request itself."""
        self._close(req)

    def _close(self, req: Req) -> None:
        assert self.live.pop(req.rid, None) is req, f"{req} was ended twice"

    def flush(self) -> None:
        """Send the outputs gathered since the last call."""
        if self._outputs.rids:
            outputs, self._outputs = self._outputs, OutputBatch([], [])
            self._send(outputs)
