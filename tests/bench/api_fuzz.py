"""Fuzz the servers' API from its OpenAPI document: whatever clients send, no 5xx, no hang, nothing left behind.

    python tests/bench/api_fuzz.py --requests 20000 --seed 1

Starts a whole server of tinychat, and a router with one prefill and one decode server, and sends each of them half of
the requests: bodies that the document's schemas allow, then bent (other types, boundary numbers, deep nesting, odd
Unicode, huge integers, unknown fields, missing ones, torn JSON), with wrong methods and bad headers. Every generation
is bound to a few tokens. Afterwards the servers must be healthy and idle, must hold no page, and must have logged no
traceback. A failing request is printed; the seed makes it again.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections import Counter
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httptools

from baton.tests.bench.api_requests import TEXTS, Requests
from baton.tests.helpers.harness import Cluster, Server, post_json
from baton.tests.helpers.ports import free_port


class Reply:
    """One answer as it arrives."""

    def __init__(self) -> None:
        self.status = 0
        self.complete = False
        self.body = b""
        self.parser = httptools.HttpResponseParser(self)

    def on_headers_complete(self) -> None:
        self.status = self.parser.get_status_code()

    def on_body(self, data: bytes) -> None:
        self.body += data

    def on_message_complete(self) -> None:
        self.complete = self.status >= 200


async def ask(url: str, method: str, sent: bytes, seconds: float) -> Reply:
    """Raises TimeoutError where no whole answer comes."""
    parts = urlsplit(url)
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
    reply = Reply()
    end = time.monotonic() + seconds
    try:
        writer.write(sent)
        while not reply.complete and not (method == "HEAD" and reply.status >= 200):
            data = await asyncio.wait_for(reader.read(65536), max(0.01, end - time.monotonic()))
            if not data:
                break
            reply.parser.feed_data(data)
    except ConnectionError:
        pass  # an answer may come before the whole request was read
    finally:
        writer.transport.abort()
    return reply


async def fuzz(url: str, document: dict[str, Any], count: int, seed: int, *, concurrency: int = 8,
               seconds: float = 60.0) -> Counter[int]:
    """Send ``count`` requests to ``url``; returns the statuses. Raises AssertionError with the request that failed."""
    requests = Requests(document, random.Random(seed))
    statuses: Counter[int] = Counter()
    failures: list[str] = []
    left = count

    async def client() -> None:
        nonlocal left
        while left > 0 and len(failures) < 10:
            left -= 1
            method, sent = requests.next()
            try:
                reply = await ask(url, method, sent, seconds)
            except (TimeoutError, asyncio.TimeoutError):
                failures.append(f"no answer within {seconds} s to {sent[:3000]!r}")
                continue
            statuses[reply.status] += 1
            if not 200 <= reply.status < 500:
                failures.append(f"{reply.status} {reply.body[:500]!r} for {sent[:3000]!r}")
            _remember(requests.schemas.known, sent, reply)

    await asyncio.gather(*[client() for _ in range(concurrency)])
    assert not failures, "\n\n".join(failures)
    return statuses


def _remember(known: dict[str, list[str]], sent: bytes, reply: Reply) -> None:
    """Ids of what was made, for paths that name them."""
    for start, name in ((b"POST /v1/files ", "file_id"), (b"POST /v1/batches ", "batch_id")):
        if sent.startswith(start) and reply.status == 200:
            known[name] = [*known[name][-20:], json.loads(reply.body)["id"]]


def assert_well(front: Server, workers: list[Server], seconds: float = 60.0) -> None:
    """The servers answer, are idle, hold no page, and logged no traceback."""
    for server in workers:
        end = time.monotonic() + seconds
        while (state := server.state())["num_running"] or state["num_waiting"] or state["num_transferring"]:
            assert time.monotonic() < end, f"still busy: {state} {server!r}"
            time.sleep(0.1)
        server.assert_clean(10)
    status, answer = post_json(front.url + "/v1/chat/completions", {
        "model": "tinychat", "max_tokens": 20, "messages": [{"role": "user", "content": TEXTS[0]}]})
    assert status == 200 and answer["choices"][0]["message"]["content"], answer
    for server in {front, *workers}:
        assert "Traceback" not in server.log.read_text(), repr(server)


def document_of(url: str) -> dict[str, Any]:
    with urllib.request.urlopen(url + "/openapi.json", timeout=10) as answer:
        return json.load(answer)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", choices=("whole", "pair"))
    args = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="baton-api-fuzz-"))
    print("logs:", folder, flush=True)
    if args.only != "pair":
        argv = ["server", "--model-path", "tinychat", "--device", "cpu", "--log-level", "warning",
                "--file-storage-path", str(folder / "whole")]
        server = Server("baton.launch", argv, free_port(), folder / "server.log").start()
        try:
            server.wait_ready()
            _report("whole", server, [server], args.requests // 2, args.seed)
        finally:
            server.stop()
    if args.only != "whole":
        cluster = Cluster(folder)
        cluster.decode[0].argv += ["--file-storage-path", str(folder / "pair")]
        with cluster:
            _report("pair", cluster.router, cluster.workers, args.requests // 2, args.seed + 1)


def _report(name: str, front: Server, workers: list[Server], count: int, seed: int) -> None:
    began = time.monotonic()
    statuses = asyncio.run(fuzz(front.url, document_of(workers[-1].url), count, seed))
    assert_well(front, workers)
    print(f"{name}: {count} requests in {time.monotonic() - began:.0f} s:", dict(sorted(statuses.items())), flush=True)


if __name__ == "__main__":
    sys.exit(main())
