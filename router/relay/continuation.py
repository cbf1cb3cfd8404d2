"""Continuation of a stream after its worker died: the log of its tokens, and the request to the next worker.

Our servers name each event's tokens, in the event or in a comment after it, if ``x-baton-token-ids`` asks for it.
A stream can be continued if it is greedy or seeded, so that another worker samples the same tokens. The router logs the
bytes that it relays of such a stream, and parses them only when the worker dies, or when they grow: then it extracts
the ids and drops the bytes. The client is sent complete chunks only, since part of an event could not be taken back.
"""

from __future__ import annotations

import re
from typing import Any

import msgspec

from ...common.api.unreadable import UNREADABLE
from ...common.serving.responses.schema import SERVER_TOOLS
from ..net.upstream_response import Failure, engine_died

TOKEN_IDS_HEADER = b"x-baton-token-ids: 1\r\n"
"""The header line that asks one of our servers to name each event's tokens."""
_END_OF_CHUNK = b"\n\n\r\n"
"""The end of a chunk of our servers, which is the end of an event: JSON has no line breaks inside one."""
DEAD_CODE = b'"code":"engine_dead"'
_ERROR_EVENT = b': {"error":'
"""The beginning of an error, in an event or in the comment after an event that reports it in another API's form."""
_LAST_EVENTS = (b'data: {"type":"message_stop"', b'data: {"type":"response.completed"',
                b'data: {"type":"response.incomplete"')
"""The last events of those APIs whose streams do not end with [DONE]."""
_CLIENT_ERRORS = (b'"code":"request_aborted"', b'"type":"invalid_request_error"')
"""Errors that the request itself causes: another worker would report the same."""
_COMPACT_BYTES = 64 * 1024
"""Relayed bytes beyond which they are reduced to their token ids."""
_IDS = re.compile(rb'"(?:token_ids|output_ids)":\[([0-9,]*)\]')
_COUNT = re.compile(rb'"completion_tokens":(\d+)')
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
    background: Any = None
    tools: Any = None


_decode = msgspec.json.Decoder(_Fields).decode


def is_continuable(body: bytes) -> bool:
    """True if a request asks for one stream whose tokens another worker would sample again."""
    try:
        found = _decode(body)
    except UNREADABLE:
        return False  # Refused by the worker, or a batch with parameters each.
    sampling = found.sampling_params or found
    repeatable = (sampling.temperature == 0 or sampling.top_k == 1 or sampling.seed is not None
                  or sampling.sampling_seed is not None)
    extras = (found.logprobs, found.top_logprobs, found.include, found.return_logprob, found.return_hidden_states,
              found.continuation, found.background)
    return bool(found.stream and repeatable and sampling.n in (None, 1) and not any(extras)
                and not _has_server_tools(found.tools))


def _has_server_tools(tools: Any) -> bool:
    """True if an answer may consist of several, with tools that the worker runs between them."""
    return isinstance(tools, list) and any(
        isinstance(tool, dict) and isinstance(kind := tool.get("type"), str) and kind in SERVER_TOOLS for tool in tools)


