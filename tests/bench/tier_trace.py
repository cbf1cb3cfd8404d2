"""What KV tiers are worth under a trace: 1P1D with and without them, beside a cache that forgets nothing.

    python -m baton.tests.bench.tier_trace --trace /work/shared/traces/mooncake_conversation.jsonl --out results.json

Replays whole conversations of the trace (Mooncake's form, arXiv 2407.00079), a sample of those with several turns, in
``--seconds`` instead of the trace's hour: once for each of these, cold, on servers without tiers and on servers with
them. What the prefill GPU keeps is limited by ``--pool-tokens``, because a sample has fewer different tokens than a day
of a cluster: of the whole trace's 94 million an H200 keeps 1 %, of 24 conversations' half a million 48,000 are 9 %.
(60 conversations of 3 turns and a pool of 200,000 tokens show nothing: GPU memory alone has 98 % of the hits.)

- hit rate: prompt tokens that prefill did not compute, by its own count: a decode server may have pages that prefill
  computes. The infinite cache's follows from the trace: the leading blocks of a prompt that an earlier prompt had.
  Answers differ from the trace's, so that later turns do not find those.
- goodput: requests a second within ``--ttft`` and ``--tpot``. SGLang's and Mooncake's word for it.
- TTFT of hits: that of requests whose prompts the infinite cache has at least half of, with tiers and without.

In the sample by default GPU memory alone finds half of what the infinite cache does. By a model of the servers
(45,000 tokens a second) without tiers 70 seconds are the best speed, and with them 24: these two are compared, and
TTFT at equal speeds. The four replays take five minutes.

On a CPU (``--shape tinychat``) blocks are ``--shrink`` times shorter: a check of the script, not a measurement.

    python -m baton.tests.bench.tier_trace --trace FILE --out results.json --shape tinychat --shrink 16 \\
        --pool-tokens 3000 --decode-tokens 20000 --host-gb 0.5 0.1 --seconds 60
"""

from __future__ import annotations

import argparse
import datetime
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import uvloop

from ...common.bench.client.answer import Answer
from ...common.bench.client.apis import APIS, RequestOptions
from ...common.bench.client.client import Client
from ...common.bench.client.load import Load
from ...common.bench.client.server_sender import ServerSender
from ...common.bench.workloads.trace import BLOCK, Line, read
from ...common.bench.workloads.workload import Conversation, Prompt, single
from ...common.garbage_collector import freeze_collector
from .relay import LLAMA_8B, Relay, dummy_flags, relay_servers

VOCABULARY = 4000


@dataclass(frozen=True)
class Request:
    """A line of the trace. ``num_known``: leading tokens that an infinite cache has when it comes."""

    due: float
    ids: list[int]
    output_len: int
    num_known: int


def sample(lines: Sequence[Line], *, conversations: int, min_turns: int, max_length: int, seed: int) -> list[Line]:
    """The lines of a random sample of conversations, by time. A conversation is known by its prompts' second block: the
    first is a system prompt of all."""
    turns: dict[int, list[Line]] = {}
    for line in lines:
        if len(line.hash_ids) > 1 and line.input_length <= max_length:
            turns.setdefault(line.hash_ids[1], []).append(line)
    long = sorted(name for name, each in turns.items() if len(each) >= min_turns)
    chosen = random.Random(seed).sample(long, min(conversations, len(long)))
    return sorted((line for name in chosen for line in turns[name]), key=lambda line: line.timestamp)


