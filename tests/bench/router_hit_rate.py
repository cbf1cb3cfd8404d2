"""How much of their prompts workers find cached, by the router's policy, and what a worker's restart does to it.

    python -m baton.tests.bench.router_hit_rate --out results.json --peer-python /path/with/sglang-router/bin/python

Four whole tinychat servers on this machine's CPU share the work behind one router. Prompts are texts of a few dozen
families with one long beginning each; all beginnings together fill two thirds of the four caches, so a policy has to
part them among the workers. Three phases: all four workers, cold; one is killed and three go on; it is back, empty. The
hit rate is the workers' own count (``cached_tokens / prompt_tokens`` of each answer). ``--peer-python`` adds
sglang-router's cache_aware before the same workers with the same prompts. ``--pairs``: two prefill and two decode
servers, of which a prefill server is killed; what prefill servers found cached counts. Other
prompts with every seed; each policy has its turn with a seed before the next seed begins. Exit status 1 where, over the
medians of a phase, our cache_aware is below the peer's or cache_exact is not among the highest (by more than seeds
differ), or where cache_exact is not clearly above all after the restart.
"""

from __future__ import annotations

import argparse
import asyncio
import datetime
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from random import Random

import aiohttp

from ..helpers.harness import Server, get_json, post_json
from ..helpers.ports import free_port, free_ports

WORDS = ("river", "stone", "window", "garden", "morning", "letter", "bridge", "winter", "market", "mountain", "silver",
         "table", "music", "forest", "harbor", "candle", "story", "engine", "paper", "island", "doctor", "summer",
         "yellow", "kitchen", "shadow", "village", "thunder", "pocket", "mirror", "ocean")
POOL_TOKENS = 4096
PHASES = ("four workers", "one is down", "it is back, empty")
PEER = "sglang-router"
SPREAD = 0.015
"""By so much one policy's rates differ from seed to seed: less is no difference."""


def text(seed: int, count: int) -> str:
    rng = Random(seed)
    return " ".join(rng.choice(WORDS) for _ in range(count))


class Cluster:
    """Four workers that stay (whole ones, or two pairs), one of which is killed and started again."""

    def __init__(self, logs: Path, *, pairs: bool):
        flags = ["--model-path", "tinychat", "--device", "cpu", "--max-total-tokens", str(POOL_TOKENS),
                 "--max-running-requests", "16", "--log-level", "warning"]
        self.logs = logs
        self.workers: list[Server] = []
        self.routes: list[str] = ["--pd-disaggregation"] if pairs else ["--worker-urls"]
        for i, port in enumerate(free_ports(4)):
            events, bootstrap = free_ports(2)[0], free_port()  # The events' next port tells what was missed.
            module, own, route = "baton.launch", ["server"], []
            if pairs and i < 2:
                module, own = "baton.prefill.launch", ["--disaggregation-bootstrap-port", str(bootstrap)]
                route = ["--prefill", f"http://127.0.0.1:{port}", str(bootstrap)]
            elif pairs:
                module, own, route = "baton.decode.launch", [], ["--decode", f"http://127.0.0.1:{port}"]
            self.routes += route or [f"http://127.0.0.1:{port}"]
            self.workers.append(Server(module, [*own, *flags, "--kv-events-port", str(events)], port,
                                       logs / f"worker-{i}.log", OMP_NUM_THREADS="1"))

    def start(self) -> None:
        for worker in self.workers:
            worker.start()
        for worker in self.workers:
            worker.wait_ready()

    def prefilled(self) -> dict[str, float]:
        """Of pairs: what the prefill servers that are up have counted so far; empty of whole workers.

        An answer tells the larger count of its two halves, but what decode has cached saves prefill no work.
        """
        if "--prefill" not in self.routes:
            return {}
        told = [worker.state()["counters"] for worker in self.workers[:2] if worker.process.poll() is None]
        return {count: sum(counters[count] for counters in told) for count in ("prompt_tokens", "cached_tokens")}

    def flush(self) -> None:
        for worker in self.workers:
            status, body = post_json(worker.url + "/flush_cache")
            assert status == 200, body

    def router(self, policy: str, peer_python: str) -> Server:
        log = self.logs / f"router-{policy}.log"
        if policy == PEER:
            argv = ["--policy", "cache_aware", "--log-level", "warn", "--health-check-interval-secs", "1",
                    "--health-failure-threshold", "1", "--health-success-threshold", "1",
                    "--prometheus-port", str(free_port()), *self.routes]
            server = Server("sglang_router.launch_router", argv, free_port(), log)
            server.argv[0] = peer_python
            server.probe = "/health"
            return server
        argv = ["--policy", policy, "--log-level", "warning", "--health-check-interval-secs", "0.5", *self.routes]
        return Server("baton.router.launch", argv, free_port(), log)

    def stop(self) -> None:
        for worker in self.workers:
            if worker.process is not None and worker.process.poll() is None:
                worker.kill()


async def run_phase(url: str, prompts: list[str], concurrency: int) -> dict[str, int]:
    """Send all prompts; sums of the workers' counts."""
    queue = list(reversed(prompts))
    total = {"prompt_tokens": 0, "cached_tokens": 0, "failed": 0}
    async with aiohttp.ClientSession() as http:
        async def client() -> None:
            while queue:
                body = {"text": queue.pop(), "sampling_params": {"max_new_tokens": 4, "temperature": 0}}
                async with http.post(url + "/generate", json=body) as answer:
                    if answer.status != 200:
                        total["failed"] += 1
                        continue
                    meta = (await answer.json())["meta_info"]
                    total["prompt_tokens"] += meta["prompt_tokens"]
                    total["cached_tokens"] += meta["cached_tokens"]

        await asyncio.gather(*(client() for _ in range(concurrency)))
    return total


