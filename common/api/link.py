"""A connection between two processes of one host: whole messages, in order, over a stream socket."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from typing import Any, cast

import msgspec

_LENGTH_BYTES = 4


class Link(asyncio.Protocol):
    """``received`` gets each message of type ``kind``; ``lost`` is called once, once the other side has hung up."""

    def __init__(self, kind: Any, received: Callable[[Any], None], lost: Callable[[], None]):
        self._decode = msgspec.msgpack.Decoder(kind).decode
        self._encode = msgspec.msgpack.Encoder().encode
        self._received = received
        self._lost = lost
        self._buffer = bytearray()
        self._transport: asyncio.Transport | None = None
        self._closed = asyncio.Event()

    @classmethod
    async def over(cls, sock: socket.socket, kind: Any, received: Callable[[Any], None],
                   lost: Callable[[], None]) -> Link:
        """Opens a link over a connected socket, which it owns from then on."""
        sock.setblocking(False)
        loop = asyncio.get_running_loop()
        _, link = await loop.create_connection(lambda: cls(kind, received, lost), sock=sock)
        return link

    def send(self, message: msgspec.Struct) -> None:
        """Sends a message; does nothing once the other side has hung up."""
        if self._transport is not None:
            payload = self._encode(message)
            self._transport.write(len(payload).to_bytes(_LENGTH_BYTES, "big") + payload)

    async def close(self) -> None:
        """Sends what is buffered, then hangs up; ``lost`` is not called any more."""
        self._lost = _nothing
        if self._transport is not None:
            self._transport.close()
            await self._closed.wait()

    async def ended(self) -> None:
        """Waits until the other side has hung up and all that it sent is received."""
        await self._closed.wait()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        buffer = self._buffer
        buffer += data
        at = 0
        while len(buffer) - at >= _LENGTH_BYTES:
            end = at + _LENGTH_BYTES + int.from_bytes(buffer[at:at + _LENGTH_BYTES], "big")
            if len(buffer) < end:
                break
            message = self._decode(bytes(buffer[at + _LENGTH_BYTES:end]))
            at = end
            self._received(message)
        del buffer[:at]

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._closed.set()
        self._lost()


def _nothing() -> None:
    pass
