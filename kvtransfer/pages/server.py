"""The page server of a rank: peers find and fetch the pages that its host memory holds.

A thread of its own answers. Pages are copied out of host memory with their header (objects.py), and written into the
memory of the peer that asks, or sent as messages where the transfer backend does not reach that.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import zmq

from ...common.api.errors import TransferFailed
from ...common.api.unreadable import UNREADABLE
from ...common.kvcache.page_keys import PageKey
from ...common.kvcache.storage.objects import ObjectFormat
from ...common.kvcache.storage.page_servers import PageServers
from ...common.kvcache.tiers.base import HostSlots
from ..backends.base import Backend, Peer, WriteState
from ..endpoint import bind_control, control_socket, reachable_endpoint
from ..io_thread import BUSY_INTERVAL, IOThread
from ..protocol.authentication import AuthError, Channels, Secret
from . import messages as m
from .staging import BLOCK_BYTES, Staging, num_blocks

logger = logging.getLogger("baton.kvtransfer")

_PART_BYTES = 1 << 20
_GOING_SECONDS = 0.01
_WRITE_SECONDS = 5.0
_REQUESTER_SECONDS = 60.0
"""Silence after which a peer's memory is given up; peers introduce themselves every 10 seconds."""
_KEY_DIGITS, _KEY_BYTES = 64, 32


_Steps = Generator[bool, None, bool]
"""Yields True where it waits for a write, and returns whether all bytes have arrived."""


class Complete:
    """The keys of the pages that are complete in host memory: what its listeners are told. Safe for threads."""

    def __init__(self) -> None:
        self._keys: set[PageKey] = set()

    def __contains__(self, key: PageKey) -> bool:
        return key in self._keys

    def stored(self, keys: Sequence[PageKey]) -> None:
        self._keys.update(key for key in keys if len(key) == _KEY_BYTES)

    def dropped(self, keys: Sequence[PageKey]) -> None:
        self._keys.difference_update(keys)

    def cleared(self) -> None:
        self._keys.clear()


@dataclass
class _Requester:
    """A peer whose memory we write into."""

    peer: Peer
    metadata: bytes
    num_blocks: int
    heard: float


class _Asked(NamedTuple):
    """A Fetch that waits."""

    session: bytes
    fetch: m.Fetch


@dataclass
class _Job:
    asked: _Asked
    steps: Iterator[bool]
    going_at: float = field(default_factory=time.monotonic)


