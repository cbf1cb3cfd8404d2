"""Harmony, gpt-oss's format of messages on channels: reasoning, tool calls and the answer.

``<|channel|>analysis<|message|>...<|end|><|start|>assistant<|channel|>commentary to=functions.NAME
<|constrain|>json<|message|>{...}<|call|>``, and ``<|channel|>final<|message|>...<|return|>``. The prompt ends with
``<|start|>assistant``.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING

from .cursor import Cursor, Step
from .output_parser import OutputDelta

if TYPE_CHECKING:
    from .tools.call_emitter import CallEmitter

AsPart = Callable[[str], OutputDelta]

START, CHANNEL, MESSAGE, CONSTRAIN = "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>"
END, CALL, RETURN = "<|end|>", "<|call|>", "<|return|>"
MARKERS = (START, CHANNEL, MESSAGE, CONSTRAIN, END, CALL, RETURN)
_BODY_ENDS = (END, CALL, RETURN, START, CHANNEL)
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_RECIPIENT = re.compile(r"\bto=([^\s<]+)")


class Harmony:
    """The script of one answer; ``reasoning_spans`` are the spans of its analysis, in characters."""

    def __init__(self, *, with_calls: bool, as_part: AsPart | None, stream: bool = True):
        """Without ``with_calls`` the arguments of calls are content. ``as_part`` makes the parts of reasoning, None
        drops it; without ``stream`` it is emitted message by message."""
        self._with_calls = with_calls
        self._as_part = as_part
        self._stream = stream
        self._reasoning_text: list[str] = []
        self.reasoning_spans: list[tuple[int, int]] = []

    def read(self, cursor: Cursor, calls: CallEmitter) -> Step[None]:
        yield from self._begun_header(cursor, calls)
        while opener := (yield from cursor.content(*MARKERS)):
            start = cursor.offset
            if opener not in (START, CHANNEL):  # the end of the message before
                yield from cursor.take(opener)
                cursor.drop()
                continue
            header_start = cursor.pos
            if not (yield from cursor.until(MESSAGE)):
                cursor.drop()
                return
            header = cursor.text[header_start: cursor.pos]
            yield from cursor.take(MESSAGE)
            cursor.drop()
            yield from self._body(cursor, calls, header, start)

    def _begun_header(self, cursor: Cursor, calls: CallEmitter) -> Step[None]:
        """Reads the rest of the first message's header, in which the prompt ends: a recipient may come next."""
        begin, start = cursor.pos, cursor.offset
        yield from cursor.skip()
        if not ((yield from cursor.take("to=")) and (yield from cursor.until(MESSAGE))):
            cursor.pos = begin
            return
        header = cursor.text[begin: cursor.pos]
        yield from cursor.take(MESSAGE)
        cursor.drop()
        yield from self._body(cursor, calls, header, start)

    def _body(self, cursor: Cursor, calls: CallEmitter, header: str, start: int) -> Step[None]:
        channel = match[1] if (match := _CHANNEL.search(header)) else "final"
        recipient = match[1] if (match := _RECIPIENT.search(header)) else ""
        name = recipient.removeprefix("functions.")
        if name != recipient and self._with_calls:
            yield from self._call(cursor, calls, name)
        elif channel == "analysis":
            yield from self._reasoning(cursor, start)
        else:
            yield from cursor.until(*_BODY_ENDS, emit=cursor.emit)

    def _reasoning(self, cursor: Cursor, start: int) -> Step[None]:
        self.reasoning_spans.append((start, cursor.offset))

        def think(text: str) -> None:
            self.reasoning_spans[-1] = (start, cursor.offset)
            self._reasoning_text.append(text)
            if self._stream:
                self._emit(cursor)

        yield from cursor.until(*_BODY_ENDS, emit=think)
        self.reasoning_spans[-1] = (start, cursor.offset)
        self._emit(cursor)

    def _emit(self, cursor: Cursor) -> None:
        text, self._reasoning_text = "".join(self._reasoning_text), []
        if text and self._as_part is not None:
            cursor.emit(self._as_part(text))

    def _call(self, cursor: Cursor, calls: CallEmitter, name: str) -> Step[None]:
        calls.begin(name)
        if not (yield from _any_text(cursor)):
            calls.arguments("{}")
        yield from cursor.until(*_BODY_ENDS, emit=calls.arguments)


def _any_text(cursor: Cursor) -> Step[bool]:
    """True where a body has text before the marker that ends it."""
    yield from cursor.skip()
    for marker in _BODY_ENDS:
        at = cursor.pos
        if (yield from cursor.take(marker)):
            cursor.pos = at
            return False
    return bool(cursor.next)
