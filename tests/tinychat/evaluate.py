"""Asks a running server tinychat's held-out questions through OpenAI's chat API, and counts the right answers.

``python -m baton.tests.tinychat.evaluate --base-url http://127.0.0.1:8000`` prints a table by task, writes
``--json`` if asked, and exits with status 1 where fewer than ``--threshold`` of the answers are right.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import aiohttp

from . import tasks

MAX_ANSWER_TOKENS = 192
REQUEST_SECONDS = 300.0


@dataclass(frozen=True)
class Outcome:
    """One question asked: the assistant message that came, or the error that came instead."""

    task: str
    question: str
    wanted: str
    message: dict[str, Any] | None
    error: str | None
    right: bool
    seconds: float


async def ask(session: aiohttp.ClientSession, url: str, model: str, example: tasks.Example) -> Outcome:
    """Ask greedily; an HTTP error or a broken connection is a wrong answer that says why."""
    body: dict[str, Any] = {"model": model, "messages": example.messages, "temperature": 0,
                            "max_tokens": MAX_ANSWER_TOKENS}
    if example.tools:
        body["tools"] = example.tools
    started, message, error = time.monotonic(), None, None
    try:
        async with session.post(f"{url}/v1/chat/completions", json=body) as response:
            text = await response.text()
            if response.status == 200:
                message = json.loads(text)["choices"][0]["message"]
            else:
                error = f"HTTP {response.status}: {text[:200]}"
    except (aiohttp.ClientError, asyncio.TimeoutError, ValueError, LookupError) as failure:
        error = f"{type(failure).__name__}: {failure}"
    right = message is not None and tasks.matches(example, message)
    return Outcome(example.task, example.question, example.answer, message, error, right, time.monotonic() - started)


async def served_model(session: aiohttp.ClientSession, url: str) -> str:
    """The first model that the server lists; raises aiohttp.ClientError where it cannot be asked."""
    async with session.get(f"{url}/v1/models", raise_for_status=True) as response:
        return (await response.json())["data"][0]["id"]


async def ask_all(base_url: str, examples: Sequence[tasks.Example], *, concurrency: int, model: str | None = None,
                  api_key: str | None = None) -> list[Outcome]:
    """Ask every example, at most ``concurrency`` at a time; outcomes are in the examples' order.

    ``model`` None means the first that the server lists. Raises aiohttp.ClientError if that listing fails.
    """
    url = base_url.rstrip("/").removesuffix("/v1")
    gate = asyncio.Semaphore(concurrency)
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    timeout = aiohttp.ClientTimeout(total=REQUEST_SECONDS)
    connector = aiohttp.TCPConnector(limit=concurrency)
    async with aiohttp.ClientSession(headers=headers, timeout=timeout, connector=connector) as session:
        name = model or await served_model(session, url)

        async def gated(example: tasks.Example) -> Outcome:
            async with gate:
                return await ask(session, url, name, example)

        return await asyncio.gather(*map(gated, examples))


def table(outcomes: Sequence[Outcome]) -> str:
    """Right answers and mean seconds by task, the total last."""
    lines = [f"{'task':<10} {'right':>11} {'exact match':>12} {'seconds':>8}"]
    for name in (*tasks.TASKS, "all"):
        chosen = [outcome for outcome in outcomes if name in (outcome.task, "all")]
        if chosen:
            right = sum(outcome.right for outcome in chosen)
            seconds = sum(outcome.seconds for outcome in chosen) / len(chosen)
            lines.append(f"{name:<10} {f'{right} / {len(chosen)}':>11} {right / len(chosen):>12.1%} {seconds:>8.2f}")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m baton.tests.tinychat.evaluate",
                                     description="Measure tinychat's exact match through an OpenAI-compatible server.")
    parser.add_argument("--base-url", default="http://127.0.0.1:8000", help="server or router (default: %(default)s)")
    parser.add_argument("--model", help="model name to send (default: the first that the server lists)")
    parser.add_argument("--api-key", help="sent as a bearer token")
    parser.add_argument("--count", type=int, default=240, help="questions, tasks taking turns (default: %(default)s)")
    parser.add_argument("--tasks", nargs="+", choices=tasks.TASKS, help="only these tasks")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--concurrency", type=int, default=8, help="requests in flight (default: %(default)s)")
    parser.add_argument("--threshold", type=float, default=0.95, help="share that must be right (default: %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every outcome to this file")
    args = parser.parse_args(argv)
    examples = tasks.held_out(args.count, args.seed, args.tasks)
    outcomes = asyncio.run(ask_all(args.base_url, examples, model=args.model, concurrency=args.concurrency,
                                   api_key=args.api_key))
    share = sum(outcome.right for outcome in outcomes) / max(1, len(outcomes))
    print(table(outcomes))
    for outcome in [outcome for outcome in outcomes if not outcome.right][:20]:
        answer = outcome.error or json.dumps(outcome.message)
        print(f"wrong: {outcome.task}: {outcome.question[-100:]!r}: {answer}, not {outcome.wanted!r}")
    if args.json:
        args.json.write_text(json.dumps({"exact_match": share, "outcomes": [asdict(outcome) for outcome in outcomes]},
                                        indent=1) + "\n", encoding="utf-8")
    return 0 if share >= args.threshold else 1


if __name__ == "__main__":
    sys.exit(main())
