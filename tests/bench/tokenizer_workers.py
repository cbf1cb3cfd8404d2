"""Requests a second, CPU time and pauses of a server by --tokenizer-worker-num, over an engine that only echoes.

    python -m baton.tests.bench.tokenizer_workers --workers 1 2 4 --concurrency 64 --requests 1000
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import aiohttp

from baton.tests.helpers.fake_engine import make_checkpoint
from baton.tests.helpers.serving import Server

PROMPT = "hello world, the quick brown fox jumps over the lazy dog. " * 3
TICK = os.sysconf("SC_CLK_TCK")


def cpu_seconds(pids: list[int]) -> float:
    """User and system time of processes so far."""
    total = 0
    for pid in pids:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        total += int(fields[11]) + int(fields[12])
    return total / TICK


async def request(http: aiohttp.ClientSession, tokens: int, intervals: list[float], firsts: list[float]) -> None:
    body = {"messages": [{"role": "user", "content": PROMPT}], "stream": True, "max_tokens": tokens, "ignore_eos": True}
    began = last = time.perf_counter()
    async with http.post("/v1/chat/completions", json=body) as answer:
        assert answer.status == 200, await answer.text()
        async for _ in answer.content.iter_any():
            now = time.perf_counter()
            (firsts if last == began else intervals).append(now - last)
            last = now


async def load(url: str, concurrency: int, requests: int, tokens: int) -> dict[str, float]:
    intervals: list[float] = []
    firsts: list[float] = []
    left = iter(range(requests))

    async def client(http: aiohttp.ClientSession) -> None:
        for _ in left:
            await request(http, tokens, intervals, firsts)

    async with aiohttp.ClientSession(url, connector=aiohttp.TCPConnector(limit=0)) as http:
        began = time.perf_counter()
        await asyncio.gather(*(client(http) for _ in range(concurrency)))
        seconds = time.perf_counter() - began
    cuts = statistics.quantiles(intervals, n=100)
    return {"requests_s": requests / seconds, "ttft_p50_ms": 1000 * statistics.median(firsts),
            "itl_p50_ms": 1000 * cuts[49], "itl_p99_ms": 1000 * cuts[98]}


def measure(checkpoint: Path, workers: int, args: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        server = Server(Path(folder) / "log", "--model-path", str(checkpoint), "--tokenizer-worker-num", str(workers))
        try:
            server.wait_ready()
            asyncio.run(load(server.url, args.concurrency, args.concurrency, args.tokens))
            pids = [server.process.pid, *server.children()]
            before = cpu_seconds(pids)
            found = asyncio.run(load(server.url, args.concurrency, args.requests, args.tokens))
            used = cpu_seconds(pids) - before
        finally:
            server.kill()
    return {"workers": workers, **{name: round(value, 2) for name, value in found.items()},
            "cpu_ms_a_request": round(1000 * used / args.requests, 2)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--concurrency", type=int, default=64)
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--repeat", type=int, default=1)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = make_checkpoint(Path(folder) / "tiny")
        for _ in range(args.repeat):
            for workers in args.workers:
                print(measure(checkpoint, workers, args), flush=True)


if __name__ == "__main__":
    main()
