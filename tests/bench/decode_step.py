"""Host and device time of decode steps of an 8B-shaped dummy model, in one process.

    python -m baton.tests.bench.decode_step [--context 2048] [--batches 1,8,64,256]

For each batch size: time of a step in the running loop (overlap on), the device's own time (a graph replayed back to
back), the host's time outside of waiting, and the least time that the copy ceiling allows for weights plus KV.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch

from ...common.bench.hand_engine import HandEngine
from ...common.bench.one_batch import once
from ...common.engine.collector import settle_collector
from . import ceilings, dummy_engine

STEPS, WARM_UP = 60, 10


def measure(engine: HandEngine, batch: int, context: int) -> dict[str, float]:
    """Mean milliseconds of a step after a warm-up: all of it, and the part that the host works."""
    run = once(engine, batch, context - STEPS, STEPS + 30)
    steps = run.steps[WARM_UP:WARM_UP + STEPS]
    return {"step_ms": 1e3 * sum(steps) / len(steps),
            "host_ms": 1e3 * (sum(run.steps) - run.waited) / len(run.steps)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--context", type=int, default=2048)
    parser.add_argument("--batches", default="1,8,64,256")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    copy = ceilings.copy_tb_s()
    rows = []
    engine = dummy_engine.make(tokens=640_000, max_running=256)
    settle_collector()
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