def workload(families: int, words: int, requests: int, seed: int) -> list[list[str]]:
    """Three phases' prompts: a family's beginning, then words of its own."""
    rng = Random(seed)
    base = 100_000 * seed
    beginnings = [text(base + family, words) for family in range(families)]
    return [[f"{rng.choice(beginnings)} {text(base + 10_000 + phase * requests + i, 12)}" for i in range(requests)]
            for phase in range(len(PHASES))]


def measure(cluster: Cluster, router: Server, policy: str, phases: list[list[str]],
            concurrency: int) -> dict[str, object]:
    cluster.flush()
    router.start().wait_ready()
    try:
        until_available(router, policy, 4)
        found: dict[str, object] = {"policy": policy}
        for name, prompts in zip(PHASES, phases):
            if name == PHASES[1]:
                cluster.workers[0].kill()
                until_available(router, policy, 3)
            if name == PHASES[2]:
                cluster.workers[0].start().wait_ready()
                until_available(router, policy, 4)
            before = cluster.prefilled()
            total = asyncio.run(run_phase(router.url, prompts, concurrency))
            if before:
                after = cluster.prefilled()
                total |= {count: int(after[count] - before[count]) for count in before}
            found[name] = {**total, "hit_rate": round(total["cached_tokens"] / max(1, total["prompt_tokens"]), 4)}
        return found
    finally:
        router.stop()


def until_available(router: Server, policy: str, count: int) -> None:
    """Wait until the router counts ``count`` healthy workers; the peer gets three of its checks' time."""
    if policy == PEER:
        time.sleep(4)
        return
    for _ in range(300):
        listed = get_json(router.url + "/list_workers")["workers"]
        if sum(worker["healthy"] for worker in listed) == count:
            time.sleep(1.5)  # subscriptions
            return
        time.sleep(0.1)
    raise AssertionError(f"never {count} workers: {router!r}")


def medians(rows: list[dict]) -> dict[str, dict[str, float]]:
    """Policy -> phase -> the median hit rate over the seeds."""
    policies = dict.fromkeys(row["policy"] for row in rows)
    return {policy: {phase: statistics.median(row[phase]["hit_rate"] for row in rows if row["policy"] == policy)
                     for phase in PHASES} for policy in policies}


def missed(found: dict[str, dict[str, float]]) -> list[str]:
    """What the medians should show and do not."""
    ours, exact, peer = found.get("cache_aware"), found.get("cache_exact"), found.get(PEER)
    wrong = []
    for phase in PHASES:
        if ours is not None and peer is not None and ours[phase] < peer[phase] - SPREAD:
            wrong.append(f"{phase}: cache_aware {ours[phase]:.1%} is below {PEER}'s {peer[phase]:.1%}")
        if exact is not None and any(exact[phase] < other[phase] - SPREAD for other in found.values()):
            wrong.append(f"{phase}: cache_exact's {exact[phase]:.1%} is not among the highest")
    last = PHASES[-1]
    if exact is not None and any(exact[last] < other[last] + SPREAD for other in found.values() if other is not exact):
        wrong.append(f"{last}: cache_exact's {exact[last]:.1%} is not above all others'")
    return wrong


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--policies", nargs="+", default=["round_robin", "cache_aware", "cache_exact"])
    parser.add_argument("--peer-python", default="", help=f"an interpreter with sglang-router: adds {PEER}")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--pairs", action="store_true", help="two prefill and two decode servers; a prefill is killed")
    parser.add_argument("--requests", type=int, default=240, help="a phase")
    parser.add_argument("--families", type=int, default=32)
    parser.add_argument("--words", type=int, default=300, help="of a family's beginning")
    parser.add_argument("--concurrency", type=int, default=6)
    args = parser.parse_args()
    policies = [*args.policies, *([PEER] if args.peer_python else [])]
    cluster = Cluster(Path(tempfile.mkdtemp(prefix="hit-rate-")), pairs=args.pairs)
    rows: list[dict] = []
    try:
        cluster.start()
        for seed in range(1, args.seeds + 1):
            phases = workload(args.families, args.words, args.requests, seed)
            for policy in policies:
                router = cluster.router(policy, args.peer_python)
                rows.append({"seed": seed, **measure(cluster, router, policy, phases, args.concurrency)})
                print(json.dumps(rows[-1]), flush=True)
    finally:
        cluster.stop()
    found = medians(rows)
    for policy, rates in found.items():
        print(f"{policy:15s}", *(f"{phase}: {rate:.1%}" for phase, rate in rates.items()), sep="  ")
    if args.out:
        args.out.write_text(json.dumps({
            "date": datetime.date.today().isoformat(), "command": " ".join(["router_hit_rate", *sys.argv[1:]]),
            "workers": "2 prefill + 2 decode" if args.pairs else 4, "pool_tokens": POOL_TOKENS,
            "families": args.families, "requests_a_phase": args.requests,
            "concurrency": args.concurrency, "medians": found, "rows": rows}, indent=1) + "\n")
    wrong = missed(found)
    print("FAIL: " + "; ".join(wrong) if wrong else "PASS")
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
