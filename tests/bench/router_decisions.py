"""How long the router's policies take to decide, and what cache_aware's memory costs.

    python -m baton.tests.bench.router_decisions --out results.json

Decisions are timed one by one, as the router makes them: hash the prompt, look it up, choose, reserve, record. Half of
the prompts extend one that is known, half are new; loads are those of a busy fleet. No torch, no sockets, one process.
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import sys
from collections import deque
from pathlib import Path
from random import Random
from time import perf_counter_ns

from ...router.endpoint import Endpoint
from ...router.policies.cache_aware import BLOCK, CacheAware
from ...router.policies.consistent_hash import ConsistentHash
from ...router.policies.least_loaded import LeastLoaded
from ...router.policies.power_of_two import PowerOfTwo
from ...router.registry import Reservation, Worker

PROMPT = 4096


def resident_bytes() -> int:
    fields = Path("/proc/self/statm").read_text().split()
    return int(fields[1]) * 4096


def fleet(count: int) -> tuple[Worker, ...]:
    return tuple(Worker(Endpoint.parse(f"http://10.0.{i // 250}.{i % 250 + 1}:30000")) for i in range(count))


def percentiles(times: list[int]) -> dict[str, float]:
    """Nanoseconds in, microseconds out."""
    ordered = sorted(times)
    at = {"p50": 0.5, "p99": 0.99, "p999": 0.999}
    found = {name: round(ordered[int(share * len(ordered))] / 1e3, 1) for name, share in at.items()}
    return {**found, "max": round(ordered[-1] / 1e3, 1)}


def time_decisions(policy, workers, subjects, in_flight: int) -> dict[str, float]:
    """Time ``choose`` plus reservation; each request runs until ``in_flight`` later ones have begun."""
    running: deque[Reservation] = deque()
    times = []
    for subject in subjects:
        begun = perf_counter_ns()
        running.append(Reservation(policy.choose(workers, subject).worker))
        times.append(perf_counter_ns() - begun)
        if len(running) > in_flight:
            running.popleft().release()
    return percentiles(times)


def fill(policy: CacheAware, workers, nodes: int, rng: Random) -> list[bytes]:
    """Let the policy see distinct prompts until it remembers ``nodes`` blocks; returns some of them."""
    known = []
    while len(policy.memory) < nodes:
        prompt = rng.randbytes(PROMPT)
        policy.choose(workers, prompt)
        if len(known) < 4000:
            known.append(prompt)
    return known


def cache_aware(count: int, nodes: int, decisions: int) -> dict[str, object]:
    rng, workers = Random(1), fleet(count)
    policy = CacheAware(max_tree_size=max(2**24, 4 * nodes * BLOCK // count))
    known = fill(policy, workers, nodes, rng)
    prompts = [rng.choice(known) + rng.randbytes(512) if i % 2 else rng.randbytes(PROMPT) for i in range(decisions)]
    return {"policy": "cache_aware", "workers": count, "nodes": len(policy.memory),
            **time_decisions(policy, workers, prompts, 8 * count)}


def memory(prompts: int) -> dict[str, object]:
    rng, workers = Random(2), fleet(4)
    policy = CacheAware(max_tree_size=2**30)  # no eviction: what 50,000 distinct prompts cost
    before = resident_bytes()
    for _ in range(prompts):
        policy.choose(workers, rng.randbytes(PROMPT))
    whole = resident_bytes() - before
    bounded = CacheAware()
    start = resident_bytes()
    largest = 0
    for _ in range(3 * prompts):
        bounded.choose(workers, rng.randbytes(PROMPT))
        largest = max(largest, len(bounded.memory))
    return {"prompts": prompts, "prompt_bytes": PROMPT, "grown_mb": round(whole / 1e6, 1), "nodes": len(policy.memory),
            "default_bound": {"prompts": 3 * prompts, "grown_mb": round((resident_bytes() - start) / 1e6, 1),
                              "most_nodes": largest, "node_bound": 4 * 2**24 // BLOCK}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--decisions", type=int, default=50_000)
    args = parser.parse_args()
    found_memory = memory(50_000)
    rows = [cache_aware(4, 200_000, args.decisions), cache_aware(1000, 1_000_000, args.decisions)]
    keys = [b"session-%d" % (i % 5000) for i in range(args.decisions)]
    for count in (4, 1000):
        for name, policy, subjects in (("least_loaded", LeastLoaded(), [None] * args.decisions),
                                       ("power_of_two", PowerOfTwo(Random(1)), [None] * args.decisions),
                                       ("consistent_hash", ConsistentHash(), keys)):
            rows.append({"policy": name, "workers": count, "nodes": 0,
                         **time_decisions(policy, fleet(count), subjects, 8 * count)})
    report = {"date": datetime.date.today().isoformat(), "command": "python -m baton.tests.bench.router_decisions",
              "python": platform.python_version(), "unit": "us a decision", "rows": rows, "memory": found_memory}
    json.dump(report, sys.stdout, indent=1)
    if args.out:
        args.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
