"""Soak a router at full load: memory must stay flat and no task, load or connection may be left.

    python -m baton.tests.bench.router_soak --seconds 300            # whole workers
    python -m baton.tests.bench.router_soak --seconds 300 --pairs    # two prefill and two decode workers

A router process of its own in front of workers in this one; half of the requests stream, some clients leave in the
middle, some connections are new. Prompts repeat out of a fixed set, so that the policy's tree is full after the first
minute. Compared with the end of the warm-up (a third of the time): RSS, by less than 8 MiB; with the idle router
before: its asyncio tasks, its open files, the load of its workers. Prints PASS or FAIL with the reasons; exit status 1
after a FAIL.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import httptools
import uvloop

from ...router import launch
from ..helpers.ports import free_port

_PAGE_KIB = 4
JSON_ANSWER = b'HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 500\r\n\r\n' + b" " * 500
STREAM_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
EVENT = b"1b\r\ndata: {\"choices\": [\"abc\"]}\n\n\r\n".replace(b"1b", b"%x" % len(b'data: {"choices": ["abc"]}\n\n'))


class Worker(asyncio.Protocol):
    """Answers at once, or with a stream of 20 events when the body asks for one."""

    def connection_made(self, transport):
        self.transport = transport
        self.parser = httptools.HttpRequestParser(self)
        self.body = b""

    def on_body(self, data):
        self.body += data

    def data_received(self, data):
        self.parser.feed_data(data)

    def on_message_complete(self):
        streams, self.body = b'"stream": true' in self.body, b""
        self.transport.write(STREAM_HEAD + EVENT * 20 + b"0\r\n\r\n" if streams else JSON_ANSWER)


class Reply:
    def __init__(self):
        self.complete = False

    def on_message_complete(self):
        self.complete = True


def rss_kib(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * _PAGE_KIB


def open_files(pid: int) -> int:
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))


def count_tasks(process: subprocess.Popen[str]) -> int:
    """The asyncio tasks of a router that ``serve_counting`` runs."""
    assert process.stdout is not None
    process.send_signal(signal.SIGUSR1)
    return int(process.stdout.readline())


def serve_counting(argv: list[str]) -> None:
    """launch_router, which tells the number of its tasks on SIGUSR1."""
    real = launch.serve

    async def serve(config, **how):
        asyncio.get_running_loop().add_signal_handler(
            signal.SIGUSR1, lambda: print(len(asyncio.all_tasks()), flush=True))
        await real(config, **how)

    launch.serve = serve
    launch.main(argv)


def running(port: int) -> int:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/list_workers", timeout=5) as reply:
        return sum(worker["load"] for worker in json.load(reply)["workers"])


async def client(port: int, rng: random.Random, until: float, prompts: list[str], counts: dict[str, int]) -> None:
    """Requests one after another on connections that live for some of them."""
    while time.monotonic() < until:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        for _ in range(rng.randrange(1, 200)):
            body = json.dumps({"stream": rng.random() < 0.5, "prompt": rng.choice(prompts)}).encode()
            writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: r\r\ncontent-length: %d\r\n\r\n" % len(body) + body)
            if rng.random() < 0.01:
                counts["left"] += 1
                break
            reply = Reply()
            parser = httptools.HttpResponseParser(reply)
            while not reply.complete:
                data = await reader.read(65536)
                assert data, "the router closed a connection"
                parser.feed_data(data)
            assert parser.get_status_code() == 200, parser.get_status_code()
            counts["answered"] += 1
            if time.monotonic() > until:
                break
        writer.transport.abort()


def started(port: int, urls: list[str], policy: str, *, pairs: bool) -> subprocess.Popen[str]:
    """A router in front of the workers."""
    routes = ["--worker-urls", *urls]
    if pairs:
        half = len(urls) // 2
        routes = ["--pd-disaggregation", *(word for url in urls[:half] for word in ("--prefill", url, "8998")),
                  *(word for url in urls[half:] for word in ("--decode", url))]
    argv = ["--port", str(port), "--policy", policy, "--log-level", "warning", *routes]
    code = f"from baton.tests.bench.router_soak import serve_counting; serve_counting({argv!r})"
    return subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)


async def ready(process: subprocess.Popen[str], port: int) -> None:
    while True:
        try:
            await asyncio.to_thread(urllib.request.urlopen, f"http://127.0.0.1:{port}/readiness", timeout=1)
            return
        except OSError:
            assert process.poll() is None, "the router ended"
            await asyncio.sleep(0.1)


async def soak(seconds: float, concurrency: int, *, pairs: bool = False, policy: str = "cache_aware") -> list[str]:
    """What is wrong after ``seconds`` of load."""
    loop, rng = asyncio.get_running_loop(), random.Random(1)
    servers = [await loop.create_server(Worker, "127.0.0.1", 0) for _ in range(4)]
    urls = [f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}" for server in servers]
    port = free_port()
    process = started(port, urls, policy, pairs=pairs)
    try:
        await ready(process, port)
        await asyncio.sleep(2)  # Subscriptions and the first health checks.
        prompts = [f"{i} " + "word " * 400 for i in range(2000)]
        counts = {"answered": 0, "left": 0}
        begun = time.monotonic()
        idle_files, idle_tasks = open_files(process.pid), await asyncio.to_thread(count_tasks, process)
        clients = [loop.create_task(client(port, rng, begun + seconds, prompts, counts)) for _ in range(concurrency)]
        warm, warm_kib = begun + seconds / 3, 0
        while any(not task.done() for task in clients):
            await asyncio.wait(clients, timeout=max(1.0, seconds / 15))
            if not warm_kib and time.monotonic() >= warm:
                warm_kib = rss_kib(process.pid)
            print(f"{time.monotonic() - begun:6.0f} s  {counts['answered']:9,} answered  {counts['left']:6,} left  "
                  f"RSS {rss_kib(process.pid) / 1024:6.1f} MiB  files {open_files(process.pid)}  "
                  f"tasks {await asyncio.to_thread(count_tasks, process)}", flush=True)
        for task in clients:
            task.result()
        await asyncio.sleep(6)  # Idle connections to workers live for 4 s.
        grown = (rss_kib(process.pid) - warm_kib) / 1024
        load, files = await asyncio.to_thread(running, port), open_files(process.pid) - idle_files
        tasks = await asyncio.to_thread(count_tasks, process) - idle_tasks
        print(f"{counts['answered'] / seconds:,.0f} req/s; RSS grew by {grown:.1f} MiB after the warm-up; left are "
              f"{load} requests, {files} files, {tasks} tasks more than before.")
        bounds = {f"RSS grew by {grown:.1f} MiB": grown < 8, f"{load} requests are left": load == 0,
                  f"{files} files are left": files <= 8, f"{tasks} tasks are left": tasks <= 4}
        return [fault for fault, kept in bounds.items() if not kept]
    finally:
        process.terminate()
        process.wait()
        for server in servers:
            server.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--concurrency", type=int, default=64)
    parser.add_argument("--pairs", action="store_true", help="two prefill and two decode workers")
    parser.add_argument("--policy", default="cache_aware")
    args = parser.parse_args()
    faults = uvloop.run(soak(args.seconds, args.concurrency, pairs=args.pairs, policy=args.policy))
    print("FAIL: " + "; ".join(faults) if faults else "PASS")
    sys.exit(1 if faults else 0)


if __name__ == "__main__":
    main()