class PageServer:
    """Serves the objects of ``slots`` from its creation to ``close``; those that introduce themselves are added to
    ``servers``. ``port`` 0 takes a free one. Raises ConfigError where ``host`` cannot be bound."""

    def __init__(self, host: str, port: int, slots: HostSlots, objects: ObjectFormat, staging: Staging,
                 backend: Backend | None, secret: Secret | None, servers: PageServers):
        self.instance = secrets.token_hex(8)
        self._slots, self._objects, self._staging, self._backend = slots, objects, staging, backend
        self._own = objects.shape.own
        self.holds = objects.name(b"", self._own)
        self._servers = servers
        self._channels, self._warned = Channels(secret), False
        self._complete = Complete()
        self._requesters: dict[str, _Requester] = {}
        self._queue: deque[_Asked] = deque()
        self._job: _Job | None = None
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._router = control_socket(self._context, zmq.ROUTER)
        self._router.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._router.setsockopt(zmq.MAXMSGSIZE, m.MAX_MESSAGE_BYTES)
        self.endpoint = servers.own = bind_control(self._router, host, port)
        slots.listeners.append(self._complete)
        self._io = IOThread("kv-pages", self._work)
        self._io.add_reader(self._router, self._receive_all)
        self._io.start()

    def __repr__(self) -> str:
        return f"PageServer({self.endpoint}, {len(self._requesters)} peers, {len(self._queue)} waiting)"

    def close(self) -> None:
        if self._complete in self._slots.listeners:
            self._slots.listeners.remove(self._complete)
        self._servers.own = ""
        self._io.stop()
        for instance in list(self._requesters):
            self._drop(instance)
        self._context.destroy(linger=0)

    # -- the thread -------------------------------------------------------------------------------------------------

    def _work(self, stalled: float) -> float | None:
        if self._backend is not None:
            self._backend.progress()
        now = time.monotonic()
        if self._job is None and self._queue:
            asked = self._queue.popleft()
            self._job = _Job(asked, self._serve(asked), now)
        if self._job is not None and now - self._job.going_at >= _GOING_SECONDS:
            self._job.going_at = now
            self._say_going()
        if self._job is not None:
            waits = next(self._job.steps, None)
            if waits is None:
                self._job = None
            return BUSY_INTERVAL if waits else 0.0
        for instance, requester in list(self._requesters.items()):
            if now - requester.heard > _REQUESTER_SECONDS:
                self._drop(instance)
        interval = None if self._backend is None else self._backend.progress_interval
        return interval if interval is not None and self._requesters else 1.0

    def _say_going(self) -> None:
        """Tells those who wait that we live; forgets those who have gone."""
        assert self._job is not None
        if not self._send(self._job.asked.session, m.Going(self._job.asked.fetch.number)):
            self._job.steps = iter(())
        self._queue = deque(each for each in self._queue if self._send(each.session, m.Going(each.fetch.number)))

    def _send(self, session: bytes, message: m.ToClient) -> bool:
        """Returns False where the client has gone."""
        try:
            self._router.send_multipart([session, *self._channels.sign(session, m.encode(message))], zmq.NOBLOCK)
        except zmq.ZMQError:
            return False
        return True

    def _receive_all(self) -> None:
        while True:
            try:
                session, *frames = self._router.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            if not frames:
                continue
            try:
                message = m.decode_to_server(self._channels.verify(session.bytes, [each.bytes for each in frames]))
            except AuthError:
                if not self._warned:
                    self._warned = True
                    logger.warning("A request for pages of host memory is refused: it is not authenticated with our "
                                   "--cluster-secret.")
                continue
            except UNREADABLE:
                continue
            self._handle(session.bytes, message, _address_of(frames[-1]))

    def _handle(self, session: bytes, message: m.ToServer, address: str) -> None:
        if isinstance(message, m.Introduce):
            self._introduce(session, message, address)
        elif isinstance(message, m.Find):
            present = bytes((key := self._key_of(name)) is not None and key in self._complete for name in message.names)
            self._send(session, m.Found(message.number, present))
        else:
            self._queue.append(_Asked(session, message))

    def _introduce(self, session: bytes, message: m.Introduce, address: str) -> None:
        if message.instance != self.instance and message.version == m.VERSION:
            self._servers.add([reachable_endpoint(address, message.endpoint)])
            self._admit(message)
        self._send(session, m.Introduced(m.VERSION, self.instance, self.holds, message.instance in self._requesters,
                                         list(self._servers.reached)))

    def _admit(self, message: m.Introduce) -> None:
        known = self._requesters.get(message.instance)
        if known is not None and known.metadata == message.metadata:
            known.heard = time.monotonic()
            return
        self._drop(message.instance)
        if self._backend is None or not message.metadata or message.block_bytes != BLOCK_BYTES:
            return
        try:
            peer = self._backend.add_peer(message.metadata, [1], [1])
        except TransferFailed as error:
            logger.info("Pages go to a peer as messages: %s", error.message)
            return
        self._requesters[message.instance] = _Requester(peer, message.metadata, message.num_blocks, time.monotonic())

    def _drop(self, instance: str) -> None:
        if (requester := self._requesters.pop(instance, None)) is not None:
            assert self._backend is not None
            self._backend.remove_peer(requester.peer)

    def _key_of(self, name: str) -> PageKey | None:
        """The key of an object that would be ours; None for those of other models, layouts and heads."""
        if name[_KEY_DIGITS:] != self.holds:
            return None
        try:
            return bytes.fromhex(name[:_KEY_DIGITS])
        except ValueError:
            return None

    # -- objects ----------------------------------------------------------------------------------------------------

    def _serve(self, asked: _Asked) -> Iterator[bool]:
        """Answers a Fetch, in steps of a few hundred microseconds."""
        session, fetch = asked
        requester = self._requesters.get(fetch.instance)
        first_blocks = np.frombuffer(fetch.blocks, "<i4") if len(fetch.blocks) == 4 * len(fetch.names) else None
        if fetch.blocks and (requester is None or first_blocks is None):
            self._send(session, m.Unknown(fetch.number))
            return
        present = bytearray(len(fetch.names))
        size = self._objects.num_bytes(self._own)
        count = len(self._staging.out) // (num_blocks(size) * BLOCK_BYTES)
        for first in range(0, len(fetch.names), count) if fetch.object_bytes == size else ():
            filled: list[int] = []
            for index in range(first, min(first + count, len(fetch.names))):
                if self._fill(fetch.names[index], self._object(len(filled), size)):
                    filled.append(index)
                yield False
            if requester is None or first_blocks is None:
                arrived = yield from self._send_parts(asked, filled, size)
            else:
                arrived = not filled or (yield from self._write(fetch.instance, requester, first_blocks[filled], size))
            if not arrived:
                break
            for index in filled:
                present[index] = 1
        self._send(session, m.Fetched(fetch.number, bytes(present)))

    def _object(self, number: int, size: int) -> np.ndarray:
        begin = number * num_blocks(size) * BLOCK_BYTES
        return self._staging.out[begin:begin + size]

    def _fill(self, name: str, target: np.ndarray) -> bool:
        key = self._key_of(name)
        if key is None or key not in self._complete:
            return False
        if not self._slots.read_slot(key, self._objects.body(target, self._own)):
            return False
        self._objects.seal(key, target)
        return True

    def _send_parts(self, asked: _Asked, filled: Sequence[int], size: int) -> _Steps:
        for number, index in enumerate(filled):
            data = self._object(number, size)
            for offset in range(0, size, _PART_BYTES):
                part = data[offset:offset + _PART_BYTES].tobytes()
                if not self._send(asked.session, m.Part(asked.fetch.number, index, offset, part)):
                    return False
                yield False
        return True

    def _write(self, instance: str, requester: _Requester, first_blocks: np.ndarray, size: int) -> _Steps:
        """Writes the first objects of ``out`` into a requester's memory, from ``first_blocks`` on."""
        assert self._backend is not None
        offsets = np.arange(num_blocks(size), dtype=np.int64)
        target = (first_blocks.astype(np.int64)[:, None] + offsets).reshape(-1)
        source = np.arange(len(target), dtype=np.int64)
        if target.min() < 0 or target.max() >= requester.num_blocks:
            return False
        end = time.monotonic() + _WRITE_SECONDS
        try:
            write = self._backend.write(requester.peer, 0, source, 0, target)
            while (state := self._backend.poll(write)) is WriteState.PENDING and time.monotonic() < end:
                yield True
        except TransferFailed:
            state = WriteState.FAILED
        if state is not WriteState.DONE and self._requesters.get(instance) is requester:
            self._drop(instance)
        return state is WriteState.DONE


def _address_of(frame: zmq.Frame) -> str:
    try:
        return str(frame.get("Peer-Address"))
    except zmq.ZMQError:
        return ""
