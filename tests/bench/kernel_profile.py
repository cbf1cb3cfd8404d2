"""Kernels of a prefill step and of decode steps of an 8B-shaped dummy model, by time.

    python -m baton.tests.bench.kernel_profile [--context 2048] [--batches 1,64]
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from ..common.hand_driven import Engine
from .relay import LLAMA_8B

STEPS = 10


Rows = list[tuple[str, float, float]]


def prefill(engine: Engine) -> Rows:
    """Two prompts of 4,096 tokens in one step."""
    for attempt in range(2):
        for i in range(2):
            engine.start(f"p{attempt}-{i}", [(7 * i + j) % 4000 for j in range(4096)], max_new_tokens=1)
        if attempt == 0:
            engine.run()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        engine.scheduler.step(0.0)
        torch.cuda.synchronize()
    engine.run()
    return _rows(profiler, 1)


def _rows(profiler: profile, steps: int) -> Rows:
    found = [(event.key, event.count / steps, event.device_time_total / steps) for event in profiler.key_averages()]
    return sorted(found, key=lambda row: -row[2])


def _show(what: str, rows: Rows) -> None:
    print(f"\n{what}: {sum(row[2] for row in rows):.0f} us of kernels a step")
    for name, calls, micros in rows[:16]:
        print(f"{micros:9.1f} us {calls:6.1f} calls  {name[:110]}")


def decode(engine: Engine, batch: int, context: int) -> Rows:
    """``(kernel, calls a step, microseconds a step)``, the costliest first."""
    for i in range(batch):
        engine.start(f"{batch}-{i}", [(7 * i + j) % 4000 for j in range(context)], max_new_tokens=60, ignore_eos=True)
    scheduler = engine.scheduler
    while scheduler.batcher.waiting or scheduler.batcher.prefilling:
        scheduler.step(0.0)
    for _ in range(5):
        scheduler.step(0.0)
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(STEPS):
            scheduler.step(0.0)
        torch.cuda.synchronize()
    engine.run()
    return _rows(profiler, STEPS)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--context", type=int, default=2048)
    parser.add_argument("--batches", default="1,64")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(LLAMA_8B))
        engine = Engine(folder, page_size=16, max_total_tokens=300_000, max_running=64, overlap=True, radix=False,
                        device="cuda", dtype="bfloat16", load_format="dummy")
        _show("prefill, 2 x 4096", prefill(engine))
        for batch in map(int, args.batches.split(",")):
            _show(f"decode, batch {batch}", decode(engine, batch, args.context))


if __name__ == "__main__":
    main()
