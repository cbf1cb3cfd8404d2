"""A few places that clients take in turns, so that nobody waits for all that another one has asked for."""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class FairSlots:
    """``places`` are taken at once. Who waits gets the next by client, in rotation; each client's own in order."""

    def __init__(self, places: int):
        self._free = places
        self._waiting: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()

    def num_waiting(self, client: str) -> int:
        return len(self._waiting.get(client, ()))

    @asynccontextmanager
    async def turn(self, client: str) -> AsyncIterator[None]:
        await self._take(client)
        try:
            yield
        finally:
            self._give_back()

    async def _take(self, client: str) -> None:
        if self._free:
            self._free -= 1
            return
        place = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(client, deque()).append(place)
        try:
            await place
        except asyncio.CancelledError:
            if place.done() and not place.cancelled():
                self._give_back()
            raise

    def _give_back(self) -> None:
        while self._waiting:
            client, places = self._waiting.popitem(last=False)
            place = places.popleft()
            if places:
                self._waiting[client] = places  # behind the others
            if not place.done():
                place.set_result(None)
                return
        self._free += 1
