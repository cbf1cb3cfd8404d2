"""A stream that goes on after its worker died: what is kept for that, and what is asked of the next worker.

Our servers name each event's tokens, in the event or in a comment behind it, where ``x-baton-token-ids`` asks for it.
Of a stream that can be continued (greedy or seeded, so that another worker chooses the same tokens) the router keeps
the bytes it relayed, and reads them only when it comes to that, or when they grow: then the ids are taken out and the
bytes dropped. The client is sent whole chunks only; half of an event could not be taken back.
"""

from __future__ import annotations

import re
from typing import Any

import msgspec

from ...common.api.unreadable import UNREADABLE
from ..net.upstream_answer import Failure, engine_died

ASK_FOR_IDS = b"x-baton-token-ids: 1\r\n"
_END_OF_CHUNK = b"\n\n\r\n"
"""Our servers end a chunk with an event; within one, JSON has no line breaks."""
DEAD_CODE = b'"code":"engine_dead"'
_ERROR_EVENT = b': {"error":'
"""In an event, or in the comment behind an event that tells of the error in its own API's way."""
_LAST_EVENTS = (b'data: {"type":"message_stop"', b'data: {"type":"response.completed"',
                b'data: {"type":"response.incomplete"')
"""Of the APIs whose streams do not end with [DONE]."""
# Errors that the request itself is the reason of: another worker would tell the same.
_CLIENTS_OWN = (b'"code":"request_aborted"', b'"type":"invalid_request_error"')
_KEPT_BYTES = 64 * 1024
_IDS = re.compile(rb'"(?:token_ids|output_ids)":\[([0-9,]*)\]')
_CREATED = re.compile(rb'"created(?:_at)?":(\d+)')
_NUMBER = re.compile(rb'"sequence_number":(\d+)')
_ID = re.compile(rb'"id":("[^"\\]*")')


class _Sampling(msgspec.Struct):
    temperature: float | None = None
    top_k: int | None = None
    seed: int | None = None
    sampling_seed: int | None = None
    n: int | None = None


class _Fields(_Sampling):
    stream: bool | None = None
    logprobs: Any = None
    top_logprobs: Any = None
    include: Any = None
    return_logprob: Any = None
    return_hidden_states: Any = None
    sampling_params: _Sampling | None = None
    continuation: Any = None


_decode = msgspec.json.Decoder(_Fields).decode


def continuable(body: bytes) -> bool:
    """Whether a request asks for one stream whose tokens another worker would choose again."""
    try:
        found = _decode(body)
    except UNREADABLE:
        return False  # Refused by the worker, or a batch with parameters each.
    sampling = found.sampling_params or found
    same = (sampling.temperature == 0 or sampling.top_k == 1 or sampling.seed is not None
            or sampling.sampling_seed is not None)
    more = (found.logprobs, found.top_logprobs, found.include, found.return_logprob, found.return_hidden_states,
            found.continuation)
    return bool(found.stream and same and sampling.n in (None, 1) and not any(more))


class StreamLog:
    """What a client has been told of one stream, and the request's body, to be sent again."""

    __slots__ = ("body", "failed", "weights", "_engine_died", "_cumulative", "_held", "_kept", "_ids", "_identity")

    def __init__(self, body: bytes, *, cumulative: bool):
        """``cumulative``: each event holds the whole answer so far, as those of /generate do."""
        self.body = body
        self.failed = False
        """Whether the worker ended the stream with an error, which the client has not been told."""
        self.weights: str | None = None
        """The fingerprint of the model that began: one with other weights would go on with another answer."""
        self._engine_died = False
        self._cumulative = cumulative
        self._held = b""
        self._kept = b""
        self._ids: list[bytes] = []
        self._identity: dict[str, Any] = {}

    def take(self, data: bytes) -> bytes:
        """The part of the stream that may be relayed, now that ``data`` has come."""
        if self.failed:
            return b""
        if self._held:
            data, self._held = self._held + data, b""
        if not data.endswith(_END_OF_CHUNK) and not data.endswith(b"\r\n0\r\n\r\n"):
            cut = data.rfind(_END_OF_CHUNK)
            end = cut + len(_END_OF_CHUNK) if cut >= 0 else 0
            data, self._held = data[:end], data[end:]
        if _ERROR_EVENT in data and not any(own in data for own in _CLIENTS_OWN):
            self.failed = True
            self._engine_died = DEAD_CODE in data
            data = data[:self._chunk_start(data, data.index(_ERROR_EVENT))]
        self._kept += data
        if len(self._kept) > _KEPT_BYTES:
            self._compact()
        return data

    def rest(self) -> bytes:
        """What was held back, now that the worker's message is complete: its end may come in a piece of its own."""
        rest, self._held = self._held, b""
        return rest

    def failure(self, url: str) -> Failure:
        """What the error was that the worker ended the stream with."""
        if self._engine_died:
            return engine_died(url)
        return Failure("failed", f"{url} ended a stream with an error")

    @staticmethod
    def _chunk_start(data: bytes, inside: int) -> int:
        """Where the chunk begins that holds position ``inside``."""
        before = data.rfind(_END_OF_CHUNK, 0, inside)
        return before + len(_END_OF_CHUNK) if before >= 0 else 0

    @property
    def missing_end(self) -> bytes | None:
        """What ends the message, when nothing but its end is missing."""
        if b"data: [DONE]" in self._kept[-256:] or self._last_event.startswith(_LAST_EVENTS):
            return b"0\r\n\r\n"
        return b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n" if self.finished else None

    @property
    def finished(self) -> bool:
        """Whether the last event told why the answer ended: nothing may be generated any more."""
        last = self._last_event
        return b'"finish_reason":"' in last or b'"finish_reason":{' in last

    @property
    def _last_event(self) -> bytes:
        return self._kept[max(0, self._kept.rfind(b"data: ")):]

    def resumed_body(self) -> bytes:
        """The request for what is still to come; what the last worker left half said is forgotten."""
        self.failed = False
        self._held = b""
        self._compact()
        if not self._identity:
            return self.body
        ids = b",".join(self._ids)
        extra = msgspec.json.encode(self._identity)[1:-1]
        field = b'"continuation":{"token_ids":[%b],%b}' % (ids, extra)
        start = self.body.index(b"{") + 1
        return b"%b%b,%b" % (self.body[:start], field, self.body[start:])

    def _compact(self) -> None:
        """Take the ids out of the kept bytes; all but the last event is dropped."""
        kept = self._kept
        if not self._identity and (found := _ID.search(kept)):
            self._identity["id"] = msgspec.json.decode(found[1])
            if created := _CREATED.search(kept):
                self._identity["created"] = int(created[1])
        if numbers := _NUMBER.findall(kept):
            self._identity["sequence_number"] = int(numbers[-1])
        ids = [match for match in _IDS.findall(kept) if match]
        if self._cumulative:
            self._ids = ids[-1:] or self._ids
        else:
            self._ids += ids
        self._kept = _IDS.sub(b'"token_ids":[]', self._last_event)
