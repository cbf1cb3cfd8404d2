"""Host time of a step's scheduling, without a model: 256 running requests, and ever more that wait.

    python -m baton.tests.bench.scheduling [--waiting 200,4000] [--output figures.json]

``full``: no place is free, each step decodes. ``turnover``: with every step a request ends and one is admitted.
``memory``: places are free, but no pages (what decoding costs is left out). Milliseconds a step, the least of
three rounds, beside the same steps with nobody waiting.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import numpy as np

from ...common.api.messages import Generate
from ...common.api.sampling import SamplingParams
from ...common.config.server import ScheduleArgs
from ...common.kvcache.manager import KVCacheManager
from ...common.request.req import Req
from ...common.scheduler.batcher import Batcher

PAGE = 16
STEM, TAIL, STEMS = 512, 64, 32
RUNNING, STEPS = 256, 60
POLICIES = ("fcfs", "lof", "random", "lpm", "dfs-weight")


class Prompts:
    def __init__(self) -> None:
        self._rng = np.random.default_rng(0)
        self._stems = [self._rng.integers(0, 30_000, STEM).tolist() for _ in range(STEMS)]
        self._count = 0

    def req(self) -> Req:
        self._count += 1
        prompt = self._stems[self._count % STEMS] + self._rng.integers(0, 30_000, TAIL).tolist()
        message = Generate(str(self._count), prompt, SamplingParams(max_new_tokens=150 + self._count % 100))
        return Req.from_message(message, eos_ids=frozenset(), now=float(self._count), timeout=1e9)


def step(batcher: Batcher) -> None:
    batch = batcher.next_prefill()
    if batch is None:
        assert batcher.allocate_running()
        batch = batcher.next_decode()
    assert batch is not None
    batcher.mark_launched(batch)
    for chunk in batch.chunks:
        if chunk.samples:
            chunk.req.append_pending(7)


def seconds(policy: str, waiting: int, case: str) -> float:
    """Of one step."""
    prompts = Prompts()
    pages = RUNNING * 44 if case == "memory" else 2**16
    cache = KVCacheManager(pages, PAGE)
    most = RUNNING * (2 if case == "memory" else 1)
    batcher = Batcher(cache, ScheduleArgs(schedule_policy=policy, max_running_requests=most))  # type: ignore[arg-type]
    for _ in range(RUNNING):
        batcher.waiting.append(prompts.req())
    while batcher.waiting or batcher.prefilling:
        step(batcher)
    if case == "memory":
        spare = cache.new_private_table()
        assert cache.allocate_slots(spare, (cache.num_available - 24) * PAGE)
    for _ in range(waiting):
        batcher.waiting.append(prompts.req())
    best = float("inf")
    for _ in range(3):
        began = time.perf_counter()
        for _ in range(STEPS // 3):
            if case == "turnover":
                batcher.finish(batcher.running[0])
                if not waiting:
                    batcher.waiting.append(prompts.req())
            if case == "memory":
                assert batcher.next_prefill() is None
            else:
                step(batcher)
        best = min(best, time.perf_counter() - began)
    return best / (STEPS // 3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--waiting", default="200,4000")
    parser.add_argument("--policies", default=",".join(POLICIES))
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    counts = [0, *map(int, args.waiting.split(","))]
    rows = [{"policy": policy, "case": case} | {str(count): 1000 * seconds(policy, count, case) for count in counts}
            for policy in args.policies.split(",") for case in ("full", "turnover", "memory")]
    print(f"{'policy':12}{'case':12}" + "".join(f"{count:>12}" for count in counts) + "   waiting; ms a step")
    for row in rows:
        print(f"{row['policy']:12}{row['case']:12}" + "".join(f"{row[str(count)]:12.2f}" for count in counts))
    if args.output:
        args.output.write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    main()
