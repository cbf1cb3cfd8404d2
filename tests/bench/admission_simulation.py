"""Admission of requests of mixed sizes, on a virtual clock: small requests behind a large one that does not fit.

    python -m baton.tests.bench.admission_simulation [--ratios 0,0.5,1,2,4,1000] [--rates 4,5,6] [--out figures.json]

The server's scheduler with an H200's costs (tests/helpers/simulated_server.py) and a pool of 100,000 tokens. 19 of 20
requests have about 400 prompt tokens and 200 of output, one has 24,000 and 400. ``ratio`` is --schedule-backfill-ratio;
0 admits in strict order. Times in milliseconds, of small and of large requests.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np

from ...common.config.server import ScheduleArgs
from ..helpers.simulated_server import SimulatedServer

SMALL, LARGE = (400, 200), (24_000, 400)
LARGE_SHARE = 0.05
POOL_TOKENS = 100_000


def workload(rate: float, requests: int, seed: int) -> list[tuple[float, int, int]]:
    rng = np.random.default_rng(seed)
    times = np.cumsum(rng.exponential(1e3 / rate, requests))
    sizes = [LARGE if rng.random() < LARGE_SHARE else SMALL for _ in range(requests)]
    return [(float(time), int(prompt * rng.uniform(0.5, 1.5)), int(output * rng.uniform(0.5, 1.5)))
            for time, (prompt, output) in zip(times, sizes)]


def simulate(ratio: float, rate: float, requests: int = 1500, seed: int = 0) -> dict[str, float]:
    server = SimulatedServer(ScheduleArgs(schedule_backfill_ratio=ratio), pool_tokens=POOL_TOKENS)
    server.at_times(workload(rate, requests, seed))
    small = [asked.ttft for asked in server.asked if asked.input_len < LARGE[0] // 2]
    large = [asked.ttft for asked in server.asked if asked.input_len >= LARGE[0] // 2]
    figures = server.figures()
    return {"rate": rate, "ratio": ratio, "req_s": figures["req_s"], "small_p50": float(np.median(small)),
            "small_p99": float(np.percentile(small, 99)), "large_p50": float(np.median(large)),
            "large_p99": float(np.percentile(large, 99)), "large_max": max(large), "tpot_p50": figures["tpot_p50"],
            "retracted": server.batcher.retraction.num_retracted}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ratios", default="0,0.5,1,2,4,1000")
    parser.add_argument("--rates", default="8,12,16")
    parser.add_argument("--requests", type=int, default=1500)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    rows = []
    for rate in map(float, args.rates.split(",")):
        for ratio in map(float, args.ratios.split(",")):
            rows.append(simulate(ratio, rate, args.requests))
            if len(rows) == 1:
                print(f"| {' | '.join(rows[0])} |\n|{'---|' * len(rows[0])}")
            print("| " + " | ".join(f"{value:,.1f}" for value in rows[-1].values()) + " |", flush=True)
    if args.out:
        args.out.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
