"""What one request costs inside the router: everything between its bytes and its answer's, without sockets or kernel.

    python tests/bench/router_hot_path.py                   # ns a request, least of many batches
    python tests/bench/router_hot_path.py --profile whole   # the functions of one case, by their own time

Connections are the router's own, transports are lists. So the figures hardly depend on what else the machine does:
a change of 2 % shows, where one of 10 % is lost in a measurement through sockets.
"""

from __future__ import annotations

import argparse
import asyncio
import cProfile
import gc
import logging
import pstats
import time
from collections.abc import Callable

import uvloop

from baton.common.config.cli import build
from baton.router.app import Router
from baton.router.config import RouterConfig
from baton.router.net.deadlines import ClientLimits, Deadlines
from baton.router.net.http_server import ClientConnection
from baton.router.net.request_reader import HeadRules
from baton.router.net.upstream import UpstreamConnection

CHAT = (b'{"model":"mock-model","messages":[{"role":"user","content":"%b"}],"max_tokens":64,"temperature":0,'
        b'"stream":%b}')
BARE = b"Host: 127.0.0.1:8000\r\nContent-Type: application/json\r\nAccept: */*\r\nContent-Length: %d\r\n\r\n"
SDK = (b"Host: 127.0.0.1:8000\r\nAccept-Encoding: gzip, deflate\r\nConnection: keep-alive\r\n"
       b"Accept: application/json\r\nContent-Type: application/json\r\n"
       b"User-Agent: OpenAI/Python 2.8.0\r\nX-Stainless-Lang: python\r\n"
       b"X-Stainless-Package-Version: 2.8.0\r\nX-Stainless-OS: Linux\r\nX-Stainless-Arch: x64\r\n"
       b"X-Stainless-Runtime: CPython\r\nX-Stainless-Runtime-Version: 3.11.7\r\nAuthorization: Bearer sk-0123456789\r\n"
       b"X-Stainless-Async: async:asyncio\r\nx-stainless-retry-count: 0\r\nx-stainless-read-timeout: 600\r\n"
       b"Content-Length: %d\r\n\r\n")
ANSWER = (b"HTTP/1.1 200 OK\r\nserver: mock\r\nx-worker: 1\r\ncontent-type: application/json\r\n"
          b"content-length: 500\r\n\r\n")
STREAM = (b"HTTP/1.1 200 OK\r\nserver: mock\r\ncontent-type: text/event-stream; charset=utf-8\r\n"
          b"cache-control: no-cache\r\ntransfer-encoding: chunked\r\n\r\n")
EVENT = b'data: {"id":"chatcmpl-1","choices":[{"delta":{"content":"%b"}}]}\n\n' % (b"x" * 240)
EVENTS = 200


class Transport:
    """Takes what is written and counts it."""

    def __init__(self):
        self.written = 0

    def write(self, data):
        self.written += len(data)

    def writelines(self, pieces):
        self.written += sum(map(len, pieces))

    def is_closing(self):
        return False

    def close(self):
        pass

    abort = pause_reading = resume_reading = close


class Bench:
    """A router whose workers are all there, one client connection, and the connections to its workers."""

    def __init__(self, router: Router):
        self.router = router
        self.upstream: list[UpstreamConnection] = []
        for worker in router.registry:
            worker.checked = True
            router.registry.record_check_passed(worker)
            pool = router.dispatcher.pool(worker)
            connection = UpstreamConnection(pool)
            connection.connection_made(Transport())
            pool.park(connection)
            self.upstream.append(connection)
        self.client = ClientConnection(router.entry.serve, max_payload=2**28, connections=set(), rules=HeadRules(),
                                       loop=asyncio.get_running_loop(), outbox=router.dispatcher.outbox,
                                       deadlines=Deadlines(asyncio.get_running_loop(), ClientLimits()))
        self.client.connection_made(Transport())

    def serve(self, request: bytes, answer: list[bytes]) -> None:
        """One request, and the answer of each worker that was sent it."""
        self.client.data_received(request)
        for connection in self.upstream:
            if connection.call is not None:
                for piece in answer:
                    connection.data_received(piece)
        self.router.dispatcher.outbox.flush()


def request(head: bytes, prompt: int, *, stream: bool = False) -> bytes:
    body = CHAT % (b"hello " * (prompt // 6), b"true" if stream else b"false")
    return b"POST /v1/chat/completions HTTP/1.1\r\n" + head % len(body) + body


def cases() -> dict[str, tuple[bool, bytes, list[bytes], int]]:
    """Name -> (pairs, request, the pieces of its answer, by how much its time is divided)."""
    answer = [ANSWER + b"x" * 500]
    stream = [STREAM, *[b"%x\r\n%b\r\n" % (len(EVENT), EVENT)] * EVENTS, b"0\r\n\r\n"]
    return {
        "whole": (False, request(BARE, 256), answer, 1),
        "whole, SDK's headers": (False, request(SDK, 256), answer, 1),
        "whole, 4 KiB prompt": (False, request(BARE, 4096), answer, 1),
        "pair": (True, request(BARE, 256), answer, 1),
        "pair, SDK's headers": (True, request(SDK, 256), answer, 1),
        "an event of a stream": (False, request(BARE, 64, stream=True), stream, EVENTS),
    }


async def start(pairs: bool) -> Router:
    urls = [f"http://127.0.0.1:{port}" for port in range(1, 5)]  # Nobody listens there; nothing is sent there.
    alone = [[url] for url in urls]
    given = ({"pd_disaggregation": True, "prefill": alone[:1], "decode": alone[1:2]} if pairs
             else {"worker_urls": urls})
    router = Router(build(RouterConfig, {"host": "127.0.0.1", "port": 0, "policy": "cache_aware", **given}))
    await router.start()
    return router


def measure(run: Callable[[], None], divisor: int, batches: int) -> float:
    """Least ns a call over batches of about 5 ms."""
    gc.disable()
    best = float("inf")
    calls = max(1, 200 // divisor)
    for _ in range(batches):
        began = time.perf_counter_ns()
        for _ in range(calls):
            run()
        best = min(best, (time.perf_counter_ns() - began) / calls / divisor)
    gc.enable()
    return best


async def run(name: str, profiled: bool, batches: int) -> None:
    pairs, sent, answer, divisor = cases()[name]
    router = await start(pairs)
    bench = Bench(router)  # From here on nothing awaits, so no health check finds the workers missing.
    transport = bench.client.transport
    for worker in router.registry:  # After a while all of them have seen a prompt that comes again and again.
        worker.load = -100
        before = transport.written
        bench.serve(sent, answer)
        worker.load = 0
    written = transport.written - before

    def once() -> None:
        bench.serve(sent, answer)

    if profiled:
        profile = cProfile.Profile()
        profile.runcall(lambda: [once() for _ in range(20_000 // divisor)])
        pstats.Stats(profile).sort_stats("tottime").print_stats(80)
    else:
        print(f"{name:24s} {measure(once, divisor, batches):8.0f} ns", flush=True)
    assert transport.written % written == 0, "the answers differ"
    await router.stop()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--profile", default="", choices=["", *cases()], help="a case's name")
    parser.add_argument("--batches", type=int, default=400)
    arguments = parser.parse_args()
    logging.disable(logging.INFO)
    for name in [arguments.profile] if arguments.profile else cases():
        uvloop.run(run(name, bool(arguments.profile), arguments.batches))


if __name__ == "__main__":
    main()
