"""Reading a text that arrives in pieces, as if all of it were there.

A *script* is a generator that reads through a ``Cursor`` and yields wherever it needs text that has not come. Its
decisions depend on the text alone, so they are the same however the text is cut.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator
from functools import lru_cache
from typing import TypeVar

from .answer_parts import Part

T = TypeVar("T")
Step = Generator[None, None, T]
Script = Callable[["Cursor"], Step[None]]

_SETTLED = 4096  # characters that are kept at most, or as many as are still of use


class Cursor:
    """``read`` is the text that is read but not settled: it is markup once ``drop`` is called, or else content."""

    def __init__(self) -> None:
        self.text = ""
        self.pos = 0
        self.ended = False
        self.parts: list[Part] = []
        self._start = 0  # of what is not settled
        self._offset = 0  # characters before ``text``
        self._space = ""  # told as content where the markup behind it turns out to be none
        self._trim = False  # white space that comes next belongs to markup

    @property
    def offset(self) -> int:
        """Characters read since the beginning."""
        return self._offset + self.pos

    @property
    def next(self) -> str:
        """The next character, empty where it is not there yet."""
        return self.text[self.pos: self.pos + 1]

    @property
    def read(self) -> str:
        return self.text[self._start: self.pos]

    @property
    def unread(self) -> str:
        return self.text[self.pos:]

    def tell(self, part: Part) -> None:
        self.parts.append(part)

    def drop(self) -> None:
        """What is read was markup, and so is the white space around it. Positions kept from before are void."""
        self._settle()
        self._space, self._trim = "", True

    def to_content(self) -> None:
        """What is read was content after all."""
        content = self._space + self.read
        trim = self._trim and not content
        if content:
            self.tell(content)
        self.drop()
        self._trim = trim

    def _settle(self) -> None:
        self._start = self.pos
        if self._start > _SETTLED and self._start > len(self.text) // 2:
            self._offset += self._start
            self.text = self.text[self._start:]
            self._start = self.pos = 0

    def before(self, end: int, *markers: str) -> int:
        """The first position at or behind ``pos`` where one of ``markers`` stands or may begin before ``end``; ``end``
        where none does."""
        found = _any_of(markers).search(self.text, self.pos, end)
        return found.start() if found is not None else end - _begun(self.text[:end], markers, self.pos)

    # ------------------------------------------------------------------ steps; all wait for the text they need

    def more(self) -> Step[bool]:
        """Wait for more text; False where none will come."""
        size = len(self.text)
        while len(self.text) == size and not self.ended:
            yield
        return len(self.text) > size

    def skip(self, chars: str = " \t\r\n") -> Step[None]:
        """Read any of ``chars``."""
        while True:
            while self.next and self.next in chars:
                self.pos += 1
            if self.next or not (yield from self.more()):
                return

    def take(self, literal: str) -> Step[bool]:
        """Read ``literal`` if it comes next."""
        while len(self.text) - self.pos < len(literal):
            if not literal.startswith(self.unread) or not (yield from self.more()):
                return False
        if not self.text.startswith(literal, self.pos):
            return False
        self.pos += len(literal)
        return True

    def run(self, pattern: re.Pattern[str]) -> Step[str]:
        """Read the characters that come next and match ``pattern``, a repeated class of characters."""
        start = self.pos
        while True:
            self.pos = pattern.match(self.text, self.pos).end()  # type: ignore[union-attr]
            if self.pos < len(self.text) or not (yield from self.more()):
                return self.text[start: self.pos]

    def until(self, *markers: str, tell: Callable[[str], object] | None = None, trim: bool = True) -> Step[str | None]:
        """Read up to the first of ``markers``, which comes next then; None where none comes before the end.

        ``tell`` gets the text in pieces as it becomes certain, and what is told is settled; with ``trim`` it lacks the
        white space before the marker.
        """
        pattern, searched = _any_of(markers), self.pos
        while True:
            found = pattern.search(self.text, searched)
            if found is not None:
                self._pass(found.start(), tell, trim)
                return found[0]
            searched = max(self.pos, len(self.text) - _begun(self.text, markers, self.pos))
            if tell is not None:
                self._pass_certain(searched, tell, trim)
                searched = self.pos
            if not (yield from self.more()):
                self._pass(len(self.text), tell, trim)
                return None

    def _pass(self, end: int, tell: Callable[[str], object] | None, trim: bool) -> None:
        """Read up to ``end``, where a marker or the text's end stands."""
        piece = self.text[self.pos: end] if tell is not None else ""
        self.pos = end
        if tell is not None:
            if piece := piece.rstrip() if trim else piece:
                tell(piece)
            self.drop()

    def _pass_certain(self, end: int, tell: Callable[[str], object], trim: bool) -> None:
        """Read up to ``end``, or to the white space before it."""
        piece = self.text[self.pos: end]
        piece = piece.rstrip() if trim else piece
        self._pass(self.pos + len(piece), tell, False)

    def content(self, *openers: str) -> Step[str | None]:
        """Tell content up to the first of ``openers``, which comes next then; None where the text ends before."""
        pattern = _any_of(openers)
        while True:
            if self._trim:
                yield from self.skip()
                self.drop()
                self._trim = not self.next
            found = pattern.search(self.text, self.pos) if openers else None
            if found is not None:
                before = self.text[self.pos: found.start()]
                self._tell_content(before.rstrip())
                self._space = before[len(before.rstrip()):]
                self.pos += len(self._space)
                self._settle()
                return found[0]
            if self.ended:
                self._tell_content(self.unread)
                return None
            certain = len(self.text) - _begun(self.text, openers, self.pos)
            self._tell_content(self.text[self.pos: certain].rstrip())
            yield from self.more()

    def _tell_content(self, piece: str) -> None:
        if piece:
            self.tell(piece)
            self.pos += len(piece)
            self._settle()


@lru_cache(maxsize=256)
def _any_of(markers: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile("|".join(map(re.escape, markers)))


def _begun(text: str, markers: tuple[str, ...], start: int) -> int:
    """Characters at the end of ``text[start:]`` that may become a marker."""
    longest = max(map(len, markers), default=1)
    for at in range(max(start, len(text) - longest + 1), len(text)):
        tail = text[at:]
        if any(marker.startswith(tail) for marker in markers):
            return len(tail)
    return 0


class ScriptReader:
    """A ``Reader`` that runs a script; what the script leaves unread is content."""

    def __init__(self, script: Script):
        self._cursor = Cursor()
        self._steps = script(self._cursor)
        self._running = True

    def push(self, text: str) -> list[Part]:
        cursor = self._cursor
        cursor.text += text
        if self._running:
            try:
                next(self._steps)
            except StopIteration:
                self._running = False
        if not self._running:
            cursor.pos = len(cursor.text)
            cursor.to_content()
        parts, cursor.parts = cursor.parts, []
        return parts

    def finish(self) -> list[Part]:
        self._cursor.ended = True
        return self.push("")

    @property
    def thought_spans(self) -> list[tuple[int, int]]:
        return []


class Plain:
    """A ``Reader`` of text that is nothing but content."""

    thought_spans: list[tuple[int, int]] = []

    def push(self, text: str) -> list[Part]:
        return [text] if text else []

    def finish(self) -> list[Part]:
        return []
