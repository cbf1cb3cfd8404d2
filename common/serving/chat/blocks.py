"""A chat's answer as a sequence of content blocks: reasoning, text, tool calls.

Chat completions hold an answer in the fields of one message. OpenAI's Responses and Anthropic's Messages hold it as a
sequence of items, each of which starts, grows, and stops before the next one starts. ``AnswerBlocks`` converts a
message, complete or in deltas, to such blocks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from msgspec import UnsetType

from ..protocol.logprobs import TokenLogprob
from .schema import ChatDelta, ChatMessage

Kind = Literal["reasoning", "text", "call"]


@dataclass(eq=False)
class ContentBlock:
    """One block; ``text`` is its content so far: of a call its arguments, a JSON object in a string."""

    index: int
    kind: Kind
    call_id: str = ""
    name: str = ""
    deltas: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)

    @property
    def text(self) -> str:
        return "".join(self.deltas)


class BlockStart(NamedTuple):
    """A block started. It may have text by the time that this is read: send it as empty."""

    block: ContentBlock


class BlockDelta(NamedTuple):
    """A block grew by ``text``, which may be empty where only ``logprobs`` arrived."""

    block: ContentBlock
    text: str
    logprobs: list[TokenLogprob]


class BlockStop(NamedTuple):
    block: ContentBlock


BlockEvent = BlockStart | BlockDelta | BlockStop


class AnswerBlocks:
    """The blocks so far; at most the last one is open."""

    def __init__(self) -> None:
        self.blocks: list[ContentBlock] = []
        self._open: ContentBlock | None = None
        self._call = -1  # the index, in its message, of the call that is open

    @classmethod
    def of(cls, message: ChatMessage, logprobs: list[TokenLogprob]) -> AnswerBlocks:
        """The blocks of a complete message."""
        blocks = cls()
        events = [blocks._add_text("reasoning", message.reasoning_content, []),
                   blocks._add_text("text", message.content, logprobs)]
        events += [blocks._add_call(index, call.id, call.function.name, call.function.arguments)
                    for index, call in enumerate(message.tool_calls or ())]
        for event in events:
            list(event)
        blocks.end()
        return blocks

    def add(self, delta: ChatDelta, logprobs: list[TokenLogprob]) -> list[BlockEvent]:
        """The events of one delta of a message."""
        events = [*self._add_text("reasoning", delta.reasoning_content, []),
                  *self._add_text("text", delta.content, logprobs)]
        for call in delta.tool_calls or ():
            events += self._add_call(call.index, call.id or "", call.function.name or "", call.function.arguments)
        return events

    def end(self) -> list[BlockEvent]:
        """Closes the open block of a complete message. An empty message is an empty text."""
        events = [] if self.blocks else [*self._start(ContentBlock(0, "text"))]
        return [*events, *self._close()]

    def _add_text(self, kind: Kind, text: str | UnsetType | None, logprobs: list[TokenLogprob]) -> Iterator[BlockEvent]:
        if not isinstance(text, str) or not (text or (logprobs and self._is_open(kind))):
            return
        if not self._is_open(kind):
            yield from self._start(ContentBlock(len(self.blocks), kind))
        yield self._grow(text, logprobs)

    def _add_call(self, index: int, call_id: str, name: str, arguments: str) -> Iterator[BlockEvent]:
        if not self._is_open("call") or index != self._call:
            self._call = index
            yield from self._start(ContentBlock(len(self.blocks), "call", call_id, name))
        if arguments:
            yield self._grow(arguments, [])

    def _is_open(self, kind: Kind) -> bool:
        return self._open is not None and self._open.kind == kind

    def _start(self, block: ContentBlock) -> Iterator[BlockEvent]:
        yield from self._close()
        self.blocks.append(block)
        self._open = block
        yield BlockStart(block)

    def _close(self) -> Iterator[BlockEvent]:
        if self._open is not None:
            yield BlockStop(self._open)
            self._open = None

    def _grow(self, text: str, logprobs: list[TokenLogprob]) -> BlockDelta:
        block = self._open
        assert block is not None
        block.deltas.append(text)
        block.logprobs += logprobs
        return BlockDelta(block, text, logprobs)
