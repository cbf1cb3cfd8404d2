"""A transfer backend without RDMA, for tests: pages travel over a ZMQ socket to a thread of the target.

To its caller it behaves as one-sided writes do: the target's engine takes no part, writes complete out of step with the
control channel, and a posted write may arrive late. ``gate``, ``fail_writes`` and ``lose_pages`` inject the faults that
a real link would have.
"""

from __future__ import annotations

import ctypes
import itertools
import secrets
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec
import numpy as np
import zmq

from ...common.api.errors import ConfigError, TransferFailed
from ...common.api.unreadable import UNREADABLE
from ...common.config.server.disaggregation import TRANSFER_BACKENDS
from .base import Backend, BackendSettings, Region, WriteState


class _Metadata(msgspec.Struct):
    endpoint: str


@dataclass
class _Peer:
    socket: zmq.Socket[bytes]
    src_blocks: Sequence[int]
    dst_blocks: Sequence[int]
    writes: dict[int, WriteState] = field(default_factory=dict)
    removed: bool = False


@dataclass(frozen=True)
class _Write:
    peer: _Peer
    number: int


class FakeBackend:
    """Moves host memory only. While ``gate`` is cleared, incoming writes stay in flight. The next ``fail_writes``
    writes of ours fail, and the next ``lose_pages`` writes lose their last page."""

    name = "fake"
    quarantine_seconds = 0.0
    scope = ""
    progress_interval: float | None = None

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.gate.set()
        self.fail_writes = 0
        self.lose_pages = 0
        self.num_arrived = 0
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._pages: list[np.ndarray] = []
        self._endpoint = ""
        self._numbers = itertools.count()
        self._peers: list[_Peer] = []
        self._closing = False
        self._thread: threading.Thread | None = None

    def register(self, regions: Sequence[Region], num_pages: Sequence[int]) -> None:
        if any(region.device >= 0 for region in regions):
            raise ConfigError("--disaggregation-transfer-backend fake moves host memory only; use nixl on GPUs.")
        for region, count in zip(regions, num_pages):
            memory = memoryview((ctypes.c_uint8 * region.num_bytes).from_address(region.address)).cast("B")
            self._pages.append(np.frombuffer(memory, dtype=np.uint8).reshape(count, -1))
        inbox = self._context.socket(zmq.ROUTER)
        inbox.setsockopt(zmq.RCVTIMEO, 50)
        inbox.setsockopt(zmq.LINGER, 0)
        self._endpoint = f"tcp://127.0.0.1:{inbox.bind_to_random_port('tcp://127.0.0.1')}"
        self._thread = threading.Thread(target=self._receive_writes, args=(inbox,), name="kv-fake", daemon=True)
        self._thread.start()

    def local_metadata(self) -> bytes:
        return msgspec.msgpack.encode(_Metadata(self._endpoint))

    def add_peer(self, metadata: bytes, src_blocks: Sequence[int], dst_blocks: Sequence[int]) -> _Peer:
        try:
            description = msgspec.msgpack.decode(metadata, type=_Metadata)
        except UNREADABLE as error:
            raise TransferFailed(f"the peer's description of its memory is unreadable: {error}") from None
        socket = self._context.socket(zmq.DEALER)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.ROUTING_ID, secrets.token_hex(8).encode())
        socket.connect(description.endpoint)
        peer = _Peer(socket, src_blocks, dst_blocks)
        self._peers.append(peer)
        return peer

    def remove_peer(self, peer: _Peer) -> None:
        if not peer.removed:
            peer.removed = True
            peer.socket.close()
            self._peers.remove(peer)

    def write(self, peer: _Peer, src_group: int, src_ids: np.ndarray, dst_group: int, dst_ids: np.ndarray) -> _Write:
        number = next(self._numbers)
        if self.fail_writes > 0:
            self.fail_writes -= 1
            peer.writes[number] = WriteState.FAILED
        elif peer.removed:
            raise TransferFailed("the peer is not connected")
        else:
            if self.lose_pages > 0:
                self.lose_pages -= 1
                src_ids, dst_ids = src_ids[:-1], dst_ids[:-1]
            peer.writes[number] = WriteState.PENDING
            payload = _blocks(self._pages[src_group], peer.src_blocks[src_group])[src_ids].tobytes()
            peer.socket.send_multipart([str(number).encode(), str(dst_group).encode(),
                                        str(peer.dst_blocks[dst_group]).encode(), dst_ids.tobytes(), payload])
        return _Write(peer, number)

    def poll(self, write: _Write) -> WriteState:
        peer = write.peer
        while not peer.removed:
            try:
                peer.writes[int(peer.socket.recv(zmq.NOBLOCK))] = WriteState.DONE
            except zmq.Again:
                break
        state = peer.writes[write.number]
        if state is WriteState.PENDING and peer.removed:
            state = WriteState.FAILED
        if state is not WriteState.PENDING:
            del peer.writes[write.number]
        return state

    def write_flag(self, peer: object, value: int) -> None:
        return None

    def completion_flags(self) -> None:
        return None

    def progress(self) -> None:
        pass  # the receiving thread does it

    def close(self) -> None:
        self._closing = True
        self.gate.set()
        for peer in list(self._peers):
            self.remove_peer(peer)
        if self._thread is not None:
            self._thread.join()
        self._context.term()

    def _receive_writes(self, inbox: zmq.Socket[bytes]) -> None:
        while not self._closing:
            try:
                writer, number, group, blocks, dst_ids, payload = inbox.recv_multipart()
            except zmq.Again:
                continue
            self.gate.wait()
            if self._closing:
                break
            target = _blocks(self._pages[int(group)], int(blocks))
            target[np.frombuffer(dst_ids, dtype=np.int64)] = \
                np.frombuffer(payload, dtype=np.uint8).reshape(-1, target.shape[1])
            self.num_arrived += 1
            inbox.send_multipart([writer, number])
        inbox.close()


def _blocks(pages: np.ndarray, blocks: int) -> np.ndarray:
    """Views a layer group as ``[pages * blocks, bytes of a block]``."""
    return pages.reshape(len(pages) * blocks, -1)


@TRANSFER_BACKENDS.register("fake", hidden=True)
def make(settings: BackendSettings) -> Backend:
    return FakeBackend()
