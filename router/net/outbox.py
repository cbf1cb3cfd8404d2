"""Writes of one iteration of the event loop, collected and made at its end.

A write wakes its reader. If both share a host, a sleeping reader is woken by an interrupt of its core, which costs the
writer more than the write itself; and the reader sleeps again before the next write, if the work for another request
comes between the two. Writes that follow each other directly find it awake: with 64 requests in flight a router spends
a tenth less of its time. A single request waits for nothing but the end of its own iteration.
"""

from __future__ import annotations

import asyncio

Bytes = bytes | bytearray | memoryview


class Outbox:
    """A queue of writes, made in order. All writes to a transport go through one outbox, or none."""

    __slots__ = ("_loop", "_queue", "_scheduled")

    def __init__(self, loop: asyncio.AbstractEventLoop):
        self._loop = loop
        self._queue: list[tuple[asyncio.WriteTransport, bytes | tuple[Bytes, ...]]] = []
        self._scheduled = False

    def put(self, transport: asyncio.WriteTransport, data: bytes | tuple[Bytes, ...]) -> None:
        """Write ``data``, or its parts, at the end of this iteration, unless the transport is closed by then."""
        if not self._scheduled:
            self._scheduled = True
            self._loop.call_soon(self._end_iteration)
        self._queue.append((transport, data))

    def flush(self) -> None:
        """Make all queued writes now: before a transport is closed, or its sending side ends."""
        queue, self._queue = self._queue, []
        for transport, data in queue:
            if transport.is_closing():
                continue
            if type(data) is tuple:
                transport.writelines(data)
            else:
                transport.write(data)  # type: ignore[arg-type]

    def close(self, transport: asyncio.WriteTransport) -> None:
        """Close a transport after all writes that were queued for it."""
        if self._queue:
            self.flush()
        transport.close()

    def _end_iteration(self) -> None:
        self._scheduled = False
        self.flush()
