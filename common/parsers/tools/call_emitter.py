"""The tool calls that a script finds, checked against the offered tools and emitted."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from ..cursor import Cursor
from ..output_parser import ToolArgumentsDelta, ToolCallStart

log = logging.getLogger("baton.server")

Schemas = Mapping[str, Mapping[str, Any]]
"""The offered tools: the JSON schema of the arguments, by tool name."""


class CallEmitter:
    """Emits calls of tools that the request offers; like SGLang, it drops calls of any other name."""

    def __init__(self, cursor: Cursor, schemas: Schemas, limit: int | None = None):
        """``limit``: further calls are dropped."""
        self._cursor = cursor
        self._schemas = schemas
        self._limit = limit
        self._num_emitted = 0
        self._name = ""
        self._muted = False

    def offers(self, name: str) -> bool:
        return name in self._schemas

    def begin(self, name: str) -> None:
        """Begins a call: the read text is its markup, and what follows belongs to the call."""
        self._cursor.drop()
        self._name = name
        self._muted = not self.offers(name) or self._num_emitted == self._limit
        if not self.offers(name):
            log.info("the model called %.80r, which the request does not offer", name)
        elif not self._muted:
            self._num_emitted += 1
            self._cursor.emit(ToolCallStart(name))

    def arguments(self, text: str) -> None:
        if text and not self._muted:
            self._cursor.emit(ToolArgumentsDelta(text))

    def schema(self, key: str) -> Mapping[str, Any] | None:
        """The schema of one of the call's arguments, None where it is not declared."""
        properties = (self._schemas.get(self._name) or {}).get("properties")
        schema = properties.get(key) if isinstance(properties, Mapping) else None
        return schema if isinstance(schema, Mapping) else None
