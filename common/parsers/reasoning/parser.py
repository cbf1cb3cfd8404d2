"""Reasoning at the beginning of an answer, between an opening and a closing marker."""

from __future__ import annotations

from ..cursor import Cursor, Step
from ..output_parser import OutputDelta, OutputParser, ReasoningDelta
from .format import ReasoningFormat


def begins_inside(reasoning: ReasoningFormat, prompt: str) -> bool:
    """True where an answer to ``prompt`` begins within reasoning that is already opened."""
    if prompt.rstrip().endswith(reasoning.opener):
        return True
    return reasoning.always and not begins_after(reasoning, prompt)


def begins_after(reasoning: ReasoningFormat, prompt: str) -> bool:
    """True where ``prompt`` has closed the reasoning: templates open and close it to suppress it."""
    return not reasoning.harmony and prompt.rstrip().endswith(reasoning.closer)


def continues_inside(reasoning: ReasoningFormat, begun: str) -> bool:
    """True where an answer that begins with the text ``begun`` continues with reasoning."""
    return begun.rfind(reasoning.opener) > begun.rfind(reasoning.closer)


class ReasoningParser:
    """A ``OutputParser`` of reasoning, which passes the text that follows to another one."""

    def __init__(self, reasoning: ReasoningFormat, rest: OutputParser, *, inside: bool, separate: bool = True,
                 stream: bool = True):
        """``inside``: see ``begins_inside``. Without ``separate`` reasoning is content, its markup too; without
        ``stream`` it is emitted at once when it ends."""
        self._format = reasoning
        self._rest = rest
        self._inside = inside
        self._separate = separate
        self._stream = stream
        self._cursor = Cursor()
        self._steps = self._read(self._cursor)
        self._thinking = True
        self._reasoning_text: list[str] = []
        self._end = 0

    @property
    def reasoning_spans(self) -> list[tuple[int, int]]:
        return [(0, self._end)] if self._end else []

    def push(self, text: str) -> list[OutputDelta]:
        if not self._thinking:
            return self._rest.push(text)
        cursor = self._cursor
        cursor.text += text
        try:
            next(self._steps)
        except StopIteration:
            self._thinking = False
            return [*self._take_reasoning(), *self._rest.push(cursor.read + cursor.unread)]
        return self._take_reasoning() if self._stream else []

    def finish(self) -> list[OutputDelta]:
        if self._thinking:
            self._cursor.ended = True
            return [*self.push(""), *self._rest.finish()]
        return self._rest.finish()

    def _take_reasoning(self) -> list[OutputDelta]:
        """The reasoning that became certain."""
        text, self._reasoning_text = "".join(self._reasoning_text), []
        if not text:
            return []
        return [ReasoningDelta(text) if self._separate else text]

    def _read(self, cursor: Cursor) -> Step[None]:
        """Reads the reasoning, and leaves the text that follows it in the cursor."""
        yield from cursor.skip()
        opened = yield from cursor.take(self._format.opener)
        if not opened and not self._inside:
            return
        if not self._separate:
            self._reasoning_text.append(cursor.read)
            cursor.drop()
        else:
            yield from cursor.skip()
            cursor.drop()
        self._end = cursor.offset
        yield from cursor.until(self._format.closer, *self._format.interrupters, emit=self._think, trim=self._separate)
        if (yield from cursor.take(self._format.closer)) and not self._separate:
            self._reasoning_text.append(self._format.closer)
        self._end = cursor.offset
        if self._separate:
            yield from cursor.skip()
        cursor.drop()

    def _think(self, text: str) -> None:
        self._reasoning_text.append(text)
        self._end = self._cursor.offset


