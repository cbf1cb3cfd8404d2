"""Fuzz a router over its socket: whatever clients send, it answers, and never with an error of its own.

    python -m baton.tests.bench.router_fuzz --requests 20000 --seed 1

Twice, before whole workers and before a pair, ``--requests`` each. Its workers answer everything with 200, so
every 5xx is the router's. Well-formed requests must be answered; torn and malformed ones must be answered or
closed, and after all of them the router still serves, no load is left on a worker and nothing was logged as an
exception. Prints PASS or FAIL for each mode; exit status 1 after a FAIL.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import random
import sys
import time
from collections import Counter

import httptools
import uvloop

from baton.common.config.cli import build
from baton.router.app import Router
from baton.router.config import RouterConfig

PATHS = [
    "/v1/chat/completions", "/v1/completions", "/generate", "/v1/embeddings", "/v1/models", "/health", "/metrics",
    "/list_workers", "/workers", "/workers/0", "/add_worker", "/remove_worker", "/drain_worker", "/flush_cache",
    "/abort_request", "/get_load", "/get_server_info", "/dashboard", "/dashboard/data", "/readiness", "/nowhere", "/"]
METHODS = ["GET", "POST", "POST", "POST", "POST", "PUT", "DELETE", "HEAD", "OPTIONS", "PATCH", "TRACE"]
KEYS = ["messages", "prompt", "text", "input_ids", "input", "stream", "model", "n", "bootstrap_room", "bootstrap_host",
        "session_params", "user", "rid", "priority", "é\u0000\"", ""]
ANSWER = b'HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 12\r\n\r\n{"ok": true}'


class Worker(asyncio.Protocol):
    """Answers every request with 200."""

    def connection_made(self, transport):
        self.transport = transport
        self.parser = httptools.HttpRequestParser(self)

    def data_received(self, data):
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserError as error:  # The router must never pass on what is not HTTP.
            Worker.malformed.append((error, data[:200]))
            self.transport.close()

    def on_message_complete(self):
        head = ANSWER[:-12]
        self.transport.write(head if self.parser.get_method() == b"HEAD" else ANSWER)
        if not self.parser.should_keep_alive():
            self.transport.close()

    malformed: list = []


class Reply:
    """Reads one answer; ``status`` is 0 until there is one."""

    def __init__(self):
        self.status = 0
        self.complete = False
        self.parser = httptools.HttpResponseParser(self)

    def on_headers_complete(self):
        self.status = self.parser.get_status_code()

    def on_message_complete(self):
        self.complete = self.status >= 200


def value(rng: random.Random, depth: int = 0):
    """Any JSON value."""
    kind = rng.randrange(9 if depth < 3 else 6)
    if kind < 6:
        return [None, rng.random() < 0.5, rng.randrange(-2**70, 2**70), rng.random() * 10.0**rng.randrange(-30, 30),
                "".join(chr(rng.randrange(32, rng.choice((127, 0xD7FF)))) for _ in range(rng.randrange(20))),
                "hello " * rng.randrange(50)][kind]
    if kind == 6:
        return [value(rng, depth + 1) for _ in range(rng.randrange(4))]
    if kind == 7:
        return [[rng.randrange(1000) for _ in range(3)] for _ in range(rng.randrange(3))]
    return {rng.choice(KEYS): value(rng, depth + 1) for _ in range(rng.randrange(5))}


def body(rng: random.Random) -> bytes:
    kind = rng.randrange(8)
    if kind == 0:
        return rng.randbytes(rng.randrange(200))
    if kind == 1:
        return b"[" * rng.randrange(5000) + b'{"prompt":' * rng.randrange(3000)
    if kind == 2:
        return b'{"prompt": "' + b"\\ud800" * rng.randrange(3) + rng.randbytes(5) + b'"}'
    text = json.dumps({rng.choice(KEYS): value(rng) for _ in range(rng.randrange(6))}).encode()
    return text[:rng.randrange(len(text) + 1)] if kind == 3 else b" \r\n\t"[:rng.randrange(4)] + text


def header(rng: random.Random) -> bytes:
    name = rng.choice([b"X-Request-Id", b"traceparent", b"Authorization", b"Origin", b"Accept", b"Content-Type",
                       b"Cookie", b"X-Session-Id", b"Connection", b"Expect", b"Priority", b"x-priority"])
    values = [b"a", b"Bearer x", b"close", b"keep-alive", b"100-continue", b"\xff\xfe\x80", b"", b"a" * 3000,
              b"00-zz-zz-01"]
    return name + b": " + rng.choice(values) + b"\r\n"


def request(rng: random.Random) -> tuple[bytes, bool, bool]:
    """``(bytes, whether an answer is owed, whether it is to a HEAD)``."""
    method, path = rng.choice(METHODS), rng.choice(PATHS)
    if rng.random() < 0.2:
        path += "?" + "".join(rng.choice("ab=&%2url:/9") for _ in range(rng.randrange(30)))
    if rng.random() < 0.05:
        path = "http://router" + path
    content = body(rng)
    head = f"{method} {path} HTTP/1.{rng.choice('1111110')}\r\nHost: r\r\n".encode()
    head += b"".join(header(rng) for _ in range(rng.randrange(4)))
    if rng.random() < 0.15:
        middle = rng.randrange(len(content) + 1)
        pieces = [piece for piece in (content[:middle], content[middle:]) if piece]
        sent = head + b"transfer-encoding: chunked\r\n\r\n" + b"".join(b"%x\r\n%b\r\n" % (len(p), p) for p in pieces)
        sent += b"0\r\n\r\n"
    else:
        sent = head + b"content-length: %d\r\n\r\n" % len(content) + content
    chance = rng.random()
    if chance < 0.05:  # torn
        return sent[:rng.randrange(len(sent))], False, method == "HEAD"
    if chance < 0.10:  # damaged
        at = rng.randrange(len(head))
        return sent[:at] + rng.randbytes(rng.randrange(1, 4)) + sent[at + 1:], False, method == "HEAD"
    return sent, True, method == "HEAD"


async def ask(port: int, sent: bytes, owed: bool, head_only: bool) -> int:
    """The status of the answer; 0 when the connection was closed, or nothing came for a request that is not whole."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    reply = Reply()
    try:
        writer.write(sent)
        while not reply.complete and not (head_only and reply.status >= 200):
            data = await asyncio.wait_for(reader.read(65536), 10 if owed else 0.05)
            if not data:
                break
            reply.parser.feed_data(data)
    except (asyncio.TimeoutError, ConnectionError):
        assert not owed, f"no answer to {sent[:500]!r}"
    finally:
        writer.transport.abort()
    assert reply.status or not owed, f"closed without an answer: {sent[:500]!r}"
    return reply.status


