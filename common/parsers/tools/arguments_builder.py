"""The JSON of a call's arguments, built one key at a time."""

from __future__ import annotations

from .call_emitter import CallEmitter
from .values import quoted


class ArgumentsBuilder:
    """Emits ``{"key": value, ...}`` while the keys and values arrive."""

    def __init__(self, calls: CallEmitter):
        self._calls = calls
        self._opened = False

    def key(self, key: str) -> None:
        self._calls.arguments(f"{', ' if self._opened else '{'}{quoted(key)}: ")
        self._opened = True

    def value(self, text: str) -> None:
        """``text`` is JSON."""
        self._calls.arguments(text)

    def string_delta(self, text: str) -> None:
        """A delta of a string's content, unescaped."""
        self._calls.arguments(quoted(text)[1:-1])

    def close(self) -> None:
        self._calls.arguments("}" if self._opened else "{}")
