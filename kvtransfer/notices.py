"""Warnings that are logged once, not with every request that runs into them."""

from __future__ import annotations

from collections import deque
from typing import Any, NamedTuple

from .expiring import MAX_WAITING


class Warn(NamedTuple):
    """Asks to log a warning."""

    text: str


class Notices:
    """Asks for each warning once, through a core's ``effects``."""

    def __init__(self, effects: deque[Any]):
        self._effects = effects
        self._logged: dict[str, None] = {}

    def warn(self, text: str) -> None:
        if text in self._logged:
            return
        self._logged[text] = None
        self._effects.append(Warn(text))
        if len(self._logged) > MAX_WAITING:
            del self._logged[next(iter(self._logged))]