class _Errors(logging.Handler):
    def __init__(self):
        super().__init__(logging.ERROR)
        self.records: list[str] = []

    def emit(self, record):
        self.records.append(record.getMessage())


async def fuzz(count: int, seed: int, *, pairs: bool, policy: str = "cache_aware",
               concurrency: int = 16) -> Counter[int]:
    """Send ``count`` random requests; returns the statuses. Raises AssertionError for what must not happen."""
    rng, loop, errors = random.Random(seed), asyncio.get_running_loop(), _Errors()
    crashes: list[dict] = []
    loop.set_exception_handler(lambda loop, context: crashes.append(context))
    logging.getLogger().addHandler(errors)
    Worker.malformed.clear()
    servers = [await loop.create_server(Worker, "127.0.0.1", 0) for _ in range(2)]
    urls = [f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}" for server in servers]
    flags = {"pd_disaggregation": True, "prefill": ((urls[0], "1"),), "decode": ((urls[1],),)} if pairs else {
        "worker_urls": tuple(urls)}
    router = Router(build(RouterConfig, {"port": 0, "admin_api_key": "a", "log_level": "warning", "policy": policy,
                                         **flags}))
    await router.start()
    while not router.registry.ready(pairs=pairs):
        await asyncio.sleep(0.01)
    statuses: Counter[int] = Counter()

    async def client() -> None:
        while statuses.total() < count:
            sent, owed, head_only = request(rng)
            statuses[status := await ask(router.port, sent, owed, head_only)] += 1
            assert status < 500, f"{status} for {sent[:500]!r}"

    try:
        await asyncio.gather(*(client() for _ in range(concurrency)))
        assert await ask(router.port, b"GET /readiness HTTP/1.1\r\nhost: r\r\n\r\n", True, False) == 200
        await asyncio.sleep(0.1)
        assert not any(worker.load for worker in router.registry), "load is left on a worker"
        assert not crashes, crashes
        assert not errors.records, errors.records
        assert not Worker.malformed, Worker.malformed
    finally:
        logging.getLogger().removeHandler(errors)
        await router.stop()
        for server in servers:
            server.close()
    return statuses


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=20_000, help="a mode")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--policy", default="cache_aware")
    args = parser.parse_args()
    failed = False
    for pairs in (False, True):
        mode = "pairs" if pairs else "whole"
        begun = time.monotonic()
        try:
            statuses = uvloop.run(fuzz(args.requests, args.seed, pairs=pairs, policy=args.policy))
        except AssertionError as error:
            failed = True
            print(f"FAIL {mode}, seed {args.seed}: {error}", flush=True)
        else:
            print(f"PASS {mode}: {statuses.total():,} requests in {time.monotonic() - begun:.0f} s, no 5xx, no crash; "
                  f"answers by status (0: closed) {dict(sorted(statuses.items()))}", flush=True)
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
