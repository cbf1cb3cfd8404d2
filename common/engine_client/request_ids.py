"""Request ids towards the engine: the client's own, or an alias where the engine may still report on an older one."""

from __future__ import annotations

import itertools

_MAX_ABANDONED = 4096


class RequestIds:
    """Maps client ids to engine ids.

    The client of an abandoned request waits for it no longer, but outputs that the engine sent before it received the
    abort may still arrive. A client's id may be reused by then (by its next attempt, or the router's): the new request
    gets another id towards the engine.
    """

    def __init__(self) -> None:
        self._abandoned: dict[str, None] = {}  # ids, the oldest first
        self._engine_ids: dict[str, str] = {}  # of aliased requests, by client id
        self.aliases: dict[str, str] = {}
        """Client ids of the open requests that have an alias, by engine id."""
        self._numbers = itertools.count(1)

    def assign(self, rid: str) -> str:
        """The engine id of a new request, until it is ``released``."""
        if rid not in self._abandoned:
            return rid
        engine_id = self._engine_ids[rid] = f"{rid}#{next(self._numbers)}"
        self.aliases[engine_id] = rid
        return engine_id

    def engine_id(self, rid: str) -> str:
        return self._engine_ids.get(rid, rid)

    def client_id(self, engine_id: str) -> str:
        return self.aliases.get(engine_id, engine_id)

    def release(self, engine_id: str) -> str:
        """Forget a request that has ended; returns its client id."""
        rid = self.aliases.pop(engine_id, None)
        if rid is None:
            return engine_id
        del self._engine_ids[rid]
        return rid

    def abandon(self, rid: str) -> None:
        """Record that the engine may still report on a request with this id. The last few thousand are remembered: such
        outputs arrive within milliseconds."""
        self._abandoned.pop(rid, None)
        self._abandoned[rid] = None
        if len(self._abandoned) > _MAX_ABANDONED:
            del self._abandoned[next(iter(self._abandoned))]