def requests_of(lines: Sequence[Line], *, seconds: float, shrink: int, page_size: int, seed: int) -> list[Request]:
    """The lines as requests that are due within ``seconds``."""
    block, seen, made = BLOCK // shrink, set[int](), []
    span = (lines[-1].timestamp - lines[0].timestamp) or 1.0
    for number, line in enumerate(lines):
        length = max(1, line.input_length // shrink)
        known = next((i for i, name in enumerate(line.hash_ids) if name not in seen), len(line.hash_ids)) * block
        seen.update(line.hash_ids)
        ids: list[int] = []
        for name in line.hash_ids:
            ids += random.Random(f"{seed}-{name}").choices(range(3, VOCABULARY), k=block)
        ids = (ids + random.Random(f"{seed}-own-{number}").choices(range(3, VOCABULARY), k=length))[:length]
        made.append(Request((line.timestamp - lines[0].timestamp) / span * seconds, ids,
                            max(1, line.output_length // shrink), min(known, length - 1) // page_size * page_size))
    return made


async def replay(url: str, requests: Sequence[Request]) -> tuple[Load, list[Answer]]:
    """Returns the load, and the answers in the order of ``requests``."""
    conversations: list[Conversation] = [
        single(Prompt(len(request.ids), ids=request.ids), request.output_len, request.due) for request in requests]
    client = Client(url, {}, 600.0, time.perf_counter)
    freeze_collector()
    load = Load(ServerSender(client, APIS["baton"], RequestOptions()), time.perf_counter)
    await load.run(conversations, [request.due for request in requests])
    client.close()
    by_prompt = {id(answer.prompt): answer for answer in load.answers}
    return load, [by_prompt[id(conversation.turns[0].prompt)] for conversation in conversations]


def figures(requests: Sequence[Request], answers: Sequence[Answer], duration: float, cached: float, ttft: float,
            tpot: float) -> dict[str, float | str]:
    """One replay's row; times in ms. ``cached``: prompt tokens that prefill did not compute."""
    waits, hits, good, failed = [], [], 0, ""
    for request, answer in zip(requests, answers):
        if answer.failure is not None or answer.first is None or answer.last is None:
            failed = failed or (answer.failure.message if answer.failure is not None else "no tokens")
            continue
        wait = answer.first - answer.sent
        waits.append(wait)
        if request.num_known >= len(request.ids) / 2:
            hits.append(wait)
        per_token = (answer.last - answer.first) / max(1, (answer.num_output or request.output_len) - 1)
        good += wait <= ttft and per_token <= tpot
    tokens = sum(len(request.ids) for request in requests)
    return {"requests": len(requests), "failed": len(requests) - len(waits), "first_error": failed,
            "infinite_hit_rate": sum(request.num_known for request in requests) / tokens,
            "hit_rate": cached / tokens, "goodput": good / duration, "in_slo": good / len(requests),
            "prompt_tokens_per_second": tokens / duration,
            "ttft_p50": 1e3 * statistics.median(waits or [0.0]),
            "ttft_p99": 1e3 * sorted(waits or [0.0])[int(0.99 * (len(waits) - 1))],
            "hit_ttft_p50": 1e3 * statistics.median(hits or [0.0]), "hits": len(hits)}


COLUMNS = ("requests", "failed", "infinite_hit_rate", "hit_rate", "goodput", "in_slo", "ttft_p50", "ttft_p99",
           "hit_ttft_p50", "prompt_tokens_per_second")


def table(rows: Sequence[dict]) -> str:
    lines = ["| tiers | seconds | " + " | ".join(COLUMNS) + " |", "|" + "---|" * (len(COLUMNS) + 2)]
    lines += [f"| {row['tiers']} | {row['seconds']:g} | " + " | ".join(f"{row[name]:.3g}" for name in COLUMNS) + " |"
              for row in rows]
    return "\n".join(lines)


def verdict(rows: Sequence[dict]) -> str:
    """What tiers change, at each speed and of the best goodput of all speeds."""
    lines, best = [], {}
    for row in rows:
        best[row["tiers"]] = max(best.get(row["tiers"], 0.0), row["goodput"])
    for off in (row for row in rows if row["tiers"] == "off"):
        on = next((row for row in rows if row["tiers"] == "on" and row["seconds"] == off["seconds"]), None)
        if on is not None:
            lines.append(f"{off['seconds']:g} s: {100 * on['hit_rate'] / max(1e-9, on['infinite_hit_rate']):.1f} % of "
                         f"the infinite cache's hit rate (off {100 * off['hit_rate'] / off['infinite_hit_rate']:.1f} "
                         f"%), goodput x{on['goodput'] / max(1e-9, off['goodput']):.2f}, TTFT p50 of hits "
                         f"{off['hit_ttft_p50']:.0f} -> {on['hit_ttft_p50']:.0f} ms "
                         f"(x{off['hit_ttft_p50'] / max(1e-9, on['hit_ttft_p50']):.1f})")
    if len(best) == 2:
        lines.append(f"best goodput: {best['off']:.2f} -> {best['on']:.2f} requests/s "
                     f"(x{best['on'] / max(1e-9, best['off']):.2f})")
    return "\n".join(lines)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--logs", type=Path, default=None)
    parser.add_argument("--shape", choices=("8b", "tinychat"), default="8b")
    parser.add_argument("--gpus", type=int, nargs=2, default=(0, 1), help="of prefill and decode")
    parser.add_argument("--conversations", type=int, default=24)
    parser.add_argument("--min-turns", type=int, default=5)
    parser.add_argument("--max-length", type=int, default=20_000, help="leave longer prompts out")
    parser.add_argument("--shrink", type=int, default=1, help="divide all lengths by this")
    parser.add_argument("--seconds", type=float, nargs="+", default=[70.0, 24.0])
    parser.add_argument("--pool-tokens", type=int, default=48_000, help="of the prefill server's GPU")
    parser.add_argument("--decode-tokens", type=int, default=350_000, help="of the decode server's GPU")
    parser.add_argument("--host-gb", type=float, nargs=2, default=(80.0, 8.0), help="of prefill and decode")
    parser.add_argument("--storage", type=Path, help="folder that both servers share as --hicache-storage-backend file")
    parser.add_argument("--tiers", nargs="+", choices=("off", "on"), default=["on", "off"])
    parser.add_argument("--ttft", type=float, default=1.0, help="seconds of the SLO")
    parser.add_argument("--tpot", type=float, default=0.05, help="seconds of the SLO")
    parser.add_argument("--server-flags", default="", help="more flags of both servers")
    parser.add_argument("--seed", type=int, default=2)
    return parser.parse_args()


def flags_of(args: argparse.Namespace, tiers: str) -> tuple[list[str], list[str], list[str]]:
    """Flags of both servers, of prefill, and of decode, with ``tiers`` on or off."""
    both = args.server_flags.split()
    prefill, decode = (["--max-total-tokens", str(tokens)] for tokens in (args.pool_tokens, args.decode_tokens))
    if tiers == "on":
        both.append("--enable-hierarchical-cache")
        for own, size in zip((prefill, decode), args.host_gb):
            own += ["--hicache-size", f"{size:g}"]
        if args.storage is not None:
            both += ["--hicache-storage-backend", "file", "--hicache-storage-backend-extra-config",
                     json.dumps({"storage_dir": str(args.storage)})]
    return both, prefill, decode


def wait_for_host_memory(servers: Relay) -> None:
    """Wait until all host memory of the prefill server is pinned."""
    before = -1.0
    while (now := servers.prefill.state()["gauges"].get("hicache_host_total_tokens", 0.0)) > before:
        before = now
        time.sleep(1.0)


def measure(servers: Relay, requests: Sequence[Request], args: argparse.Namespace) -> dict:
    """The row of one replay."""
    before = servers.prefill.state()["counters"]
    load, answers = uvloop.run(replay(servers.router.url, requests))
    after = servers.prefill.state()["counters"]
    own = {name: after[name] - before[name] for name in ("tier_pages_loaded", "tier_pages_computed",
                                                         "tier_pages_evicted") if name in after}
    return {**figures(requests, answers, load.duration, after["cached_tokens"] - before["cached_tokens"], args.ttft,
                      args.tpot), **own}


def main() -> None:
    args = parse()
    logs = args.logs or Path(tempfile.mkdtemp())
    lines = sample(read(str(args.trace), sys.maxsize), conversations=args.conversations, min_turns=args.min_turns,
                   max_length=args.max_length, seed=args.seed)
    rows: list[dict] = []
    with tempfile.TemporaryDirectory() as folder:
        flags = (dummy_flags(Path(folder), LLAMA_8B | {"max_position_embeddings": 32768}) if args.shape == "8b" else
                 ["--model-path", "tinychat", "--device", "cpu", "--log-level", "warning"])
        for tiers in args.tiers:
            both, prefill, decode = flags_of(args, tiers)
            (logs / tiers).mkdir(parents=True, exist_ok=True)
            with relay_servers([*flags, *both], logs / tiers, tuple(args.gpus), prefill, decode) as servers:
                warm = requests_of(lines[:4], seconds=1.0, shrink=args.shrink, page_size=16, seed=0)
                uvloop.run(replay(servers.router.url, warm))
                wait_for_host_memory(servers)
                for number, seconds in enumerate(args.seconds, 1):  # of other tokens each: all begin cold
                    requests = requests_of(lines, seconds=seconds, shrink=args.shrink, page_size=16, seed=number)
                    rows.append({"tiers": tiers, "seconds": seconds, **measure(servers, requests, args)})
                    print(json.dumps(rows[-1]), flush=True)
                    args.out.write_text(json.dumps({"date": datetime.date.today().isoformat(),
                                                    "command": " ".join(sys.argv), "rows": rows}, indent=1))
    print(table(rows), verdict(rows), sep="\n\n")


if __name__ == "__main__":
    main()
