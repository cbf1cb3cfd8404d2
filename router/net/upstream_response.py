"""A worker's response as relays see it: its head, its failure, and the sink that receives it."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import msgspec

PAIR_MISMATCH = b"\r\nx-error-code: pair_mismatch\r\n"
"""A header of our servers' 502 responses: the two servers can never transfer a KV cache."""
PEER_FAILED = b"\r\nx-baton-failed: peer\r\n"
"""A header of our servers' 500 responses: it is the other server of the pair that failed."""
ENGINE_DEAD = b"\r\nx-baton-engine: dead\r\n"
"""A header, in lower case, of our servers' 503 responses: their engine has died, and all of its requests with it."""


class Failure(NamedTuple):
    """The reason why a response did not come, or not to its end."""

    reason: str
    """One word for metrics; ``retry.FAILURES`` has the outcome of each."""
    detail: str
    refused: bool = False
    """True if no server listens at the address, which is certain; a lost connection may concern one request only."""
    at_boundary: bool = False
    """True if the response's bytes so far end where one more event may follow."""


def engine_died(url: str) -> Failure:
    """The failure of a worker that reports itself that its engine died."""
    return Failure("dead", f"the engine of {url} died", refused=True)


class ResponseFacts(NamedTuple):
    """The facts of a response's head that relaying depends on."""

    status: int
    chunked: bool
    delimited: bool
    """True if the head announces where the response ends; otherwise the end of the connection does."""
    event_stream: bool
    json: bool
    has_request_id: bool
    """True if there is an x-request-id."""
    line_size: int
    """Bytes of the status line."""

    @classmethod
    def read(cls, status: int, head: bytes) -> ResponseFacts:
        folded = head.lower()
        chunked = b"\r\ntransfer-encoding:" in folded
        start = folded.find(b"\r\ncontent-type:")
        kind = folded[start:folded.find(b"\r\n", start + 2)] if start >= 0 else b""
        return cls(status, chunked, chunked or b"\r\ncontent-length:" in folded or status in (204, 304),
                   b"text/event-stream" in kind, b"application/json" in kind,
                   b"\r\nx-request-id:" in folded, folded.find(b"\r\n") + 2)


_RETRY_AFTER = b"retry-after: 1\r\n"


class ResponseHead(msgspec.Struct, gc=False, eq=False):
    """The head of a response, and the part of the body that came with it."""

    facts: ResponseFacts
    data: bytes
    """All bytes so far: the head and the beginning of the body."""
    size: int
    """Bytes of the head, blank line included."""
    complete: bool = False
    """True if it is known that nothing follows ``data``."""

    @property
    def status(self) -> int:
        return self.facts.status

    def has_line(self, line: bytes) -> bool:
        """True if the head has a header line, given in lower case."""
        return line in self.data[:self.size].lower()

    def add_retry_after(self) -> None:
        """Add a Retry-After unless the worker sent one."""
        if b"\r\nretry-after:" not in self.data[:self.size].lower():
            line = self.facts.line_size
            self.data = b"".join((self.data[:line], _RETRY_AFTER, self.data[line:]))
            self.size += len(_RETRY_AFTER)

    @property
    def starts_stream(self) -> bool:
        """True if a stream of events follows that may continue another worker's stream, or be continued by one."""
        return self.facts.status == 200 and self.facts.event_stream and self.facts.chunked


class ResponseSink(Protocol):
    """Receives a response; ``upstream`` has the contract."""

    def on_response_head(self, head: ResponseHead) -> None: ...
    def on_response_data(self, data: bytes) -> None: ...
    def on_response_end(self, *, reusable: bool) -> None: ...
    def on_response_lost(self, failure: Failure) -> None: ...
