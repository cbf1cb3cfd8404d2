"""Kernels over recurrent states at the sizes of Qwen3-Next and Falcon-H1 34B: microseconds of a layer's prompts and
decode steps, and of what moving its bytes takes.

    python -m baton.tests.bench.state_kernels [--out FILE]
    python -m baton.tests.bench.state_kernels --tiny      # on a CPU: does the bench itself run?
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ...kernels.arguments import DeltaNet, Mamba2, StateRuns
from ...kernels.state.causal_conv1d import causal_conv1d
from ...kernels.state.gated_delta_rule import gated_delta_rule
from ...kernels.state.selective_scan import selective_scan
from . import ceilings
from .device_time import captured, run_seconds

SHAPES: dict[str, DeltaNet | Mamba2] = {"Qwen3-Next": DeltaNet(16, 2, 128, 128, 4),
                                        "Falcon-H1 34B": Mamba2(2, 16, 128, 256, 4)}
PROMPTS = ((1, 8192), (8, 1024))
DECODES = ((1, 1), (64, 1), (256, 1))


def runs_of(count: int, rows: int, device: str) -> StateRuns:
    begins = np.arange(count) * rows
    pages = torch.arange(count, device=device)
    bounds = None if rows == 1 else np.stack((begins, begins + rows), 1)
    first = torch.from_numpy(begins).to(device, torch.int32)
    return StateRuns(first, first + rows, pages, pages, rows, bounds)


def cases(shape: DeltaNet | Mamba2, count: int, rows: int,
          device: str) -> dict[str, tuple[Callable[[], object], int]]:
    """A layer's kernels by their names, and the bytes that each reads and writes."""
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    tokens, runs = count * rows, runs_of(count, rows, device)
    is_delta = isinstance(shape, DeltaNet)
    parts = shape.num_heads if isinstance(shape, DeltaNet) else shape.num_groups
    heads = parts * (shape.group if isinstance(shape, DeltaNet) else shape.heads)
    width = shape.value_dim if isinstance(shape, DeltaNet) else shape.head_dim
    states = torch.zeros(count, parts, shape.values, device=device)
    inputs, matrices = states[..., :shape.conv_values], states[..., shape.conv_values:]
    mixed = torch.randn(tokens, parts, shape.channels, device=device, dtype=dtype)
    convolved, weight = torch.empty_like(mixed), torch.randn(parts, shape.channels, shape.taps, device=device,
                                                             dtype=dtype)
    out = torch.empty(tokens, heads, width, device=device, dtype=dtype)
    step = torch.rand(tokens, heads, device=device)
    history = inputs.unflatten(-1, (shape.channels, shape.taps - 1))
    row_bytes = mixed.nbytes + out.nbytes + 2 * step.nbytes

    def rule() -> object:
        if isinstance(shape, DeltaNet):
            return gated_delta_rule(mixed, -step, step, matrices, shape, runs, out)
        return selective_scan(mixed, step, -step, torch.ones(heads, device=device), matrices, shape, runs, out)

    return {"causal_conv1d": (lambda: causal_conv1d(mixed, weight, None, history, runs, convolved),
                              2 * mixed.nbytes + 2 * inputs.numel() * 4),
            "gated_delta_rule" if is_delta else "selective_scan": (rule, row_bytes + 2 * matrices.numel() * 4)}


def seconds_of(work: Callable[[], object], device: str) -> float:
    if device != "cuda":
        begin = time.perf_counter()
        work()
        return time.perf_counter() - begin
    graph = captured(work)
    graph()
    return statistics.median(run_seconds(graph, 10))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--tiny", action="store_true")
    args = parser.parse_args()
    device = "cpu" if args.tiny else "cuda"
    copy = 1.0 if args.tiny else ceilings.copy_tb_s()
    rows: list[dict[str, Any]] = []
    for name, shape in SHAPES.items():
        for count, length in ((2, 70), (2, 1)) if args.tiny else (*PROMPTS, *DECODES):
            for kernel, (work, nbytes) in cases(shape, count, length, device).items():
                micros, floor = 1e6 * seconds_of(work, device), nbytes / copy / 1e6
                rows.append({"model": name, "kernel": kernel, "requests": count, "rows": length, "us": round(micros, 1),
                             "floor_us": round(floor, 1)})
                print(f"{name:14} {kernel:17} {count:4} x {length:5} {micros:9.1f} us  floor {floor:8.1f} us",
                      flush=True)
    if args.out:
        args.out.write_text(json.dumps({"copy_tb_s": copy, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
