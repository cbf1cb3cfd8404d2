"""A worker process of ``bench_kvtransfer``: one rank of a sender or receiver."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import msgspec
import numpy as np
import torch

from ...common.api.errors import ServingError
from ...common.config.server import DisaggregationArgs
from ...common.config.server.disaggregation import TRANSFER_BACKENDS
from ...common.kvcache.layout import KVLayout
from ...common.shared_memory.host import shared_bytes
from ..backends import make_backend
from ..bootstrap import BootstrapServer, register_rank
from ..io_thread import sleep_precisely
from ..protocol.messages import PrefillResult
from ..protocol.states import Phase
from ..receiver.kv_receiver import KVReceiver
from ..sender.kv_sender import KVSender
from .args import BenchArgs

HOST = "127.0.0.1"
POOL_FACTOR = 2
"""Pages of the pool for each page of the longest prompt, so that its pages can be scattered."""


class WorkerRank(NamedTuple):
    """Rank ``rank`` of ``size`` senders or receivers; ``role`` is "sender" or "receiver". ``port`` is the bootstrap
    server's, 0 where this worker runs it."""

    role: str
    rank: int
    size: int
    port: int


def serve(build: Callable[..., Worker], rank_info: WorkerRank, args: BenchArgs, pipe: Connection) -> None:
    """Serves calls from the pipe until its other end is closed."""
    sleep_precisely()  # while waiting for a transfer, as a scheduler's step may take less than 50 us
    worker = build(rank_info, args)
    try:
        while True:
            name, arguments = pipe.recv()
            answer: tuple[str | None, Any]
            try:
                answer = None, getattr(worker, name)(*arguments)
            except ServingError as error:
                answer = f"{rank_info.role} {rank_info.rank}: {error.message}", None
            pipe.send(answer)
    except EOFError:
        worker.close()


