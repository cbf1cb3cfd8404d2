"""What a worker's answer is to those who relay it: its head, its failure, and the sink that receives it."""

from __future__ import annotations

from typing import NamedTuple, Protocol


class Failure(NamedTuple):
    """Why an answer did not come, or not to its end."""

    reason: str
    """One word for metrics: connect, lost, silent, malformed, stale, removed."""
    detail: str
    refused: bool = False
    """Nobody listens at the address: certain, where a lost connection may be one request's fate."""
    at_boundary: bool = False
    """The answer's bytes so far end where one more event may follow."""


class AnswerHead:
    """The start of an answer: its status and the facts about framing that relaying depends on."""

    __slots__ = ("status", "data", "size", "folded")

    def __init__(self, status: int, data: bytes, size: int):
        self.status = status
        self.data = data
        """All bytes so far: the head and what of the body came along."""
        self.size = size
        """Bytes of the head, blank line included."""
        self.folded = data[:size].lower()

    @property
    def chunked(self) -> bool:
        return b"\r\ntransfer-encoding:" in self.folded

    @property
    def delimited(self) -> bool:
        """Whether the answer says where it ends; otherwise the end of the connection does."""
        return (b"\r\ncontent-length:" in self.folded or b"\r\ntransfer-encoding:" in self.folded
                or self.status in (204, 304))

    @property
    def event_stream(self) -> bool:
        if b"text/event-stream" not in self.folded:
            return False
        start = self.folded.find(b"\r\ncontent-type:")
        return start >= 0 and b"text/event-stream" in self.folded[start:self.folded.find(b"\r\n", start + 2)]


class Sink(Protocol):
    """Who receives an answer."""

    def answer_head(self, head: AnswerHead) -> None: ...
    def answer_data(self, data: bytes) -> None: ...
    def answer_end(self, *, reusable: bool) -> None: ...
    def answer_lost(self, failure: Failure) -> None: ...
