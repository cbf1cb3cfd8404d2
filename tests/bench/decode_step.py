"""Host and device time of decode steps of an 8B-shaped dummy model, in one process.

    python -m baton.tests.bench.decode_step [--context 2048] [--batches 1,8,64,256]

For each batch size: time of a step in the running loop (overlap on), the device's own time (a graph replayed back to
back), the host's time outside of waiting, and the least time that the copy ceiling allows for weights plus KV.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from unittest.mock import patch

import torch

from ...common.config.server import KernelArgs
from ...common.engine import host_copies
from ..common.hand_driven import Engine
from . import ceilings
from .relay import LLAMA_8B


def measure(engine: Engine, batch: int, context: int, steps: int = 60) -> dict[str, float]:
    """Mean milliseconds of a step after a warm-up: all of it, and the part that the host works."""
    for i in range(batch):
        engine.start(f"{batch}-{i}", [(7 * i + j) % 4000 for j in range(context - steps)], max_new_tokens=steps + 30,
                     ignore_eos=True)
    scheduler = engine.scheduler
    while scheduler.batcher.waiting or scheduler.batcher.prefilling:
        scheduler.step(0.0)
    for _ in range(10):
        scheduler.step(0.0)
    waited = 0.0
    wait = host_copies.Download.wait

    def timed(download):
        nonlocal waited
        start = time.perf_counter()
        found = wait(download)
        waited += time.perf_counter() - start
        return found

    with patch.object(host_copies.Download, "wait", timed):
        start = time.perf_counter()
        for _ in range(steps):
            scheduler.step(0.0)
            engine.ledger.flush()
        elapsed = time.perf_counter() - start
    engine.run()
    engine.cache.flush()
    return {"step_ms": 1e3 * elapsed / steps, "host_ms": 1e3 * (elapsed - waited) / steps}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--context", type=int, default=2048)
    parser.add_argument("--batches", default="1,8,64,256")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    copy = ceilings.copy_tb_s()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(LLAMA_8B))
        engine = Engine(folder, page_size=16, max_total_tokens=640_000, max_running=256, overlap=True, radix=False,
                        device="cuda", dtype="bfloat16", load_format="dummy", kernels=KernelArgs())
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