class Worker:
    def __init__(self, rank_info: WorkerRank, args: BenchArgs):
        self._rank, self._args, self._port = rank_info, args, rank_info.port
        self._sends = rank_info.role == "sender"
        gpus = args.prefill_gpu if self._sends else args.decode_gpu
        gpu = gpus[rank_info.rank % len(gpus)]
        self._device = torch.device("cuda", gpu) if args.device == "cuda" else torch.device("cpu")
        if args.device == "cuda":
            torch.cuda.set_device(self._device)
        self._transport: KVSender | KVReceiver | None = None
        self._pool: list[torch.Tensor] = []
        self._page_ids = np.empty(0, np.int64)
        self._rng = np.random.default_rng(self._sends)  # equal on all ranks
        if self._port == 0:
            self._port = _serve_bootstrap()

    def bootstrap_port(self) -> int:
        return self._port

    def open(self, layout: KVLayout) -> float:
        """Allocates and registers a pool, of random bytes at a sender and zeros at a receiver; returns seconds.

        ``layout`` is that of all heads, of which a rank has its share."""
        began = time.monotonic()
        layout = msgspec.structs.replace(layout, num_kv_heads=layout.num_kv_heads // self._rank.size)
        self._layout = layout
        self._num_pages = POOL_FACTOR * layout.pages_for(max(self._args.prompt_tokens))
        shapes = [(self._num_pages, layout.group_page_bytes(group)) for group in range(len(layout.groups))]
        self._pool = [self._zeros(shape) for shape in shapes]
        if self._sends:
            for pages in self._pool:
                pages.random_(0, 256)
        self._wait_for_device()
        regions = [(pages.data_ptr(), pages.numel(), pages.get_device()) for pages in self._pool]
        args = DisaggregationArgs(disaggregation_transfer_backend=self._args.backend,
                                  kv_checksum=self._args.kv_checksum)
        build = KVSender if self._sends else KVReceiver
        self._transport = build(args=args, host=HOST, rank=self._rank.rank, tp_size=self._rank.size, layout=layout,
                                num_pages=self._num_pages, regions=regions, backend=make_backend(self._args.backend))
        if isinstance(self._transport, KVSender):
            register_rank(f"http://{HOST}:{self._port}", self._transport.info)
        return time.monotonic() - began

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()
        self._transport, self._pool = None, []

    def send(self, room: int, tokens: int, order: str) -> float:
        """Sends one prompt; returns when the first push began, in seconds of the host's monotonic clock."""
        sender = self._transport
        assert isinstance(sender, KVSender)
        self._page_ids = self._choose_pages(tokens, order)
        sender.expect(room, 0, tokens)
        self._wait_until(room, lambda phase: phase is Phase.RESERVED)
        began = time.monotonic()
        for group in range(len(self._pool)):
            sender.push(room, group, 0, self._page_ids, self._event())
        sender.finish(room, PrefillResult(0, 0))
        self._wait_until(room, lambda phase: phase is Phase.DONE)
        sender.forget(room)
        return began

    def receive(self, room: int, tokens: int, order: str) -> float:
        """Receives one prompt into zeroed pages; returns the time of its arrival, on the same clock."""
        receiver = self._transport
        assert isinstance(receiver, KVReceiver)
        self._page_ids = self._choose_pages(tokens, order)
        for pages in self._pool:
            pages[torch.from_numpy(self._page_ids).to(self._device)] = 0
        self._wait_for_device()
        receiver.reserve(room, (HOST, self._port), 0, tokens, 0, self._page_ids)
        self._wait_until(room, lambda phase: phase is Phase.DONE)
        arrived = time.monotonic()
        receiver.forget(room)
        return arrived

    def digest(self) -> list[np.ndarray]:
        """Returns ``[pages, heads]`` for each layer group: a checksum of each page of the last prompt, head by head.
        Each 64-bit word is multiplied by an odd number of its own."""
        sums = []
        for layers, pages in zip(self._layout.groups, self._pool):
            words = pages.view(torch.int64).view(len(pages), layers * 2, self._layout.num_kv_heads, -1)
            odd = torch.arange(words[0, :, 0].numel(), device=self._device) * 0x9E3779B97F4A7C1 * 2 + 1
            odd = odd.view(words.shape[1], 1, -1)
            page_ids = torch.from_numpy(self._page_ids).to(self._device)
            sums_of_pages = [(words[some] * odd).sum((1, 3)) for some in page_ids.split(64)]
            sums.append(torch.cat(sums_of_pages).cpu().numpy())
        return sums

    def ceiling(self) -> dict[str, Any]:
        """Measures GB/s of plain copies of 512 MiB: between the two GPUs, or in host memory by one thread and by
        all."""
        source = torch.ones(512 << 20, dtype=torch.uint8, device=self._device)
        if self._args.device == "cuda":
            target = torch.empty_like(source, device=torch.device("cuda", self._args.decode_gpu[0]))
            where = f"GPU {self._device.index} to {self._args.decode_gpu[0]}, {torch.cuda.get_device_name()}"
            return {"where": where, "device copy": _rate(lambda: target.copy_(source), self._wait_for_device)}
        target, threads = torch.zeros_like(source), torch.get_num_threads()
        rates: dict[str, Any] = {"where": f"host memory, {threads} threads"}
        for count in {1: None, threads: None}:
            torch.set_num_threads(count)
            rates[f"memcpy by {count} thread{'s' * (count > 1)}"] = _rate(lambda: target.copy_(source), lambda: None)
        return rates

    def _zeros(self, shape: tuple[int, int]) -> torch.Tensor:
        if TRANSFER_BACKENDS.has(self._args.backend, "maps_host_memory") and self._device.type == "cpu":
            return torch.from_numpy(shared_bytes(shape[0] * shape[1])).view(shape)
        return torch.zeros(shape, dtype=torch.uint8, device=self._device)

    def _choose_pages(self, tokens: int, order: str) -> np.ndarray:
        count = self._layout.pages_for(tokens)
        if order == "contiguous":
            return np.arange(count) + self._rng.integers(0, self._num_pages - count + 1)
        return self._rng.permutation(self._num_pages)[:count]

    def _wait_until(self, room: int, reached: Callable[[Phase], bool]) -> None:
        assert self._transport is not None
        while not reached(phase := self._transport.phase(room)):
            if phase <= Phase.ABORTING:
                raise self._transport.error(room)
            time.sleep(20e-6)

    def _event(self) -> torch.cuda.Event | None:
        if self._args.device == "cpu":
            return None
        event = torch.cuda.Event()
        event.record()
        return event

    def _wait_for_device(self) -> None:
        if self._args.device == "cuda":
            torch.cuda.synchronize()


def _rate(copy: Callable[[], Any], wait: Callable[[], None], num_bytes: int = 512 << 20) -> float:
    best = float("inf")
    for _ in range(6):
        wait()
        began = time.perf_counter()
        copy()
        wait()
        best = min(best, time.perf_counter() - began)
    return num_bytes / best / 1e9


def _serve_bootstrap() -> int:
    """Runs a bootstrap server on a daemon thread until the process ends; returns its port."""
    loop, server = asyncio.new_event_loop(), BootstrapServer(HOST, 0)
    threading.Thread(target=loop.run_forever, name="bootstrap", daemon=True).start()
    asyncio.run_coroutine_threadsafe(server.__aenter__(), loop).result()
    return server.port
