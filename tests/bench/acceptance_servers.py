"""Acceptance of real servers in every deployment, compared with one unified server's.

    python -m baton.tests.bench.acceptance_servers [--algorithms EAGLE3 ...] [--deployments "PD, TP 2" ...]

Greedy and seeded requests, with several answers, log-probabilities, penalties and grammars, are asked at once, then
again over the prefix caches. Prints a Markdown table, and exits with status 1 where a text differs from plain
decoding's, accepted drafts by more than 1 %, or cached tokens are more than a page fewer than plain decoding's.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..helpers.acceptance_parity import ALGORITHMS, PAGE_SIZE, TASKS, TREES, Prompts, algorithm_flags
from ..helpers.harness import Cluster, Server
from ..helpers.json_schemas import BY_HAND
from ..helpers.many_requests import generate_all
from ..helpers.ports import free_port
from ..tinychat.tasks import held_out

START_SECONDS = 240.0
TP2 = ("--tp-size", "2")
DP2 = (*TP2, "--dp-size", "2", "--enable-dp-attention")
_ROOMY = ("--max-total-tokens", "16384")
_CROWDED = ("--max-total-tokens", "800", "--schedule-conservativeness", "0")
"""Room for a tenth of the requests."""
_TIERS = (*_CROWDED, "--enable-hierarchical-cache", "--hicache-size", "0.1", "--hicache-load-policy", "always")


@dataclass(frozen=True)
class Deployment:
    """Flags of a server, or of both servers of a pair and of each. ``counters`` must be above 0 at the end, on one of
    its servers."""

    both: Sequence[str] = _ROOMY
    prefill: Sequence[str] | None = None
    decode: Sequence[str] = ()
    counters: Sequence[str] = ()

    @property
    def is_pair(self) -> bool:
        return self.prefill is not None

    @property
    def is_crowded(self) -> bool:
        """True where steps have no pages for all drafts: fewer are verified, and none more may be rejected."""
        return self.both[:2] == _CROWDED[:2]


DEPLOYMENTS = {
    "unified": Deployment(), "TP 2": Deployment((*_ROOMY, *TP2)), "DP attention": Deployment((*_ROOMY, *DP2)),
    "mixed chunk": Deployment((*_ROOMY, "--enable-mixed-chunk", "--chunked-prefill-size", "128")),
    "retraction": Deployment(_CROWDED, counters=("retracted_requests",)),
    "priority": Deployment((*_CROWDED, "--enable-priority-scheduling", "--priority-scheduling-preemption-threshold",
                            "0"), counters=("preempted_requests",)),
    "host tier": Deployment(_TIERS, counters=("tier_pages_loaded",)),
    "PD": Deployment(prefill=()), "PD, TP 2": Deployment((*_ROOMY, *TP2), prefill=()),
    "PD, TP 2 to 1": Deployment(prefill=TP2), "PD, TP 1 to 2": Deployment(prefill=(), decode=TP2),
    "PD, DP attention": Deployment((*_ROOMY, *DP2), prefill=()),
    "PD, retraction": Deployment(_CROWDED, prefill=(), counters=("retracted_requests",)),
    "PD, priority": Deployment((*_CROWDED, "--enable-priority-scheduling", "--priority-scheduling-preemption-threshold",
                                "0"), prefill=(), counters=("retracted_requests",)),
    "PD, host tier": Deployment(_TIERS, prefill=(), counters=("tier_pages_loaded",)),
}


def bodies(count: int) -> list[dict[str, Any]]:
    """``count`` requests to /generate; a third have answers so long that a small pool has no pages for all."""
    long = {"max_new_tokens": 80, "ignore_eos": True}
    prompts, kinds = Prompts(), (
        long, {"temperature": 0.8, **long}, {}, {"json_schema": BY_HAND["flat"]}, {"temperature": 1.0, "n": 2},
        {"frequency_penalty": 0.4})
    found = []
    for number, example in enumerate(held_out(count, seed=5, tasks=TASKS)):
        sampling = {"temperature": 0.0, "max_new_tokens": 40, "sampling_seed": number, **kinds[number % len(kinds)]}
        found.append({"input_ids": prompts.ids(example), "sampling_params": sampling, "priority": number % 5,
                      "return_logprob": number % 6 == 2, "top_logprobs_num": 2 if number % 6 == 2 else 0})
    return found


@dataclass
class Results:
    """Answers by requests, and what they counted."""

    tokens: list[list[int]]
    steps: list[int]
    accepted: list[int]
    drafts: list[int]
    cached: list[int]
    logprobs: list[list[float]]

    @property
    def length(self) -> float:
        """Tokens of a verify step."""
        return 1 + sum(self.accepted) / max(1, sum(self.steps))

    @property
    def rejected(self) -> int:
        return sum(self.drafts) - sum(self.accepted)


def ask(url: str, asked: Sequence[dict[str, Any]], concurrency: int) -> Results:
    replies = asyncio.run(generate_all(url, asked, concurrency))
    assert all(status == 200 for status, _ in replies), [body for status, body in replies if status != 200][:3]
    choices = [choice for _, body in replies for choice in (body if isinstance(body, list) else [body])]
    metas = [choice["meta_info"] for choice in choices]
    return Results([choice["output_ids"] for choice in choices], [meta.get("spec_verify_ct", 0) for meta in metas],
                   [meta.get("spec_accept_token_num", 0) for meta in metas],
                   [meta.get("spec_draft_token_num", 0) for meta in metas],
                   [meta["cached_tokens"] for meta in metas],
                   [[value for value, *_ in meta.get("output_token_logprobs") or ()] for meta in metas])


@contextmanager
def started(deployment: Deployment, algorithm: Sequence[str], logs: Path) -> Iterator[tuple[str, list[Server]]]:
    """Starts a deployment; yields its URL and its workers."""
    flags = ["--page-size", str(PAGE_SIZE), "--random-seed", "3", *deployment.both]
    if not deployment.is_pair:
        server = Server("baton.launch", ["server", "--model-path", "tinychat", "--device", "cpu", "--log-level",
                                         "warning", *flags, *algorithm], free_port(), logs / "server.log").start()
        try:
            yield server.wait_ready(START_SECONDS).url, [server]
            assert server.stop() == 0, repr(server)
        finally:
            if server.process is not None and server.process.poll() is None:
                server.kill()
        return
    everywhere, decode = (algorithm, ()) if "NGRAM" not in algorithm else ((), algorithm)
    with Cluster(logs, flags=[*flags, *everywhere], prefill_flags=list(deployment.prefill or ()),
                 decode_flags=[*deployment.decode, *decode], start_seconds=START_SECONDS) as cluster:
        yield cluster.url, cluster.workers


def run(deployment: Deployment, algorithm: Sequence[str], asked: Sequence[dict[str, Any]],
        concurrency: int) -> tuple[Results, Results, float]:
    """The answers of two rounds, and the seconds that both took."""
    with tempfile.TemporaryDirectory() as folder, started(deployment, algorithm, Path(folder)) as (url, workers):
        begun = time.monotonic()
        rounds = ask(url, asked, concurrency), ask(url, asked, concurrency)
        seconds = time.monotonic() - begun
        for server in workers:
            server.assert_clean(30)
        counters = [server.state()["counters"] for server in workers]
        for name in deployment.counters:
            assert any(each.get(name, 0) for each in counters), f"no {name}: {counters}"
    return *rounds, seconds


def problems(deployment: Deployment, found: Results, plain: Results, expected: Results) -> list[str]:
    """Faults of a round."""
    wrong = []
    if different := sum(one != other for one, other in zip(found.tokens, plain.tokens)):
        wrong.append(f"{different} answers differ")
    if any(abs(x - y) > 1e-3 for one, other in zip(found.logprobs, plain.logprobs) for x, y in zip(one, other)):
        wrong.append("log-probabilities differ")
    if deployment.is_crowded:
        if found.rejected > 1.02 * expected.rejected + 2:
            wrong.append(f"rejected {found.rejected} drafts, not {expected.rejected}")
    elif abs(found.length - expected.length) > 0.01 * expected.length:
        wrong.append(f"acceptance length {found.length:.3f}, not {expected.length:.3f}")
    return wrong


def fewer_cached(deployment: Deployment, found: Results, plain: Results) -> list[str]:
    """Faults of the cached tokens of a round whose prompts were all computed before. Attention groups have
    caches of their own."""
    if deployment.is_crowded or "--enable-dp-attention" in deployment.both:
        return []
    fewer = max(other - one for one, other in zip(found.cached, plain.cached))
    return [f"{fewer} tokens fewer are cached"] if fewer > PAGE_SIZE else []


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m baton.tests.bench.acceptance_servers")
    parser.add_argument("--algorithms", nargs="+", choices=(*ALGORITHMS, *TREES), default=ALGORITHMS)
    parser.add_argument("--deployments", nargs="+", choices=tuple(DEPLOYMENTS), default=tuple(DEPLOYMENTS))
    parser.add_argument("--count", type=int, default=36, help="requests (default: 36)")
    parser.add_argument("--concurrency", type=int, default=16)
    args = parser.parse_args(argv)
    asked, failures = bodies(args.count), 0
    print("| deployment | algorithm | steps | drafts | accepted | acceptance length | expected | cached | seconds | |\n"
          f"{'|---' * 10}|", flush=True)
    plain = {pair: run(Deployment(prefill=() if pair else None), (), asked, args.concurrency)
             for pair in sorted({DEPLOYMENTS[name].is_pair for name in args.deployments})}
    for algorithm in args.algorithms:
        flags = algorithm_flags(algorithm)
        expected = run(Deployment(), flags, asked, args.concurrency)
        for name in args.deployments:
            deployment, cells, wrong = DEPLOYMENTS[name], [""] * 7, []
            try:
                *rounds, seconds = run(deployment, flags, asked, args.concurrency)
                for found, of_plain, of_unified in zip(rounds, plain[deployment.is_pair], expected):
                    wrong += problems(deployment, found, of_plain, of_unified)
                wrong += fewer_cached(deployment, rounds[1], plain[deployment.is_pair][1])
                both = [sum(sum(getattr(each, field)) for each in rounds)
                        for field in ("steps", "drafts", "accepted", "cached")]
                cells = [*map(str, both[:3]), f"{rounds[0].length:.3f}", f"{expected[0].length:.3f}", str(both[3]),
                         f"{seconds:.1f}"]
            except (AssertionError, OSError) as error:
                wrong.append(str(error)[:600])
            failures += bool(wrong)
            print(f"| {' | '.join([name, algorithm, *cells, '; '.join(wrong)])} |", flush=True)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
