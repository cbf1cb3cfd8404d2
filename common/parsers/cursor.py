"""Incremental parsing of a text that arrives in deltas, written as if the complete text were there.

A *script* is a generator that reads through a ``Cursor`` and yields wherever it needs text that has not arrived. Its
decisions depend on the text alone, so they are the same however the text is split.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator
from functools import lru_cache
from typing import TypeVar

from .output_parser import OutputDelta

T = TypeVar("T")
Step = Generator[None, None, T]
Script = Callable[["Cursor"], Step[None]]

_MAX_SETTLED_CHARS = 4096  # of settled text that are retained, or as many as are not settled yet


class Cursor:
    """A position in the text so far. ``read`` is the text that is read but not settled: markup once ``drop`` is called,
    content once ``to_content`` is."""

    def __init__(self) -> None:
        self.text = ""
        self.pos = 0
        self.ended = False
        self.parts: list[OutputDelta] = []
        self._start = 0  # of the text that is not settled
        self._offset = 0  # characters before ``text``
        self._space = ""  # emitted as content where the markup that follows it turns out to be none
        self._trim = False  # whether the next white space belongs to markup

    @property
    def offset(self) -> int:
        """Characters read since the beginning."""
        return self._offset + self.pos

    @property
    def next(self) -> str:
        """The next character, empty where it has not arrived."""
        return self.text[self.pos: self.pos + 1]

    @property
    def read(self) -> str:
        return self.text[self._start: self.pos]

    @property
    def unread(self) -> str:
        return self.text[self.pos:]

    def emit(self, part: OutputDelta) -> None:
        self.parts.append(part)

    def drop(self) -> None:
        """Settles the read text, and the white space around it, as markup. Earlier positions become invalid."""
        self._settle()
        self._space, self._trim = "", True

    def to_content(self) -> None:
        """Settles the read text as content."""
        content = self._space + self.read
        trim = self._trim and not content
        if content:
            self.emit(content)
        self.drop()
        self._trim = trim

    def _settle(self) -> None:
        self._start = self.pos
        if self._start > _MAX_SETTLED_CHARS and self._start > len(self.text) // 2:
            self._offset += self._start
            self.text = self.text[self._start:]
            self._start = self.pos = 0

    def before(self, end: int, *markers: str) -> int:
        """The first position from ``pos`` on where one of ``markers`` begins, or may begin before ``end``; ``end``
        where none does."""
        match = _any_of(markers).search(self.text, self.pos, end)
        return match.start() if match is not None else end - _begun(self.text[:end], markers, self.pos)

    # ------------------------------------------------------------------ steps; all wait for the text that they need

    def more(self) -> Step[bool]:
        """Waits for more text; False at the text's end."""
        size = len(self.text)
        while len(self.text) == size and not self.ended:
            yield
        return len(self.text) > size

    def skip(self, chars: str = " \t\r\n") -> Step[None]:
        """Reads any of ``chars``."""
        while True:
            while self.next and self.next in chars:
                self.pos += 1
            if self.next or not (yield from self.more()):
                return

    def take(self, literal: str) -> Step[bool]:
        """Reads ``literal`` if it comes next."""
        while len(self.text) - self.pos < len(literal):
            if not literal.startswith(self.unread) or not (yield from self.more()):
                return False
        if not self.text.startswith(literal, self.pos):
            return False
        self.pos += len(literal)
        return True

    def run(self, pattern: re.Pattern[str]) -> Step[str]:
        """Reads the next characters that match ``pattern``, a repeated class of characters."""
        start = self.pos
        while True:
            self.pos = pattern.match(self.text, self.pos).end()  # type: ignore[union-attr]
            if self.pos < len(self.text) or not (yield from self.more()):
                return self.text[start: self.pos]

    def until(self, *markers: str, emit: Callable[[str], object] | None = None, trim: bool = True) -> Step[str | None]:
        """Reads up to the first of ``markers``, which comes next then; None where the text ends before one.

        ``emit`` gets the text in deltas as it becomes certain, and emitted text is settled; with ``trim`` it lacks the
        white space before the marker.
        """
        pattern, searched = _any_of(markers), self.pos
        while True:
            match = pattern.search(self.text, searched)
            if match is not None:
                self._pass(match.start(), emit, trim)
                return match[0]
            searched = max(self.pos, len(self.text) - _begun(self.text, markers, self.pos))
            if emit is not None:
                self._pass_certain(searched, emit, trim)
                searched = self.pos
            if not (yield from self.more()):
                self._pass(len(self.text), emit, trim)
                return None

    def _pass(self, end: int, emit: Callable[[str], object] | None, trim: bool) -> None:
        """Reads up to ``end``, where a marker or the text's end is."""
        text = self.text[self.pos: end] if emit is not None else ""
        self.pos = end
        if emit is not None:
            if text := text.rstrip() if trim else text:
                emit(text)
            self.drop()

    def _pass_certain(self, end: int, emit: Callable[[str], object], trim: bool) -> None:
        """Reads up to ``end``, or to the white space before it."""
        text = self.text[self.pos: end]
        text = text.rstrip() if trim else text
        self._pass(self.pos + len(text), emit, False)

    def content(self, *openers: str) -> Step[str | None]:
        """Emits content up to the first of ``openers``, which comes next then; None where the text ends before one."""
        pattern = _any_of(openers)
        while True:
            if self._trim:
                yield from self.skip()
                self.drop()
                self._trim = not self.next
            match = pattern.search(self.text, self.pos) if openers else None
            if match is not None:
                before = self.text[self.pos: match.start()]
                self._emit_content(before.rstrip())
                self._space = before[len(before.rstrip()):]
                self.pos += len(self._space)
                self._settle()
                return match[0]
            if self.ended:
                self._emit_content(self.unread)
                return None
            certain = len(self.text) - _begun(self.text, openers, self.pos)
            self._emit_content(self.text[self.pos: certain].rstrip())
            yield from self.more()

    def _emit_content(self, text: str) -> None:
        if text:
            self.emit(text)
            self.pos += len(text)
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


class ScriptParser:
    """A ``Reader`` that runs a script; text that the script leaves unread is content."""

    def __init__(self, script: Script):
        self._cursor = Cursor()
        self._steps = script(self._cursor)
        self._running = True

    def push(self, text: str) -> list[OutputDelta]:
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

    def finish(self) -> list[OutputDelta]:
        self._cursor.ended = True
        return self.push("")

    @property
    def reasoning_spans(self) -> list[tuple[int, int]]:
        return []


class PlainParser:
    """A ``Reader`` that takes all text as content."""

    reasoning_spans: list[tuple[int, int]] = []

    def push(self, text: str) -> list[OutputDelta]:
        return [text] if text else []

    def finish(self) -> list[OutputDelta]:
        return []
