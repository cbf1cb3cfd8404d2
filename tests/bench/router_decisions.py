"""How long the router's policies take to decide, and what their memories cost.

    python -m baton.tests.bench.router_decisions --out results.json

Decisions are timed one by one, as the router makes them: read the prompt, look it up, choose, reserve, record. Prompts
have 4 KB of text, or 1,024 token ids; a third is new, a third extends one that comes back for the first time, a third
extends one that came back before. Loads are those of a busy fleet. CPU time of the thread is judged and wall time is
shown beside it: where others use the machine, their turns are in the latter. Every figure comes from a process of its
own. No torch, no sockets. Exit status 1 where a bound is missed: 100 us at the 99th percentile; 100 MB after 50,000
distinct prompts, and for cache_exact, which knows of every page that workers hold, 256 bytes for each of these.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import json
import multiprocessing
import platform
import sys
from base64 import b64encode
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from random import Random
from time import perf_counter_ns, thread_time_ns

from ...common.api.kv_events import PromptPages, Removed, Stored, page_hashes
from ...router.config.endpoint import Endpoint
from ...router.config.policy import PolicyArgs
from ...router.net.body import RoutingFields, routing_fields
from ...router.net.http_server import Request
from ...router.policies import Policy, build_all
from ...router.policies.cache_aware import BLOCK
from ...router.policies.cache_exact import CacheExact
from ...router.policies.text_pages import text_blocks
from ...router.workers.registry import Worker
from ...router.workers.roles import WORKER_ROLES

PROMPT = 4096
IDS = 1024
PAGE = 16
PAGES = IDS // PAGE
KNOWN = 4000
MOST_US = 100.0
MOST_MB = 100.0
MOST_PAGE_BYTES = 256


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


class Router:
    """The deciding part of a router: a fleet, its policies, and requests that run for a while."""

    def __init__(self, policy: str, workers: int, *, pairs: bool, tree: int = 2**24):
        self.policies: dict[str, Policy] = dict(build_all(
            dict.fromkeys(WORKER_ROLES, policy), PolicyArgs(policy=policy, max_tree_size=tree), Random(1)))
        everyone = fleet(workers)
        self.prefills, self.decodes = (everyone[::2], everyone[1::2]) if pairs else (everyone, ())
        for worker in everyone:
            worker.role = "regular" if not pairs else "prefill" if worker in self.prefills else "decode"
        self._running: deque[Worker] = deque()
        self._most_running = 8 * workers

    @property
    def exact(self) -> CacheExact | None:
        policy = self.policies["regular"]
        return policy if isinstance(policy, CacheExact) else None

    @property
    def roles(self) -> tuple[str, ...]:
        return ("prefill", "decode") if self.decodes else ("regular",)

    def nodes(self) -> int:
        if self.exact is not None:
            return len(self.exact.kv_index)
        memories = [self.policies[role].memory for role in self.roles if hasattr(self.policies[role], "memory")]
        return sum(map(len, memories))

    def decide(self, request: Request, found: RoutingFields | None) -> list[Worker]:
        """Place a request; the oldest of those that run ends where there are many."""
        chosen = self._chosen(request, found)
        for worker in chosen:
            worker.load += 1
        self._running.extend(chosen)
        while len(self._running) > self._most_running:
            self._running.popleft().load -= 1
        return chosen

    def _chosen(self, request, found) -> list[Worker]:
        if self.decodes and self.exact is not None:
            chosen = self.exact.choose_pair(self.prefills, self.decodes, self.exact.read(request, found))
            return [chosen.prefill, chosen.decode]
        return [self.policies[role].choose(workers, self.policies[role].read(request, found)).worker
                for role, workers in zip(self.roles, (self.prefills, self.decodes))]


def asked(body: bytes) -> tuple[Request, RoutingFields | None]:
    """What the router has of a request before it decides."""
    return Request(b"POST", b"/generate", body), routing_fields(body)


def text_body(text: str) -> bytes:
    return json.dumps({"text": text, "sampling_params": {"max_new_tokens": 8}}).encode()


def new_text(rng: Random, size: int = PROMPT) -> str:
    return b64encode(rng.randbytes(size * 3 // 4)).decode()


def ids_body(ids: list[int]) -> bytes:
    return json.dumps({"input_ids": ids}).encode()


def new_ids(rng: Random, count: int = IDS) -> list[int]:
    return [rng.randrange(128_000) for _ in range(count)]


Kind = tuple[Callable[[Random], list | str], Callable[[Random], list | str], Callable[[list | str], bytes]]
KINDS: dict[str, Kind] = {
    "text": (new_text, lambda rng: new_text(rng, 512), text_body),
    "token ids": (new_ids, lambda rng: new_ids(rng, 128), ids_body)}


def hold(exact: CacheExact, prompt: list | str, worker: Worker, rng: Random) -> list[int]:
    """What a worker tells of a prompt that it computed; returns its page hashes."""
    if isinstance(prompt, list):
        hashes = page_hashes(prompt, PAGE)
    else:
        hashes = [rng.getrandbits(63) for _ in range(PAGES)]
        text = routing_fields(text_body(prompt)).routing_text
        exact.texts.learn(text_blocks(text), len(text), PromptPages(PAGES, PAGE, list(enumerate(hashes, 1))))
    exact.kv_index.apply(worker.id, [Stored(hashes, None, prompt, PAGE)])
    return hashes


def fill(router: Router, kind: str, nodes: int, rng: Random, most: int = KNOWN) -> list[list | str]:
    """Let the policies know prompts until they remember ``nodes`` blocks or pages; returns ``most`` of the prompts."""
    new, _, body = KINDS[kind]
    known: list[list | str] = []
    holders = router.prefills + router.decodes
    while len(known) < most or router.nodes() < nodes:
        prompt = new(rng)
        if router.exact is None:
            router.decide(*asked(body(prompt)))
        elif len(known) < most:
            worker = rng.choice(holders)
            hold(router.exact, prompt, worker, rng)
            router.exact.followed.add(worker.id)
        else:  # Pages of no prompt of ours: as many as there may be.
            worker = rng.choice(holders)
            router.exact.kv_index.apply(
                worker.id, [Stored([rng.getrandbits(63) for _ in range(16 * PAGES)], None, (), PAGE)])
        if len(known) < most:
            known.append(prompt)
    return known


def prompts(kind: str, known: list[list | str], count: int, rng: Random) -> Iterator[bytes]:
    new, more, body = KINDS[kind]
    fresh, again = known[:len(known) // 2], known[len(known) // 2:]
    for i in range(count):
        if i % 3 == 0:
            yield body(new(rng))
        elif i % 3 == 1 and fresh:
            yield body(fresh.pop() + more(rng))
        else:
            yield body(rng.choice(again) + more(rng))


def decisions(policy: str, workers: int, nodes: int, kind: str, pairs: bool, count: int,
              known: int = KNOWN) -> dict[str, object]:
    rng = Random(1)
    router = Router(policy, workers, pairs=pairs, tree=max(2**24, 4 * nodes * BLOCK // workers))
    back = fill(router, kind, nodes, rng, known) if nodes else [KINDS[kind][0](rng) for _ in range(known)]
    for prompt in 4 * back[known // 2:]:
        router.decide(*asked(KINDS[kind][2](prompt)))
    wall, cpu = [], []
    gc.collect()
    gc.freeze()  # The prompts made here are no part of a router: its collector must not walk millions of numbers.
    for body in prompts(kind, back, count, rng):
        request, found = asked(body)
        began, spent = perf_counter_ns(), thread_time_ns()
        router.decide(request, found)
        cpu.append(thread_time_ns() - spent)
        wall.append(perf_counter_ns() - began)
    spent = percentiles(cpu)
    return {"policy": policy, "workers": workers, "mode": "pairs" if pairs else "whole", "prompt": kind,
            "nodes": router.nodes(), "cpu_us": spent, "wall_us": percentiles(wall), "within": spent["p99"] < MOST_US}


def memory(policy: str, workers: int, kind: str, pairs: bool, count: int) -> dict[str, object]:
    """What ``count`` distinct prompts cost; cache_exact's workers tell of all they cache, 2,048 pages each at most."""
    rng = Random(2)
    router = Router(policy, workers, pairs=pairs)
    new, _, body = KINDS[kind]
    cached: dict[Worker, deque[list[int]]] = {}
    before, most_nodes = resident_bytes(), 0
    for i in range(count):
        prompt = new(rng)
        for worker in router.decide(*asked(body(prompt))):
            if router.exact is not None:
                router.exact.followed.add(worker.id)
                held = cached.setdefault(worker, deque())
                held.append(hold(router.exact, prompt, worker, rng))
                if len(held) > 2048 // PAGES:
                    router.exact.kv_index.apply(worker.id, [Removed(held.popleft())])
        if i % 1000 == 0:
            most_nodes = max(most_nodes, router.nodes())
    pages = sum(len(hashes) for held in cached.values() for hashes in held)
    grown = (resident_bytes() - before - 40 * pages) / 1e6  # ``cached`` is the workers' own.
    return {"policy": policy, "workers": workers, "mode": "pairs" if pairs else "whole", "prompt": kind,
            "prompts": count, "grown_mb": round(grown, 1), "most_nodes": most_nodes, "pages_held": pages,
            "within": grown <= MOST_MB + MOST_PAGE_BYTES * pages / 1e6}


