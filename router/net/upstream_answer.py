"""What a worker's answer is to those who relay it: its head, its failure, and the sink that receives it."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import msgspec

PAIR_MISMATCH = b"\r\nx-error-code: pair_mismatch\r\n"
"""A header of our servers' answers 502: the two can never hand a KV cache over."""
ENGINE_DEAD = b"\r\nx-baton-engine: dead\r\n"
"""A header, in lower case, of our servers' answers 503: their engine has died, and takes all that it held along."""


class Failure(NamedTuple):
    """Why an answer did not come, or not to its end."""

    reason: str
    """One word for metrics; ``retry.FAILURES`` tells what follows from each."""
    detail: str
    refused: bool = False
    """Nobody serves at the address: certain, where a lost connection may be one request's fate."""
    at_boundary: bool = False
    """The answer's bytes so far end where one more event may follow."""


def engine_died(url: str) -> Failure:
    """The failure of a worker that says so itself."""
    return Failure("dead", f"the engine of {url} died", refused=True)


class AnswerFacts(NamedTuple):
    """What relaying depends on in an answer's head."""

    status: int
    chunked: bool
    delimited: bool
    """Whether the answer says where it ends; otherwise the end of the connection does."""
    event_stream: bool
    json: bool
    names_request: bool
    """Whether it carries an x-request-id."""
    line_size: int
    """Bytes of the status line."""

    @classmethod
    def read(cls, status: int, head: bytes) -> AnswerFacts:
        folded = head.lower()
        chunked = b"\r\ntransfer-encoding:" in folded
        start = folded.find(b"\r\ncontent-type:")
        kind = folded[start:folded.find(b"\r\n", start + 2)] if start >= 0 else b""
        return cls(status, chunked, chunked or b"\r\ncontent-length:" in folded or status in (204, 304),
                   b"text/event-stream" in kind, b"application/json" in kind,
                   b"\r\nx-request-id:" in folded, folded.find(b"\r\n") + 2)


_RETRY_AFTER = b"retry-after: 1\r\n"


class AnswerHead(msgspec.Struct, gc=False, eq=False):
    """The start of an answer."""

    facts: AnswerFacts
    data: bytes
    """All bytes so far: the head and what of the body came along."""
    size: int
    """Bytes of the head, blank line included."""
    whole: bool = False
    """Whether it is known that nothing follows ``data``."""

    @property
    def status(self) -> int:
        return self.facts.status

    def says(self, line: bytes) -> bool:
        """Whether a header's line, which is in lower case, is among the answer's."""
        return line in self.data[:self.size].lower()

    def ask_to_wait(self) -> None:
        """Add a Retry-After where a busy worker named none."""
        if b"\r\nretry-after:" not in self.data[:self.size].lower():
            line = self.facts.line_size
            self.data = b"".join((self.data[:line], _RETRY_AFTER, self.data[line:]))
            self.size += len(_RETRY_AFTER)

    @property
    def starts_stream(self) -> bool:
        """Whether a stream of events follows that another worker's stream may continue, or be continued by."""
        return self.facts.status == 200 and self.facts.event_stream and self.facts.chunked


class Sink(Protocol):
    """Who receives an answer."""

    def answer_head(self, head: AnswerHead) -> None: ...
    def answer_data(self, data: bytes) -> None: ...
    def answer_end(self, *, reusable: bool) -> None: ...
    def answer_lost(self, failure: Failure) -> None: ...
