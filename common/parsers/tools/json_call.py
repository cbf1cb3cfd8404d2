"""Parsing of calls that are JSON objects, or whose arguments are."""

from __future__ import annotations

import json
from collections.abc import Callable

from ..cursor import Cursor, Step
from ..json_scanner import JsonScanner
from .call_emitter import CallEmitter

_NAME, _ARGUMENTS = "name", ("arguments", "parameters")


Script = Callable[[Cursor, CallEmitter], Step[None]]


def section_script(all_begin: str, all_end: str, begin: str,
                   call: Callable[[Cursor, CallEmitter], Step[bool]]) -> Script:
    """The script of a format whose calls are in a section from ``all_begin`` to ``all_end``.

    ``call`` reads one call after its ``begin``; False where there is none: what it read is content then.
    """
    def read(cursor: Cursor, calls: CallEmitter) -> Step[None]:
        while opener := (yield from cursor.content(all_begin, all_end, begin)):
            yield from cursor.take(opener)
            if opener == begin and not (yield from call(cursor, calls)):
                cursor.to_content()
            else:
                cursor.drop()

    return read


def json_object(cursor: Cursor) -> Step[bool]:
    """True where a JSON object comes next, after white space (which is read)."""
    yield from cursor.skip()
    return cursor.next == "{"


def json_arguments(cursor: Cursor, calls: CallEmitter, *ends: str) -> Step[None]:
    """Emits the object that comes next in deltas.

    Where it stops being JSON, the rest up to one of ``ends`` is emitted as the model wrote it: the call has begun, and
    only the client can use the rest. An end within a string is part of it only where the object ends as JSON: an
    unclosed string must not swallow the markup, the answer and the calls that follow.
    """
    scanner, markers = JsonScanner(), [end for end in ends if len(end) > 1]
    ahead = 0  # characters that are scanned and not emitted
    while True:
        end = scanner.feed(cursor.text, cursor.pos + ahead)
        certain = end if scanner.done or not markers else cursor.before(end, *markers)
        calls.arguments(cursor.text[cursor.pos: certain])
        ahead, cursor.pos = end - certain, certain
        cursor.drop()
        if scanner.done:
            return
        if scanner.wrong:
            yield from cursor.until(*ends, emit=calls.arguments)
            return
        if not (yield from cursor.more()):
            yield from cursor.until(*ends, emit=calls.arguments)
            return


def _value(cursor: Cursor) -> Step[str | None]:
    """The JSON value that comes next, None where it is cut off."""
    scanner = JsonScanner()
    start = cursor.pos
    while True:
        cursor.pos = scanner.feed(cursor.text, cursor.pos)
        if scanner.done:
            return cursor.text[start: cursor.pos]
        if scanner.wrong or not (yield from cursor.more()):
            return None


class _Envelope:
    """``{"name": ..., "arguments": {...}}`` with the keys in any order; see ``envelope``."""

    def __init__(self, cursor: Cursor, calls: CallEmitter, ends: tuple[str, ...], any_name: bool):
        self._cursor = cursor
        self._calls = calls
        self._ends = ends
        self._any_name = any_name
        self._name: str | None = None
        self._early_arguments: str | None = None  # those that precede the name
        self.begun = False

    def read(self) -> Step[bool]:
        cursor = self._cursor
        cursor.pos += 1
        while True:
            yield from cursor.skip()
            if cursor.next == "}":
                cursor.pos += 1
                return self.begun or self._begin_without_rest()
            key = (yield from _value(cursor)) if cursor.next == '"' else None
            yield from cursor.skip()
            if key is None or not (yield from cursor.take(":")):
                return (yield from self._broken())
            if not (yield from self._member(json.loads(key))):
                return (yield from self._broken())
            yield from cursor.skip()
            if cursor.next == ",":
                cursor.pos += 1
            elif cursor.next != "}":
                return (yield from self._broken())

    def _broken(self) -> Step[bool]:
        """Text after a call's arguments that is not JSON is content; without a call, all of it is."""
        if self.begun:
            yield from self._cursor.until(*self._ends)
            if self._cursor.read.strip():
                self._cursor.to_content()
        return self.begun

    def _member(self, key: str) -> Step[bool]:
        """Reads one value; False where it cannot belong to a call."""
        cursor = self._cursor
        is_arguments = key in _ARGUMENTS and not self.begun
        if is_arguments and self._name is not None and (yield from json_object(cursor)):
            self._begin()
            yield from json_arguments(cursor, self._calls, *self._ends)
            return True
        yield from cursor.skip()
        text = yield from _value(cursor)
        if text is None:
            return False
        if key == _NAME and not self.begun:
            self._name = json.loads(text) if text.startswith('"') else None
            return self._name is not None and self._acceptable()
        if is_arguments:
            self._early_arguments = _object_in(text)
            return self._early_arguments is not None
        return True

    def _acceptable(self) -> bool:
        return self._any_name or self._calls.offers(self._name or "")

    def _begin(self) -> None:
        assert self._name is not None
        self._calls.begin(self._name)
        self.begun = True

    def _begin_without_rest(self) -> bool:
        """Begins the call at the envelope's end, where its arguments are missing, or are no object."""
        if self._name is None:
            return False
        self._begin()
        self._calls.arguments(self._early_arguments or "{}")
        return True


def _object_in(text: str) -> str | None:
    """The object that a JSON value is, or holds as a string (null means an empty one); None for any other value."""
    if text.startswith('"'):
        text = json.loads(text).strip()
    if text == "null":
        return "{}"
    try:
        return text if isinstance(json.loads(text), dict) else None
    except (ValueError, RecursionError):
        return None


def envelope(cursor: Cursor, calls: CallEmitter, *ends: str, any_name: bool = True) -> Step[bool]:
    """Emits the call that the next object describes; False where it describes none (nothing is emitted then).

    Without ``any_name`` an object that names no offered tool describes none. ``ends``: see ``json_arguments``.
    """
    if not (yield from json_object(cursor)):
        return False
    return (yield from _Envelope(cursor, calls, ends, any_name).read())
