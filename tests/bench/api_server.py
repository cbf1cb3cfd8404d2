"""CPU time of the API server process for each token that it streams, over a fake engine.

    python -m baton.tests.bench.api_server [--streams 256] [--rate 10000] [--intervals 1,8] [--output figures.json]

The engine gives each stream a token in every step, at ``--rate`` tokens a second over all streams. Reported are the
microseconds of the API server's CPU a token, the tokens a second that one core could stream at that cost, and the rate
that arrived: the cost is valid only where that is ``--rate``, for outputs that queue up are cheaper.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import tempfile
import time
from pathlib import Path
from typing import Any

from ..helpers.fake_engine import make_checkpoint
from ..helpers.serving import Server

TOKENS = 400  # of each stream
CLOCK_TICKS = os.sysconf("SC_CLK_TCK")


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / CLOCK_TICKS


async def read_stream(port: int, path: str, body: dict[str, Any]) -> int:
    """The number of events of one stream; the client does little work, for it shares the machine."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    payload = json.dumps(body).encode()
    head = (f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nConnection: close\r\n"
            f"Content-Length: {len(payload)}\r\n\r\n")
    writer.write(head.encode() + payload)
    events, tail = 0, b""
    while chunk := await reader.read(1 << 16):
        joined = tail + chunk
        events += joined.count(b"data: ") - tail.count(b"data: ")
        tail = joined[-5:]
    writer.close()
    assert events > 1, joined
    return events


def bodies(path: str) -> dict[str, Any]:
    shared = {"stream": True, "max_tokens": TOKENS, "ignore_eos": True}
    if path == "/v1/chat/completions":
        return shared | {"messages": [{"role": "user", "content": "hello world the quick brown fox"}]}
    return shared | {"prompt": "hello world the quick brown fox"}


async def load(server: Server, path: str, streams: int) -> tuple[float, float, int]:
    """CPU seconds of the API server, seconds, and events."""
    before, began = cpu_seconds(server.process.pid), time.monotonic()
    events = await asyncio.gather(*(read_stream(server.port, path, bodies(path)) for _ in range(streams)))
    return cpu_seconds(server.process.pid) - before, time.monotonic() - began, sum(events)


def measure(folder: Path, streams: int, rate: float, interval: int) -> list[dict[str, Any]]:
    os.environ["FAKE_ENGINE_STEP_SECONDS"] = str(streams / rate)
    server = Server(folder / "log", "--model-path", str(folder / "model"), "--stream-interval", str(interval))
    rows = []
    try:
        server.wait_ready()
        for path in ("/v1/chat/completions", "/v1/completions"):
            asyncio.run(load(server, path, 8))  # warm up
            cpu, seconds, events = asyncio.run(load(server, path, streams))
            tokens = streams * TOKENS
            rows.append({"path": path, "stream_interval": interval, "us_a_token": 1e6 * cpu / tokens,
                         "one_core": tokens / cpu, "tokens_a_second": tokens / seconds, "events": events})
    finally:
        server.kill()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--rate", type=float, default=10_000)
    parser.add_argument("--intervals", default="1,8")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "model").mkdir()
        make_checkpoint(folder / "model")
        rows = [row for interval in map(int, args.intervals.split(","))
                for row in measure(folder, args.streams, args.rate, interval)]
    print(f"{'path':24}{'interval':>9}{'us/token':>10}{'one core':>12}{'came':>12}  tok/s")
    for row in rows:
        print(f"{row['path']:24}{row['stream_interval']:9}{row['us_a_token']:10.1f}{row['one_core']:12.0f}"
              f"{row['tokens_a_second']:12.0f}")
    if args.output:
        args.output.write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    main()
