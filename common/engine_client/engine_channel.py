"""The API server's end of the channel to the engine; engine/rank_channel.py has the ranks' ends."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections import deque
from typing import Any

import zmq
import zmq.asyncio

from ..api.messages import FromEngine, ToEngine, decode_from_engine, encode

_RETRY_SECONDS = 0.005


class EngineChannel:
    """Messages go to rank 0 and come from all ranks. Must be used from one event loop."""

    def __init__(self) -> None:
        self.folder = _private_folder()
        self.to_engine = f"ipc://{self.folder}/to_engine"
        self.from_engine = f"ipc://{self.folder}/from_engine"
        self._context = zmq.asyncio.Context()
        # A plain socket instead of the context's asynchronous one: sending must not wait for an event loop.
        self._outbox: Any = self._context.socket(zmq.PUSH, socket_class=zmq.Socket)  # type: ignore[arg-type]
        self._outbox.sndhwm = 0
        self._outbox.bind(self.to_engine)
        self._inbox = self._context.socket(zmq.PULL)
        self._inbox.rcvhwm = 0
        self._inbox.bind(self.from_engine)
        self._unsent: deque[bytes] = deque()

    def listen(self, host: str) -> str:
        """A further endpoint for the engine's messages, for ranks on other hosts: a free TCP port of ``host``."""
        bracketed = f"[{host}]" if ":" in host else host
        self._inbox.ipv6 = ":" in host
        self._inbox.bind(f"tcp://{bracketed}:*")
        return self._inbox.getsockopt_string(zmq.LAST_ENDPOINT)

    def send(self, message: ToEngine) -> None:
        self._unsent.append(encode(message))
        if len(self._unsent) == 1:
            self._send_unsent()

    def drop_unsent(self) -> None:
        """Drop messages that no rank will receive."""
        self._unsent.clear()

    async def receive(self) -> FromEngine:
        message: FromEngine = decode_from_engine(await self._inbox.recv())
        return message

    def close(self) -> None:
        """Close the sockets and remove their folder."""
        self._unsent.clear()
        self._context.destroy(linger=0)
        shutil.rmtree(self.folder, ignore_errors=True)

    def _send_unsent(self) -> None:
        """Send queued messages; refused ones are retried soon. A PUSH socket without a peer refuses messages, and rank
        0 may not have connected yet when its Ready arrives (by another socket)."""
        while self._unsent:
            try:
                self._outbox.send(self._unsent[0], zmq.NOBLOCK)
            except zmq.Again:
                asyncio.get_running_loop().call_later(_RETRY_SECONDS, self._send_unsent)
                return
            self._unsent.popleft()


def _private_folder() -> str:
    """A new folder that only this user can enter. A Unix socket's path has 107 bytes at most, so a long TMPDIR (as
    batch systems set it) is not used."""
    return tempfile.mkdtemp(prefix="baton-", dir="/tmp" if len(tempfile.gettempdir()) > 70 else None)
