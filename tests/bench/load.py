"""A load client for /generate: closed loop (fixed concurrency) or open loop (Poisson arrivals), random token ids.

Times are taken at the client: TTFT until the first event of a stream, ITL between events, TPOT the mean after the first
token, all in milliseconds.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from dataclasses import dataclass, field

import aiohttp


@dataclass(frozen=True)
class Workload:
    """``requests`` prompts of ``input_tokens``, each answered with exactly ``output_tokens`` tokens.

    ``rate`` (requests a second) makes it an open loop; then ``concurrency`` is not used.
    """

    input_tokens: int
    output_tokens: int
    requests: int
    concurrency: int = 1
    rate: float | None = None

    @property
    def name(self) -> str:
        load = f"c={self.concurrency}" if self.rate is None else f"{self.rate:g} req/s"
        return f"{self.input_tokens}/{self.output_tokens}, {self.requests}, {load}"


@dataclass
class Trace:
    """What the client saw of one request; times in seconds."""

    ttft: float = 0.0
    gaps: list[float] = field(default_factory=list)
    elapsed: float = 0.0
    tokens: int = 0
    error: str | None = None


def percentile(values: list[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else float("nan")


async def _one(session: aiohttp.ClientSession, url: str, ids: list[int], output_tokens: int) -> Trace:
    trace = Trace()
    body = {"input_ids": ids, "stream": True,
            "sampling_params": {"temperature": 0, "max_new_tokens": output_tokens, "ignore_eos": True}}
    start = last = time.perf_counter()
    try:
        async with session.post(url + "/generate", json=body) as answer:
            if answer.status != 200:
                trace.error = f"HTTP {answer.status}: {(await answer.text())[:200]}"
                return trace
            async for line in answer.content:
                if not line.startswith(b"data: {"):
                    continue
                now = time.perf_counter()
                event = json.loads(line[6:])
                if "error" in event:
                    trace.error = event["error"]["message"]
                    return trace
                if trace.tokens == 0:
                    trace.ttft = now - start
                else:
                    trace.gaps.append(now - last)
                trace.tokens, last = event["meta_info"]["completion_tokens"], now
    except aiohttp.ClientError as error:
        trace.error = repr(error)
    trace.elapsed = last - start
    if trace.tokens != output_tokens and trace.error is None:
        trace.error = f"{trace.tokens} tokens instead of {output_tokens}"
    return trace


async def run(url: str, work: Workload, *, vocab: int = 4000, seed: int = 0) -> dict[str, float | str | int]:
    """Run a workload against ``url``; returns one row of figures."""
    rng = random.Random(seed)
    prompts = [[rng.randrange(10, vocab) for _ in range(work.input_tokens)] for _ in range(work.requests)]
    connector = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(600)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout, read_bufsize=1 << 20) as s:
        start = time.perf_counter()
        if work.rate is None:
            gate = asyncio.Semaphore(work.concurrency)

            async def gated(ids: list[int]) -> Trace:
                async with gate:
                    return await _one(s, url, ids, work.output_tokens)

            traces = await asyncio.gather(*(gated(ids) for ids in prompts))
        else:
            tasks = []
            for ids in prompts:
                tasks.append(asyncio.create_task(_one(s, url, ids, work.output_tokens)))
                await asyncio.sleep(rng.expovariate(work.rate))
            traces = await asyncio.gather(*tasks)
        wall = time.perf_counter() - start
    return _row(work, list(traces), wall)


def _row(work: Workload, traces: list[Trace], wall: float) -> dict[str, float | str | int]:
    good = [t for t in traces if t.error is None]
    ttft = [1e3 * t.ttft for t in good]
    tpot = [1e3 * (t.elapsed - t.ttft) / (t.tokens - 1) for t in good if t.tokens > 1]
    gaps = [1e3 * gap for t in good for gap in t.gaps]
    return {
        "workload": work.name, "failed": len(traces) - len(good),
        "first_error": next((t.error for t in traces if t.error), ""),
        "req_s": len(good) / wall, "in_tok_s": len(good) * work.input_tokens / wall,
        "out_tok_s": sum(t.tokens for t in good) / wall,
        "ttft_p50": percentile(ttft, 0.5), "ttft_p99": percentile(ttft, 0.99),
        "tpot_p50": percentile(tpot, 0.5), "tpot_p99": percentile(tpot, 0.99),
        "itl_p50": percentile(gaps, 0.5), "itl_p99": percentile(gaps, 0.99),
    }


COLUMNS = ("req_s", "in_tok_s", "out_tok_s", "ttft_p50", "ttft_p99", "tpot_p50", "itl_p50", "itl_p99")


def table(rows: list[dict]) -> str:
    """Rows with a ``server`` key as a Markdown table; times in ms."""
    lines = ["| server | workload | failed | " + " | ".join(COLUMNS) + " |", "|" + "---|" * (len(COLUMNS) + 3)]
    for row in rows:
        figures = " | ".join(f"{row[c]:,.1f}" for c in COLUMNS)
        lines.append(f"| {row['server']} | {row['workload']} | {row['failed']} | {figures} |")
    return "\n".join(lines)
