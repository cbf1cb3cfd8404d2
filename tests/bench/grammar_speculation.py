"""Grammar-constrained requests to a pair of servers that speculate: how many answers are invalid or aborted.

    python -m baton.tests.bench.grammar_speculation [--requests 10000] [--algorithm EAGLE3] [--concurrency 128]
        [--grammar-backend llguidance] [--server-flags "--device cuda"]

A router, a prefill server and a decode server of the shipped chat model, whose draft model drafts on both. JSON
schemas and regular expressions, greedy and sampled, with penalties and limits. The last line must say 0 and 0.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from ...common.config.server.answers import GRAMMAR_BACKENDS
from ..helpers.grammar_requests import GrammarRequest
from ..helpers.harness import Cluster
from ..helpers.many_requests import Reply, generate_all

DRAFTS = {"EAGLE3": ["--speculative-draft-model-path", "tinychat-eagle3"],
          "NEXTN": ["--speculative-draft-model-path", "tinychat-nextn"],
          "STANDALONE": ["--speculative-draft-model-path", "tinychat-draft"]}


_COMPILING = 16
"""Requests at once whose grammars are new: a server compiles 32 of a client at most."""
_SIZE = 500
"""Requests between two looks at the clock."""
_START_SECONDS = 240.0


def outcome(number: int, reply: Reply) -> str:
    """Says how a request ended; prints those that should not have ended so."""
    request, (status, body) = GrammarRequest.draw(number), reply
    if status != 200:
        print(f"request {number}: {status} {body}", file=sys.stderr)
        return "aborted"
    reason = body["meta_info"]["finish_reason"]["type"]
    if reason == "stop" and not request.is_valid(body["text"]):
        print(f"request {number}: {body['text']!r} by {request.grammar[1]}", file=sys.stderr)
        return "invalid"
    return {"stop": "whole", "length": "cut"}.get(reason, "aborted")


def ask(url: str, numbers: Iterable[int], concurrency: int) -> list[Reply]:
    bodies = []
    for number in numbers:
        request = GrammarRequest.draw(number)
        kind, source = request.grammar
        bodies.append({"text": request.question, "sampling_params": {kind: source, **request.sampling}})
    return asyncio.run(generate_all(url, bodies, concurrency))


def count_outcomes(url: str, count: int, concurrency: int, end: float) -> Counter[str]:
    """Counts the ends of requests, as many as begin before ``end``; also "steps" and "tokens" of their decoding."""
    first = {GrammarRequest.draw(number).grammar: number for number in range(count)}
    ask(url, first.values(), _COMPILING)
    outcomes = Counter[str]()
    for start in range(0, count, _SIZE):
        numbers = range(start, min(start + _SIZE, count))
        for number, reply in zip(numbers, ask(url, numbers, concurrency)):
            outcomes[outcome(number, reply)] += 1
            meta = reply[1].get("meta_info", {})
            outcomes["steps"] += meta.get("spec_verify_ct", 0)
            outcomes["tokens"] += max(0, meta.get("completion_tokens", 0) - 1)
        print(f"-- {numbers.stop} requests: {dict(outcomes)}", flush=True)
        if time.monotonic() > end:
            break
    return outcomes


def main() -> None:
    parser = argparse.ArgumentParser(description="Count invalid and aborted answers by grammars with speculation.")
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="time budget, with the start")
    parser.add_argument("--algorithm", choices=[*DRAFTS, "NGRAM"], default="EAGLE3")
    parser.add_argument("--concurrency", type=int, default=128)
    parser.add_argument("--grammar-backend", choices=[*GRAMMAR_BACKENDS], default="xgrammar")
    parser.add_argument("--server-flags", default="", help="further flags of both servers")
    parser.add_argument("--logs", type=Path)
    args = parser.parse_args()
    speculative = ["--speculative-algorithm", args.algorithm, *DRAFTS.get(args.algorithm, [])]
    everywhere, decoding = (speculative, []) if args.algorithm in DRAFTS else ([], speculative)
    flags = ["--page-size", "8", "--grammar-backend", args.grammar_backend, *args.server_flags.split(), *everywhere]
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        logs = args.logs or Path(folder)
        logs.mkdir(parents=True, exist_ok=True)
        with Cluster(logs, flags=flags, decode_flags=decoding, start_seconds=_START_SECONDS) as cluster:
            print(f"started in {time.monotonic() - began:.0f} s", flush=True)
            outcomes = count_outcomes(cluster.url, args.requests, args.concurrency, began + args.seconds)
            for server in cluster.workers:
                server.assert_clean(30)
    count = sum(outcomes[end] for end in ("whole", "cut", "invalid", "aborted"))
    print(f"{count} requests in {time.monotonic() - began:.0f} s, {args.algorithm}, {args.grammar_backend}: "
          f"{outcomes['whole']} whole, {outcomes['cut']} cut by their length, "
          f"{outcomes['tokens'] / max(1, outcomes['steps']):.2f} tokens a step")
    print(f"invalid {outcomes['invalid']}, aborted {outcomes['aborted']}")
    sys.exit(bool(outcomes["invalid"] or outcomes["aborted"]))


if __name__ == "__main__":
    main()
