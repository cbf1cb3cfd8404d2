"""Slots that clients share fairly: no client waits for all that another one has requested."""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class FairSlots:
    """``num_slots`` are in use at once. Waiting tasks get the next one by client, in rotation; a client's own in
    order."""

    def __init__(self, num_slots: int):
        self._free = num_slots
        self._waiting: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()

    def num_waiting(self, client: str) -> int:
        return len(self._waiting.get(client, ()))

    @asynccontextmanager
    async def slot(self, client: str) -> AsyncIterator[None]:
        """Waits for a slot, and uses it within the context."""
        await self._acquire(client)
        try:
            yield
        finally:
            self._release()

    async def _acquire(self, client: str) -> None:
        if self._free:
            self._free -= 1
            return
        waiter = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(client, deque()).append(waiter)
        try:
            await waiter
        except asyncio.CancelledError:
            if waiter.done() and not waiter.cancelled():
                self._release()
            raise

    def _release(self) -> None:
        while self._waiting:
            client, waiters = self._waiting.popitem(last=False)
            waiter = waiters.popleft()
            if waiters:
                self._waiting[client] = waiters  # after the other clients
            if not waiter.done():
                waiter.set_result(None)
                return
        self._free += 1
