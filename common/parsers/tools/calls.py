"""What a script tells of the calls it finds."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from ..answer_parts import Arguments, CallBegun
from ..cursor import Cursor

log = logging.getLogger("baton.front")

Schemas = Mapping[str, Mapping[str, Any]]
"""The offered tools: for each name the JSON schema of its arguments."""


class Calls:
    """Tells calls of tools that the request offers; as SGLang does, it leaves out calls of any other name."""

    def __init__(self, cursor: Cursor, schemas: Schemas, limit: int | None = None):
        """``limit``: further calls are left out."""
        self._cursor = cursor
        self._schemas = schemas
        self._limit = limit
        self._told = 0
        self._name = ""
        self._muted = False

    def offers(self, name: str) -> bool:
        return name in self._schemas

    def begin(self, name: str) -> None:
        """From here on what is read is a call, for better or worse."""
        self._cursor.drop()
        self._name = name
        self._muted = not self.offers(name) or self._told == self._limit
        if not self.offers(name):
            log.info("the model called %.80r, which the request does not offer", name)
        elif not self._muted:
            self._told += 1
            self._cursor.tell(CallBegun(name))

    def arguments(self, text: str) -> None:
        if text and not self._muted:
            self._cursor.tell(Arguments(text))

    def schema(self, key: str) -> Mapping[str, Any] | None:
        """The schema of one of the call's arguments, None where it is not declared."""
        found = (self._schemas.get(self._name) or {}).get("properties")
        schema = found.get(key) if isinstance(found, Mapping) else None
        return schema if isinstance(schema, Mapping) else None
