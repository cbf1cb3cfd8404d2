"""Reasoning that begins an answer, between an opening and a closing word."""

from __future__ import annotations

from ..answer_parts import Part, Reader, Thought
from ..cursor import Cursor, Step
from .format import ReasoningFormat


def begins_inside(reasoning: ReasoningFormat, prompt: str) -> bool:
    """Whether an answer to ``prompt`` begins with reasoning that is already opened."""
    if prompt.rstrip().endswith(reasoning.opener):
        return True
    return reasoning.always and not begins_behind(reasoning, prompt)


def begins_behind(reasoning: ReasoningFormat, prompt: str) -> bool:
    """Whether ``prompt`` has closed the reasoning: templates open and close it where there shall be none."""
    return not reasoning.harmony and prompt.rstrip().endswith(reasoning.closer)


def goes_on_inside(reasoning: ReasoningFormat, begun: str) -> bool:
    """Whether an answer that has ``begun`` so goes on with reasoning."""
    return begun.rfind(reasoning.opener) > begun.rfind(reasoning.closer)


class ThinkReader:
    """A ``Reader`` of reasoning, which leaves all behind it to another one."""

    def __init__(self, reasoning: ReasoningFormat, rest: Reader, *, inside: bool, separate: bool = True,
                 stream: bool = True):
        """``inside``: see ``begins_inside``. Without ``separate`` reasoning is content, its markup too; without
        ``stream`` it is told in one piece when it ends."""
        self._format = reasoning
        self._rest = rest
        self._inside = inside
        self._separate = separate
        self._stream = stream
        self._cursor = Cursor()
        self._steps = self._read(self._cursor)
        self._thinking = True
        self._thought: list[str] = []
        self._end = 0

    @property
    def thought_spans(self) -> list[tuple[int, int]]:
        return [(0, self._end)] if self._end else []

    def push(self, text: str) -> list[Part]:
        if not self._thinking:
            return self._rest.push(text)
        cursor = self._cursor
        cursor.text += text
        try:
            next(self._steps)
        except StopIteration:
            self._thinking = False
            return [*self._told(), *self._rest.push(cursor.read + cursor.unread)]
        return self._told() if self._stream else []

    def finish(self) -> list[Part]:
        if self._thinking:
            self._cursor.ended = True
            return [*self.push(""), *self._rest.finish()]
        return self._rest.finish()

    def _told(self) -> list[Part]:
        """What became certain."""
        text, self._thought = "".join(self._thought), []
        if not text:
            return []
        return [Thought(text) if self._separate else text]

    def _read(self, cursor: Cursor) -> Step[None]:
        """Read the reasoning, and leave what follows it in the cursor."""
        yield from cursor.skip()
        opened = yield from cursor.take(self._format.opener)
        if not opened and not self._inside:
            return
        if not self._separate:
            self._thought.append(cursor.read)
            cursor.drop()
        else:
            yield from cursor.skip()
            cursor.drop()
        self._end = cursor.offset
        yield from cursor.until(self._format.closer, *self._format.interrupters, tell=self._think, trim=self._separate)
        if (yield from cursor.take(self._format.closer)) and not self._separate:
            self._thought.append(self._format.closer)
        self._end = cursor.offset
        if self._separate:
            yield from cursor.skip()
        cursor.drop()

    def _think(self, text: str) -> None:
        self._thought.append(text)
        self._end = self._cursor.offset


