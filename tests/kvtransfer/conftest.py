"""A prefill and a decode rank in one process, over real sockets; memory is numpy."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from baton.common.api.errors import ConfigError
from baton.common.config.server import DisaggregationArgs
from baton.common.kvcache.layout import KVLayout
from baton.common.shared_memory.host import shared_bytes
from baton.kvtransfer.backends import make_backend
from baton.kvtransfer.bootstrap import BootstrapServer, register_rank
from baton.kvtransfer.protocol.messages import PrefillResult
from baton.kvtransfer.protocol.states import Phase
from baton.kvtransfer.receiver.kv_receiver import KVReceiver
from baton.kvtransfer.sender.kv_sender import KVSender

LAYOUT = KVLayout(groups=(2, 1), num_kv_heads=2, head_dim=8, page_size=4, dtype="float32")
NUM_PAGES = 32
HOST = "127.0.0.1"


def make_pool(layout: KVLayout = LAYOUT, num_pages: int = NUM_PAGES, seed: int | None = None) -> list[np.ndarray]:
    """One uint8 array ``[num_pages, page bytes]`` for each layer group; random, or zero without a seed."""
    rng = np.random.default_rng(seed)
    pool = [shareable(np.zeros((num_pages, layout.group_page_bytes(g)), np.uint8)) for g in range(len(layout.groups))]
    if seed is not None:
        for pages in pool:
            pages[:] = rng.integers(0, 256, size=pages.shape, dtype=np.uint8)
    return pool


def shareable(array: np.ndarray) -> np.ndarray:
    """A copy in memory that other processes can map, which the ipc backend asks for."""
    copy = shared_bytes(array.nbytes).view(array.dtype).reshape(array.shape)
    copy[:] = array
    return copy


def regions_of(pool: list[np.ndarray]) -> list[tuple[int, int, int]]:
    return [(array.ctypes.data, array.nbytes, -1) for array in pool]


def backend(name: str) -> object:
    """A parameter that is skipped where the backend's library is not installed."""
    try:
        make_backend(name).close()
    except ConfigError as error:
        return pytest.param(name, marks=pytest.mark.skip(reason=error.args[0]))
    return name


BACKENDS = [backend(name) for name in ("fake", "ipc", "nixl", "mooncake")]


def wait_until(condition: Callable[[], bool], timeout: float = 5.0) -> float:
    began = time.monotonic()
    while not condition():
        assert time.monotonic() - began < timeout, "it did not happen in time"
        time.sleep(0.002)
    return time.monotonic() - began


class Proxy:
    """A TCP relay that can be cut, which closes both of its connections."""

    def __init__(self, endpoint: str):
        self.target = ("127.0.0.1", int(endpoint.rpartition(":")[2]))
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.endpoint = f"tcp://127.0.0.1:{self.listener.getsockname()[1]}"
        self.sockets: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self.listener.accept()
                far = socket.create_connection(self.target)
                self.sockets += [near, far]
                for source, sink in ((near, far), (far, near)):
                    threading.Thread(target=self._relay, args=(source, sink), daemon=True).start()

    def _relay(self, source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                sink.sendall(data)
            sink.shutdown(socket.SHUT_RDWR)

    def cut(self) -> None:
        for sock in self.sockets:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self.listener.close()
        self.cut()


class Bootstrap:
    """A bootstrap server on a thread of its own, as blocking tests need it."""

    def __init__(self, port: int = 0, secret: str | None = None):
        self._loop = asyncio.new_event_loop()
        self.server = BootstrapServer(HOST, port, secret)
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self.server.__aenter__(), self._loop).result()

    @property
    def address(self) -> tuple[str, int]:
        return HOST, self.server.port

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.server.port}"

    def close(self) -> None:
        asyncio.run_coroutine_threadsafe(self.server.__aexit__(None, None, None), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


class Pair:
    """Builds senders and receivers that know each other, and closes them."""

    def __init__(self, backend: str, **args: Any):
        self.backend = backend
        self.args = DisaggregationArgs(disaggregation_transfer_backend=backend, **args)
        self.bootstrap = Bootstrap(secret=self.args.cluster_secret)
        self.closers = contextlib.ExitStack()
        self.source, self.target = make_pool(seed=1), make_pool()
        self.sender = self.make_sender(self.source)
        self.receiver = self.make_receiver(self.target)

    def make_sender(self, pool: list[np.ndarray], *, layout: KVLayout = LAYOUT, register: bool = True,
                    **options: Any) -> KVSender:
        sender = KVSender(args=self.args, host=HOST, rank=0, tp_size=1, layout=layout, num_pages=len(pool[0]),
                          regions=regions_of(pool), backend=make_backend(self.backend), **options)
        self.closers.callback(sender.close)
        if register:
            register_rank(self.bootstrap.url, sender.info, secret=self.args.cluster_secret)
        return sender

    def make_receiver(self, pool: list[np.ndarray], *, layout: KVLayout = LAYOUT, tp_size: int = 1,
                      **changed: Any) -> KVReceiver:
        options = {name: changed.pop(name) for name in ("model", "server", "spare_page") if name in changed}
        args = dataclasses.replace(self.args, **changed)
        receiver = KVReceiver(args=args, host=HOST, rank=0, tp_size=tp_size, layout=layout, num_pages=len(pool[0]),
                              regions=regions_of(pool), backend=make_backend(self.backend), **options)
        self.closers.callback(receiver.close)
        return receiver

    def reserve(self, room: int, *, digest: int = 77, num_tokens: int = 10, first_page: int = 0,
                page_ids: tuple[int, ...] = (5, 9, 2), receiver: KVReceiver | None = None) -> None:
        (receiver or self.receiver).reserve(room, self.bootstrap.address, digest, num_tokens, first_page,
                                            np.array(page_ids, dtype=np.int64))

    def expect(self, room: int, *, digest: int = 77, num_tokens: int = 10, sender: KVSender | None = None) -> None:
        (sender or self.sender).expect(room, digest, num_tokens)

    def push_all(self, room: int, src: tuple[int, ...] = (20, 21, 30)) -> None:
        for group in range(len(LAYOUT.groups)):
            self.sender.push(room, group, 0, np.array(src), None)

    def finish(self, room: int, token_id: int = 42) -> None:
        self.sender.finish(room, PrefillResult(token_id, 3))

    def transfer(self, room: int) -> None:
        """A whole transfer of 3 pages, checked."""
        self.reserve(room)
        self.expect(room)
        self.until(room, Phase.RESERVED, endpoint=self.sender)
        self.push_all(room)
        self.finish(room)
        self.until(room, Phase.DONE)
        assert self.receiver.result(room).token_id == 42

    def until(self, room: int, phase: Phase, *, endpoint: KVSender | KVReceiver | None = None,
              timeout: float = 5.0) -> float:
        endpoints = [self.sender, self.receiver] if endpoint is None else [endpoint]
        return wait_until(lambda: all(end.phase(room) is phase for end in endpoints), timeout)

    def close(self) -> None:
        self.closers.close()
        self.bootstrap.close()


@pytest.fixture
def make_pair() -> Iterator[Callable[..., Pair]]:
    with contextlib.ExitStack() as stack:
        def make(backend: str = "fake", **args: Any) -> Pair:
            pair = Pair(backend, **args)
            stack.callback(pair.close)
            return pair

        yield make
