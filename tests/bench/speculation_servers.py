"""Mixed requests to real servers in deterministic mode: a unified server and a pair that speculate must answer bit by
bit as one that decodes plainly.

    python -m baton.tests.bench.speculation_servers --count 10000 [--device cuda] [--unified NEXTN] [--pair EAGLE3]
        [--server-flags "--enable-hierarchical-cache --hicache-size 1"]

Each gets the requests in an order of its own, so that their batches differ. Tokens, ends and log-probabilities are
compared. Exits with status 1 where one differs or fails.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ..helpers.acceptance_parity import ALGORITHMS, BASE, algorithm_flags
from ..helpers.flag_engine import Answer
from ..helpers.harness import Cluster, Server
from ..helpers.many_requests import Reply, generate_all
from ..helpers.mixed_questions import Mixed, chunks, differences
from ..helpers.ports import free_port
from .speculation_oracle import POOL, difference

SIZE = 500
"""Requests between two comparisons."""
START_SECONDS = 240.0


def body_of(mixed: Mixed) -> dict[str, Any]:
    """A question as the body of a request to /generate."""
    question, params = mixed.question, mixed.question.sampling
    sampling: dict[str, Any] = {
        name: getattr(params, name) for name in (
            "temperature", "top_p", "top_k", "min_p", "max_new_tokens", "min_new_tokens", "frequency_penalty",
            "presence_penalty", "repetition_penalty", "ignore_eos", "seed")}
    sampling["stop_token_ids"] = list(params.stop_token_ids)
    sampling["logit_bias"] = {str(token): bias for token, bias in params.logit_bias.items()}
    if params.grammar is not None:
        sampling[params.grammar.kind] = params.grammar.text
    return {"input_ids": list(question.prompt), "sampling_params": sampling, **question.fields}


def answer_of(reply: Reply) -> Answer:
    status, body = reply
    if status != 200:
        return Answer(finish=f"{status} {body}")
    meta = body["meta_info"]
    return Answer(tokens=body["output_ids"], finish=meta["finish_reason"]["type"],
                  logprobs=[value for value, *_ in meta.get("output_token_logprobs") or ()],
                  cached_tokens=meta["cached_tokens"])


class Counts:
    """Answers of each deployment that differ from plain decoding's, and its verify steps, tokens and cached tokens."""

    def __init__(self) -> None:
        self.total = 0
        self.different: Counter[str] = Counter()
        self.steps: Counter[str] = Counter()
        self.tokens: Counter[str] = Counter()
        self.cached: Counter[str] = Counter()
        self.failed = 0

    def add(self, asked: Sequence[Mixed], replies: Mapping[str, Sequence[Reply]]) -> None:
        answers = {name: [*map(answer_of, of)] for name, of in replies.items()}
        self.failed += sum(status != 200 for of in replies.values() for status, _ in of)
        for name, found in answers.items():
            self.cached[name] += sum(answer.cached_tokens for answer in found)
            self.tokens[name] += sum(max(0, len(answer.tokens) - 1) for answer in found)
            self.steps[name] += sum(body["meta_info"].get("spec_verify_ct", 0)
                                    for status, body in replies[name] if status == 200)
            for place in differences(answers["plain"], found, bitwise=True):
                self.different[name] += 1
                if self.different[name] <= 5:
                    print(f"differs: {name}, request {self.total + place}, {asked[place].kind}:",
                          difference(answers["plain"][place], found[place]), flush=True)
        self.total += len(asked)

    def report(self) -> str:
        rows = [f"{name}: {self.different[name]} of {self.total} differ, "
                f"{self.tokens[name] / self.steps[name] if self.steps[name] else 1:.3f} tokens a step, "
                f"{self.cached[name]} tokens cached" for name in self.cached]
        return "\n".join([*rows, f"failed: {self.failed}"])


@contextmanager
def started(args: argparse.Namespace, folder: Path) -> Iterator[dict[str, str]]:
    """Starts all servers at once; yields the URL of each deployment."""
    flags = [*BASE, *POOL, "--device", args.device, "--enable-deterministic-inference", *args.server_flags.split()]
    deployments = {"plain": [], f"unified {args.unified}": algorithm_flags(args.unified)}
    servers = {name: Server("baton.launch", ["server", "--model-path", "tinychat", "--log-level", "warning", *flags,
                                             *own], free_port(), folder / f"{name.replace(' ', '-')}.log").start()
               for name, own in deployments.items()}
    drafts, decode = list(algorithm_flags(args.pair)), args.pair == "NGRAM"
    try:
        with Cluster(folder, flags=[*flags, *(drafts if not decode else [])], decode_flags=drafts if decode else [],
                     start_seconds=START_SECONDS) as cluster:
            urls = {name: server.wait_ready(START_SECONDS).url for name, server in servers.items()}
            yield urls | {f"pair {args.pair}": cluster.url}
            for server in (*servers.values(), *cluster.workers):
                server.assert_clean(30)
        for server in servers.values():
            assert server.stop() == 0, repr(server)
    finally:
        for server in servers.values():
            if server.process is not None and server.process.poll() is None:
                server.kill()


async def ask(urls: Mapping[str, str], asked: Sequence[Mixed], seed: int, concurrency: int) -> dict[str, list[Reply]]:
    """The replies of all deployments, which are asked at the same time."""
    async def shuffled(name: str, url: str) -> list[Reply]:
        order = random.Random(f"{seed} {name}").sample(range(len(asked)), len(asked))
        found = await generate_all(url, [body_of(asked[place]) for place in order], concurrency)
        return [reply for _, reply in sorted(zip(order, found), key=lambda each: each[0])]

    return dict(zip(urls, await asyncio.gather(*(shuffled(name, url) for name, url in urls.items()))))


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m baton.tests.bench.speculation_servers")
    parser.add_argument("--count", type=int, default=10_000, help="requests (default: 10000)")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="time budget, with the start")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--concurrency", type=int, default=64)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--unified", choices=ALGORITHMS, default="EAGLE3", help="algorithm of the unified server")
    parser.add_argument("--pair", choices=ALGORITHMS, default="EAGLE3", help="algorithm of the pair")
    parser.add_argument("--server-flags", default="", help="further flags of all servers")
    parser.add_argument("--logs", type=Path)
    args = parser.parse_args(argv)
    counts, begun = Counts(), time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        logs = args.logs or Path(folder)
        logs.mkdir(parents=True, exist_ok=True)
        with started(args, logs) as urls:
            print(f"started in {time.monotonic() - begun:.0f} s", flush=True)
            for number, asked in enumerate(chunks(args.seed, args.count, SIZE)):
                counts.add(asked, asyncio.run(ask(urls, asked, number, args.concurrency)))
                print(f"-- {counts.total} requests, {time.monotonic() - begun:.0f} s\n{counts.report()}", flush=True)
                if time.monotonic() - begun > args.seconds:
                    break
    return 1 if counts.different.total() or counts.failed else 0


if __name__ == "__main__":
    sys.exit(main())
