"""What an operator should read once, and not with every request that meets with it."""

from __future__ import annotations

from collections import deque
from typing import Any, NamedTuple

from .expiring import MAX_WAITING


class Warn(NamedTuple):
    """Log a warning."""

    text: str


class Notices:
    """Asks for each warning once, as one of a core's ``effects``."""

    def __init__(self, effects: deque[Any]):
        self._effects = effects
        self._given: dict[str, None] = {}

    def warn(self, text: str) -> None:
        if text in self._given:
            return
        self._given[text] = None
        self._effects.append(Warn(text))
        if len(self._given) > MAX_WAITING:
            del self._given[next(iter(self._given))]