def apart(function: Callable[..., dict[str, object]], *args: object) -> dict[str, object]:
    """Call it in a new process: memory that another measurement left behind would hide what this one takes."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        found = pool.submit(function, *args).result()
    print(json.dumps(found), flush=True)
    return found


DECISIONS = [(policy, workers, nodes, kind, pairs) for workers, nodes in ((4, 200_000), (1000, 1_000_000))
             for policy in ("cache_aware", "cache_exact") for kind in KINDS for pairs in (False, True)]
OTHERS = [(policy, 1000, 0, "text", False) for policy in ("least_loaded", "power_of_two", "consistent_hash")]
MEMORIES = [(policy, workers, kind, pairs) for policy in ("cache_aware", "cache_exact") for kind in KINDS
            for workers, pairs in ((4, False), (4, True), (1000, False), (1000, True))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--decisions", type=int, default=20_000)
    parser.add_argument("--prompts", type=int, default=50_000, help="of the memory's measurement")
    args = parser.parse_args()
    rows = [apart(decisions, *case, args.decisions) for case in DECISIONS + OTHERS]
    grown = [apart(memory, *case, args.prompts) for case in MEMORIES]
    report = {"date": datetime.date.today().isoformat(), "command": "python -m baton.tests.bench.router_decisions",
              "python": platform.python_version(), "decisions": rows, "memory": grown}
    if args.out:
        args.out.write_text(json.dumps(report, indent=1) + "\n")
    missed = [row for row in rows + grown if not row["within"]]
    print(f"FAIL: {len(missed)} of {len(rows + grown)} bounds are missed" if missed else "PASS: all bounds hold")
    sys.exit(1 if missed else 0)


if __name__ == "__main__":
    main()