class StreamLog:
    """The tokens that a client was sent of one stream, and the request's body."""

    __slots__ = ("body", "failed", "model_fingerprint", "_engine_died", "_cumulative", "_incomplete", "_relayed",
                 "_token_ids", "_identity")

    def __init__(self, body: bytes, *, cumulative: bool):
        """``cumulative``: each event has the whole text so far, as those of /generate do but with --stream-output."""
        self.body = body
        self.failed = False
        """True if the worker ended the stream with an error, which was not relayed."""
        self.model_fingerprint: str | None = None
        """The fingerprint of the first worker's model: one with other weights would continue with another text."""
        self._engine_died = False
        self._cumulative = cumulative
        self._incomplete = b""
        """The beginning of a chunk that is not complete."""
        self._relayed = b""
        """Bytes that were relayed since the last ``_compact``, which leaves the last event of them."""
        self._token_ids: list[bytes] = []
        self._identity: dict[str, Any] = {}

    def feed(self, data: bytes) -> bytes:
        """Take in the next bytes of the stream; returns those that may be relayed now."""
        if self.failed:
            return b""
        if self._incomplete:
            data, self._incomplete = self._incomplete + data, b""
        if not data.endswith(_END_OF_CHUNK) and not data.endswith(b"\r\n0\r\n\r\n"):
            last = data.rfind(_END_OF_CHUNK)
            end = last + len(_END_OF_CHUNK) if last >= 0 else 0
            data, self._incomplete = data[:end], data[end:]
        if _ERROR_EVENT in data and not any(error in data for error in _CLIENT_ERRORS):
            self.failed = True
            self._engine_died = DEAD_CODE in data
            data = data[:self._chunk_start(data, data.index(_ERROR_EVENT))]
        self._relayed += data
        if len(self._relayed) > _COMPACT_BYTES:
            self._compact()
        return data

    def flush(self) -> bytes:
        """The bytes that were not relayed yet, when the worker's message is complete: its end may come separately."""
        rest, self._incomplete = self._incomplete, b""
        return rest

    def failure(self, url: str) -> Failure:
        """The failure that the worker reported at the end of the stream."""
        if self._engine_died:
            return engine_died(url)
        return Failure("failed", f"{url} ended a stream with an error")

    @staticmethod
    def _chunk_start(data: bytes, inside: int) -> int:
        """The start of the chunk that has the position ``inside``."""
        before = data.rfind(_END_OF_CHUNK, 0, inside)
        return before + len(_END_OF_CHUNK) if before >= 0 else 0

    @property
    def missing_end(self) -> bytes | None:
        """The end of the message, if nothing else is missing."""
        if b"data: [DONE]" in self._relayed[-256:] or self._last_event.startswith(_LAST_EVENTS):
            return b"0\r\n\r\n"
        return b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n" if self.finished else None

    @property
    def finished(self) -> bool:
        """True if the last event has a finish reason: nothing may be generated any more."""
        last = self._last_event
        return b'"finish_reason":"' in last or b'"finish_reason":{' in last

    @property
    def _last_event(self) -> bytes:
        return self._relayed[max(0, self._relayed.rfind(b"data: ")):]

    def continuation_body(self) -> bytes:
        """The request for the rest of the stream; an incomplete chunk of the last worker is forgotten."""
        self.failed = False
        self._incomplete = b""
        self._compact()
        if not self._identity:
            return self.body
        ids = b",".join(self._token_ids)
        extra = msgspec.json.encode(self._identity)[1:-1]
        field = b'"continuation":{"token_ids":[%b],%b}' % (ids, extra)
        start = self.body.index(b"{") + 1
        return b"%b%b,%b" % (self.body[:start], field, self.body[start:])

    def _compact(self) -> None:
        """Extract the token ids from the relayed bytes; all but the last event is dropped."""
        relayed = self._relayed
        if not self._identity and (found := _ID.search(relayed)):
            self._identity["id"] = msgspec.json.decode(found[1])
            if created := _CREATED.search(relayed):
                self._identity["created"] = int(created[1])
        if numbers := _NUMBER.findall(relayed):
            self._identity["sequence_number"] = int(numbers[-1])
        ids = [match for match in _IDS.findall(relayed) if match]
        if self._cumulative and ids and _has_all(ids[-1], relayed):
            self._token_ids = ids[-1:]
        else:
            self._token_ids += ids
        self._relayed = _IDS.sub(b'"token_ids":[]', self._last_event)


def _has_all(ids: bytes, relayed: bytes) -> bool:
    """True if the token ids of the last event of ``relayed`` are as many as it counts, or it counts none."""
    counts = _COUNT.findall(relayed)
    return not counts or ids.count(b",") + 1 == int(counts[-1])
