"""The answers of ``/v1/responses`` that this server stores in memory, within bounds.

An answer's id names the server that stores it, by a tag that is new with each start: a router finds the server by it,
and knows at once that an answer is lost with its server.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Iterator

from ...api.errors import NotFound, Overloaded

ID_PREFIX = "resp_"
TAG_CHARS = 12


class StoredResponse:
    """One answer: ``body`` is its response object, ``items`` the JSON array of its complete input.

    While ``task`` runs it in the background its ``body`` changes; ``events`` are those of its stream, each as sent, if
    it has one. ``changed`` is set, and replaced, whenever something is new.
    """

    def __init__(self, body: bytes, items: bytes, *, in_background: bool = False,
                 streams: bool = False):
        self.body = body
        self.items = items
        self.events: list[bytes] | None = [] if streams else None
        self.task: asyncio.Task[None] | None = None
        self.changed = asyncio.Event()
        self.in_background = in_background
        self.cancelled = False
        self._events_size = 0

    @property
    def running(self) -> bool:
        return self.task is not None

    @property
    def size(self) -> int:
        """Bytes."""
        return len(self.body) + len(self.items) + self._events_size

    def add_events(self, events: list[bytes]) -> None:
        if self.events is not None:
            self.events += events
            self._events_size += sum(map(len, events))
        self.notify()

    def notify(self) -> None:
        self.changed.set()
        self.changed = asyncio.Event()


class ResponseStore:
    """Stored answers by id, oldest first: those that have ended make room for new ones."""

    def __init__(self, max_entries: int, max_bytes: int):
        """``max_entries`` 0: nothing is stored."""
        self.tag = uuid.uuid4().hex[:TAG_CHARS]
        self.num_evicted = 0
        self._max_entries = max_entries
        self._max_bytes = max_bytes
        self.size = 0
        """Bytes of all entries, of running ones when they were put."""
        self._entries: dict[str, StoredResponse] = {}
        self._sizes: dict[str, int] = {}

    @property
    def enabled(self) -> bool:
        return self._max_entries > 0

    def __len__(self) -> int:
        return len(self._entries)

    def new_id(self) -> str:
        """An id that cannot be guessed and names this server."""
        return f"{ID_PREFIX}{self.tag}{uuid.uuid4().hex}"

    def get(self, name: str, param: str = "response_id") -> StoredResponse:
        """Raises NotFound."""
        entry = self._entries.get(name)
        if entry is None:
            raise NotFound(f"Response {name[:80]!r} is not stored here: it never was, it was deleted, it made room for "
                           "newer ones (--response-store-entries, --response-store-mb), or its server has left.",
                           param=param, code="response_not_found")
        return entry

    def check_room(self) -> None:
        """Raises Overloaded where only answers that still run are stored, and there is no room for one more."""
        running = [entry for entry in self._entries.values() if entry.running]
        if len(running) >= self._max_entries or sum(entry.size for entry in running) >= self._max_bytes:
            raise Overloaded("As many responses run in the background as are stored; see --response-store-entries and "
                             "--response-store-mb.", retry_after=1.0)

    def put(self, name: str, entry: StoredResponse) -> None:
        """Stores an entry, or what has become of it, and lets the oldest make room that have ended."""
        self._entries.setdefault(name, entry)
        self.size += entry.size - self._sizes.get(name, 0)
        self._sizes[name] = entry.size
        if len(self._entries) <= self._max_entries and self.size <= self._max_bytes:
            return
        for old in [name for name, entry in self._entries.items() if not entry.running]:
            if len(self._entries) <= self._max_entries and self.size <= self._max_bytes:
                return
            self.remove(old)
            self.num_evicted += 1

    def update(self, name: str, entry: StoredResponse) -> None:
        """Counts what an entry has become, unless it was removed."""
        if self._entries.get(name) is entry:
            self.put(name, entry)

    def remove(self, name: str) -> None:
        if self._entries.pop(name, None) is not None:
            self.size -= self._sizes.pop(name)

    def running(self) -> Iterator[StoredResponse]:
        return (entry for entry in list(self._entries.values()) if entry.running)
