"""Kernels of a prefill step and of decode steps of an 8B-shaped dummy model, by time.

    python -m baton.tests.bench.kernel_profile [--context 2048] [--batches 1,64] [--shape llama|qwen] [--without-pdl]

A kernel that starts while the one ahead of it works (programmatic dependent launch) is told to take the time that it
waits, too: a step takes less than the sum. ``--without-pdl`` has each start when the one ahead has ended.
"""

from __future__ import annotations

import argparse

from torch.profiler import profile

from ...common.bench.client.hand_engine import HandEngine
from ...common.bench.step_parts import of_kernel, recorder
from ...kernels import _triton
from . import dummy_engine
from .relay import LLAMA_8B

STEPS = 10
SHAPES = {"llama": LLAMA_8B, "qwen": dummy_engine.QWEN3_06B}


Rows = list[tuple[str, float, float]]


def prefill(engine: HandEngine) -> Rows:
    """Two prompts of 4,096 tokens in one step, after two that are not looked at."""
    engine.start(2, 4096, 1)
    engine.finish()
    engine.start(2, 4096, 1)
    engine.synchronize()
    with recorder(engine.device) as profiler:
        engine.step()
        engine.synchronize()
    engine.finish()
    return _rows(profiler, 1)


def _rows(profiler: profile, steps: int) -> Rows:
    found = [(event.key, event.count / steps, event.device_time_total / steps) for event in profiler.key_averages()]
    return sorted(found, key=lambda row: -row[2])


def _show(what: str, rows: Rows) -> None:
    print(f"\n{what}: {sum(row[2] for row in rows):.0f} us of kernels a step")
    for name, calls, micros in rows[:16]:
        print(f"{micros:9.1f} us {calls:6.1f} calls  {of_kernel(name):<10} {name[:100]}")


def decode(engine: HandEngine, batch: int, context: int) -> Rows:
    """``(kernel, calls a step, microseconds a step)``, the costliest first."""
    engine.start(batch, context, 60)
    while engine.prefilling:
        engine.step()
    for _ in range(5):
        engine.step()
    assert engine.num_decoding == batch, "the engine has no room for the batch"
    engine.synchronize()
    with recorder(engine.device) as profiler:
        for _ in range(STEPS):
            engine.step()
        engine.synchronize()
    engine.finish()
    return _rows(profiler, STEPS)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--context", type=int, default=2048)
    parser.add_argument("--batches", default="1,64")
    parser.add_argument("--shape", choices=SHAPES, default="llama")
    parser.add_argument("--without-pdl", action="store_true")
    args = parser.parse_args()
    _triton.PDL_ALLOWED = not args.without_pdl
    batches = list(map(int, args.batches.split(",")))
    engine = dummy_engine.make(tokens=max(20_000, max(batches) * (args.context + 128)), max_running=max(batches),
                               shape=SHAPES[args.shape])
    _show("prefill, 2 x 4096", prefill(engine))
    for batch in batches:
        _show(f"decode, batch {batch}", decode(engine, batch, args.context))


if __name__ == "__main__":
    main()
