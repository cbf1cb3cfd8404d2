"""What requests are called towards the engine: their own ids, or others where those may still be spoken of there."""

from __future__ import annotations

import itertools

_REMEMBERED = 4096


class RequestIds:
    """Nobody waits any more for a request that was abandoned, but what the engine had said of it before it knew is on
    its way. A client's own id may come again by then (its next attempt, or the router's): it goes by another name."""

    def __init__(self) -> None:
        self._abandoned: dict[str, None] = {}  # ids, the oldest first
        self._names: dict[str, str] = {}
        self.renamed: dict[str, str] = {}
        """Ids of the open requests that go by another name, by that."""
        self._numbers = itertools.count(1)

    def choose(self, rid: str) -> str:
        """The name of a new request, until it is ``dropped``."""
        if rid not in self._abandoned:
            return rid
        name = self._names[rid] = f"{rid}#{next(self._numbers)}"
        self.renamed[name] = rid
        return name

    def of(self, rid: str) -> str:
        return self._names.get(rid, rid)

    def rid(self, name: str) -> str:
        return self.renamed.get(name, name)

    def drop(self, name: str) -> str:
        """The request has ended; returns its id."""
        rid = self.renamed.pop(name, None)
        if rid is None:
            return name
        del self._names[rid]
        return rid

    def abandon(self, rid: str) -> None:
        """The engine may still speak of the request that had this id. The last few thousand are remembered: what it had
        said is here within milliseconds."""
        self._abandoned.pop(rid, None)
        self._abandoned[rid] = None
        if len(self._abandoned) > _REMEMBERED:
            del self._abandoned[next(iter(self._abandoned))]
