"""Harmony, in which gpt-oss writes messages on channels: reasoning, tool calls and the answer in one format.

``<|channel|>analysis<|message|>...<|end|><|start|>assistant<|channel|>commentary to=functions.NAME
<|constrain|>json<|message|>{...}<|call|>``, and ``<|channel|>final<|message|>...<|return|>``. The prompt ends with
``<|start|>assistant``.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING

from .answer_parts import Part
from .cursor import Cursor, Step

if TYPE_CHECKING:
    from .tools.calls import Calls

AsPart = Callable[[str], Part]

START, CHANNEL, MESSAGE, CONSTRAIN = "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>"
END, CALL, RETURN = "<|end|>", "<|call|>", "<|return|>"
MARKERS = (START, CHANNEL, MESSAGE, CONSTRAIN, END, CALL, RETURN)
_BODY_ENDS = (END, CALL, RETURN, START, CHANNEL)
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_RECIPIENT = re.compile(r"\bto=([^\s<]+)")


class Harmony:
    """The script of one answer; ``thought_spans`` are where its analysis stands, in characters."""

    def __init__(self, *, with_calls: bool, as_part: AsPart | None, stream: bool = True):
        """Without ``with_calls`` the arguments of calls are content. ``as_part`` makes what is told of reasoning, None
        leaves it out; without ``stream`` it is told message by message."""
        self._with_calls = with_calls
        self._as_part = as_part
        self._stream = stream
        self._thought: list[str] = []
        self.thought_spans: list[tuple[int, int]] = []

    def read(self, cursor: Cursor, calls: Calls) -> Step[None]:
        yield from self._begun_header(cursor, calls)
        while opener := (yield from cursor.content(*MARKERS)):
            start = cursor.offset
            if opener not in (START, CHANNEL):  # what ended the message before
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

    def _begun_header(self, cursor: Cursor, calls: Calls) -> Step[None]:
        """The prompt ends within the first message's header, of which a recipient may be what comes next."""
        begin, start = cursor.pos, cursor.offset
        yield from cursor.skip()
        if not ((yield from cursor.take("to=")) and (yield from cursor.until(MESSAGE))):
            cursor.pos = begin
            return
        header = cursor.text[begin: cursor.pos]
        yield from cursor.take(MESSAGE)
        cursor.drop()
        yield from self._body(cursor, calls, header, start)

    def _body(self, cursor: Cursor, calls: Calls, header: str, start: int) -> Step[None]:
        channel = found[1] if (found := _CHANNEL.search(header)) else "final"
        recipient = found[1] if (found := _RECIPIENT.search(header)) else ""
        name = recipient.removeprefix("functions.")
        if name != recipient and self._with_calls:
            yield from self._call(cursor, calls, name)
        elif channel == "analysis":
            yield from self._reasoning(cursor, start)
        else:
            yield from cursor.until(*_BODY_ENDS, tell=cursor.tell)

    def _reasoning(self, cursor: Cursor, start: int) -> Step[None]:
        self.thought_spans.append((start, cursor.offset))

        def think(text: str) -> None:
            self.thought_spans[-1] = (start, cursor.offset)
            self._thought.append(text)
            if self._stream:
                self._tell(cursor)

        yield from cursor.until(*_BODY_ENDS, tell=think)
        self.thought_spans[-1] = (start, cursor.offset)
        self._tell(cursor)

    def _tell(self, cursor: Cursor) -> None:
        text, self._thought = "".join(self._thought), []
        if text and self._as_part is not None:
            cursor.tell(self._as_part(text))

    def _call(self, cursor: Cursor, calls: Calls, name: str) -> Step[None]:
        calls.begin(name)
        if not (yield from _any_text(cursor)):
            calls.arguments("{}")
        yield from cursor.until(*_BODY_ENDS, tell=calls.arguments)


def _any_text(cursor: Cursor) -> Step[bool]:
    """Whether a body has text before the marker that ends it."""
    yield from cursor.skip()
    for marker in _BODY_ENDS:
        at = cursor.pos
        if (yield from cursor.take(marker)):
            cursor.pos = at
            return False
    return bool(cursor.next)
