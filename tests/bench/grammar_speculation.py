"""Grammar-constrained requests to a pair of servers that speculate: how many answers are invalid or aborted.

    python -m baton.tests.bench.grammar_speculation [--requests 10000] [--algorithm EAGLE3] [--concurrency 128]
        [--grammar-backend llguidance]

A router, a prefill server and a decode server of the shipped chat model on the CPU, whose draft model drafts on both.
JSON schemas and regular expressions, greedy and sampled, with penalties and limits. The last line must say 0 and 0.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from ...common.config.server.answers import GRAMMAR_BACKENDS
from ..helpers.grammar_requests import GrammarRequest
from ..helpers.harness import Cluster, post_json

DRAFTS = {"EAGLE3": ["--speculative-draft-model-path", "tinychat-eagle3"],
          "NEXTN": ["--speculative-draft-model-path", "tinychat-nextn"],
          "STANDALONE": ["--speculative-draft-model-path", "tinychat-draft"]}


_COMPILING = 16
"""Requests at once whose grammars are new: a server compiles 32 of a client at most."""


def outcome(url: str, number: int) -> str:
    """Sends a request; says how it ended."""
    request = GrammarRequest.draw(number)
    kind, source = request.grammar
    status, reply = post_json(f"{url}/generate", {
        "text": request.question, "sampling_params": {kind: source, **request.sampling}}, timeout=600)
    if status != 200:
        print(f"request {number}: {status} {reply}", file=sys.stderr)
        return "aborted"
    reason = reply["meta_info"]["finish_reason"]["type"]
    if reason == "stop" and not request.is_valid(reply["text"]):
        print(f"request {number}: {reply['text']!r} by {source}", file=sys.stderr)
        return "invalid"
    return {"stop": "whole", "length": "cut"}.get(reason, "aborted")


def main() -> None:
    parser = argparse.ArgumentParser(description="Count invalid and aborted answers by grammars with speculation.")
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--algorithm", choices=[*DRAFTS, "NGRAM"], default="EAGLE3")
    parser.add_argument("--concurrency", type=int, default=128)
    parser.add_argument("--grammar-backend", choices=[*GRAMMAR_BACKENDS], default="xgrammar")
    args = parser.parse_args()
    speculative = ["--speculative-algorithm", args.algorithm, *DRAFTS.get(args.algorithm, [])]
    everywhere, decoding = (speculative, []) if args.algorithm in DRAFTS else ([], speculative)
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder, Cluster(
            Path(folder), flags=["--page-size", "8", "--grammar-backend", args.grammar_backend, *everywhere],
            decode_flags=decoding) as cluster, \
            ThreadPoolExecutor(_COMPILING) as few, ThreadPoolExecutor(args.concurrency) as threads:
        first = {GrammarRequest.draw(number).grammar: number for number in range(args.requests)}
        list(few.map(lambda number: outcome(cluster.url, number), first.values()))
        outcomes = Counter(threads.map(lambda number: outcome(cluster.url, number), range(args.requests)))
        for server in cluster.workers:
            server.assert_clean()
    print(f"{args.requests} requests in {time.monotonic() - began:.0f} s, {args.algorithm}, {args.grammar_backend}: "
          f"{outcomes['whole']} whole, "
          f"{outcomes['cut']} cut by their length")
    print(f"invalid {outcomes['invalid']}, aborted {outcomes['aborted']}")
    sys.exit(bool(outcomes["invalid"] or outcomes["aborted"]))


if __name__ == "__main__":
    main()
