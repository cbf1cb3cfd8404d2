"""Host and device time of decode steps of an 8B-shaped dummy model, in one process.

    python -m baton.tests.bench.decode_step [--context 2048] [--batches 1,8,64,256]

For each batch size: time of a step in the running loop (overlap on), the device's own time (a graph replayed back to
back), the host's time outside of waiting, and the least time that the copy ceiling allows for weights plus KV.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

import torch

from ...common.bench.client.stepped_engine import SteppedEngine
from ...common.bench.one_batch import once
from ...common.garbage_collector import freeze_collector
from . import ceilings, dummy_engine

STEPS, WARM_UP = 60, 10


def measure(engine: SteppedEngine, batch: int, context: int) -> dict[str, Any]:
    """Mean milliseconds of a step after a warm-up, and of all steps the part that the host works: mean, median and the
    longest five by their places."""
    run = once(engine, batch, context - STEPS, STEPS + 30)
    steps = run.steps[WARM_UP:WARM_UP + STEPS]
    host = [1e3 * took for took in run.host]
    longest = sorted(sorted(range(len(host)), key=host.__getitem__)[-5:])
    return {"step_ms": 1e3 * sum(steps) / len(steps), "host_ms": statistics.mean(host),
            "host_median_ms": statistics.median(host), "host_longest_ms": {at: round(host[at], 2) for at in longest}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--context", type=int, default=2048)
    parser.add_argument("--batches", default="1,8,64,256")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    copy = ceilings.copy_tb_s()
    rows = []
    engine = dummy_engine.make(tokens=640_000, max_running=256)
    freeze_collector()
    for batch in map(int, args.batches.split(",")):
        row = measure(engine, batch, args.context)
        weights = 15.0e9  # bytes a step reads: all but the embedding table
        row |= {"batch": batch, "floor_ms": (weights + batch * args.context * 131072) / copy / 1e9}
        row["ratio"] = row["step_ms"] / row["floor_ms"]
        rows.append(row)
        print(row, flush=True)
    peak = torch.cuda.max_memory_allocated() / 2**30
    print(f"copy {copy:.2f} TB/s, context {args.context}, peak memory {peak:.1f} GiB")
    print("| batch | step ms | host ms | floor ms | step / floor |\n|---|---|---|---|---|")
    for row in rows:
        figures = " | ".join(f"{row[name]:.2f}" for name in ("step_ms", "host_ms", "floor_ms", "ratio"))
        print(f"| {row['batch']} | {figures} |")
    if args.out:
        args.out.write_text(json.dumps({"copy_tb_s": copy, "context": args.context, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
