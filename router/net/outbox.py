"""What one turn of the event loop has to say, said at its end.

A write wakes its reader. Where both share a host, a reader that sleeps is woken by an interrupt of its core: that costs
the writer more than the write itself; and it sleeps again before the next write, if the work for another request lies
between the two. Writes that follow each other directly find it awake: with 64 requests in flight a router spends a
tenth less of its time. A single request waits for nothing but the end of its own turn.
"""

from __future__ import annotations

import asyncio

Bytes = bytes | bytearray | memoryview


class Outbox:
    """Keeps the order of what is put in. All writes to a transport go through one outbox, or none."""

    __slots__ = ("_loop", "_waiting", "_due")

    def __init__(self, loop: asyncio.AbstractEventLoop):
        self._loop = loop
        self._waiting: list[tuple[asyncio.WriteTransport, bytes | tuple[Bytes, ...]]] = []
        self._due = False

    def put(self, transport: asyncio.WriteTransport, data: bytes | tuple[Bytes, ...]) -> None:
        """Write ``data``, or these pieces of it, at the end of this turn, unless the transport is closed by then."""
        if not self._due:
            self._due = True
            self._loop.call_soon(self._end_turn)
        self._waiting.append((transport, data))

    def flush(self) -> None:
        """Write what waits at once: before its transport is closed, or is told that this was all."""
        waiting, self._waiting = self._waiting, []
        for transport, data in waiting:
            if transport.is_closing():
                continue
            if type(data) is tuple:
                transport.writelines(data)
            else:
                transport.write(data)  # type: ignore[arg-type]

    def close(self, transport: asyncio.WriteTransport) -> None:
        """Close a transport when all that was put in for it is out."""
        if self._waiting:
            self.flush()
        transport.close()

    def _end_turn(self) -> None:
        self._due = False
        self.flush()
