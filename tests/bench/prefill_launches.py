"""What launching a step of one prompt costs the host, eager and in CUDA graphs, with a dummy model in this process.

    python -m baton.tests.bench.prefill_launches [--model 8b|0.6b] [--tokens 128,1024,8192] [--layers 32] [--out FILE]
    python -m baton.tests.bench.prefill_launches --model tiny      # on a CPU: does the bench itself run?

For each number of tokens: the host's milliseconds until a step has been launched, milliseconds until its logits are
there, and TTFT of one prompt by the engine's loop (medians). Then the host's microseconds of single calls, launched
back to back, and what it took to record.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import pstats
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ...common.bench.client.stepped_engine import SteppedEngine
from ...common.forward.forward_batch import Row, build_forward_batch
from ...common.garbage_collector import freeze_collector
from ...common.runner.cuda_graphs.piecewise_graphs import GraphRecorder, GraphSizes
from ...kernels.rowwise.rmsnorm import rmsnorm
from . import dummy_engine
from .relay import LLAMA_8B

SHAPES = {"8b": LLAMA_8B, "0.6b": dummy_engine.QWEN3_06B, "tiny": dummy_engine.TINY}
REPEATS = 9


def median_ms(work: Callable[[], tuple[float, float]]) -> tuple[float, float]:
    found = [work() for _ in range(REPEATS)][2:]
    return statistics.median(a for a, _ in found), statistics.median(b for _, b in found)


def steps(engine: SteppedEngine, counts: list[int]) -> dict[int, dict[str, float]]:
    runner = engine._parts.runner
    table = {}
    for count in counts:
        row = Row(np.arange(count) % 97, 0, np.arange(runner.layout.pages_for(count), dtype=np.int32))

        def step(row: Row = row) -> tuple[float, float]:
            engine.synchronize()
            began = time.perf_counter()
            runner.forward(build_forward_batch([row], runner.layout.page_size, runner.device))
            launched = time.perf_counter()
            engine.synchronize()
            return 1e3 * (launched - began), 1e3 * (time.perf_counter() - began)

        def ttft(count: int = count) -> tuple[float, float]:
            engine.start(1, count, 1)
            engine.synchronize()
            began = time.perf_counter()
            while not engine.idle:
                engine.step()
            took = 1e3 * (time.perf_counter() - began)
            engine.finish()
            return took, took

        host, wall = median_ms(step)
        table[count] = {"host ms": host, "wall ms": wall, "ttft ms": median_ms(ttft)[0]}
    return table


def single_calls(engine: SteppedEngine) -> dict[str, float]:
    """Microseconds of the host, of calls that the device does faster than they come."""
    runner = engine._parts.runner
    layer = runner._model.layers[0]
    device, dtype = runner.device, runner._model.dtype
    x = torch.zeros(32, runner._model.hidden_size, dtype=dtype, device=device)
    row = Row([1] * 32, 0, np.arange(runner.layout.pages_for(32), dtype=np.int32))
    step = runner.plan(build_forward_batch([row], runner.layout.page_size, device))
    projected, residual = layer.pre_attention(x, x)
    heads = layer.attention.attend(projected, step, runner._model.cos_sin[0], False)
    calls: dict[str, Callable[[], Any]] = {
        "rmsnorm (Triton)": lambda: rmsnorm(x, layer.mlp_norm.weight, 1e-5, x),
        "a product": lambda: torch.nn.functional.linear(x, layer.input_norm.weight[None]),
        "copy_": lambda: heads.copy_(heads),
        "empty": lambda: torch.empty_like(x),
        "a slice": lambda: x[:16],
        "a layer's attention": lambda: layer.attention.attend(projected, step, runner._model.cos_sin[0], False),
        "a layer between attentions": lambda: runner._model.between_attentions(1, heads, residual, step.rows),
    }
    graphs = runner.prefill_graphs.graphs
    if graphs is not None:
        calls["the same in a graph"] = next(iter(graphs._pieces.values()))[1].replay
    found = {}
    for name, call in calls.items():
        best = float("inf")
        for _ in range(5):
            engine.synchronize()
            began = time.perf_counter()
            for _ in range(20):
                call()
            best = min(best, (time.perf_counter() - began) / 20)
        found[name] = 1e6 * best
    return found


def record(engine: SteppedEngine, wanted: GraphSizes) -> dict[str, float]:
    """Once more."""
    runner = engine._parts.runner
    runner.prefill_graphs.graphs = None
    engine.synchronize()
    torch.cuda.empty_cache()
    before, began = torch.cuda.mem_get_info()[0], time.perf_counter()
    runner.prefill_graphs.record(wanted, GraphRecorder(runner.device), lambda what, share: None)
    engine.synchronize()
    torch.cuda.empty_cache()
    seconds = time.perf_counter() - began
    return {"sizes": len(wanted.sizes), "largest": wanted.sizes[-1], "free": wanted.free, "seconds": seconds,
            "GiB": (before - torch.cuda.mem_get_info()[0]) / 2**30}


def profiled(engine: SteppedEngine, count: int, steps: int = 20) -> list[tuple[str, float, float, float]]:
    """Functions of a step of ``count`` tokens: calls, and microseconds of the host, their own and with what they call.
    The profile slows each call."""
    runner = engine._parts.runner
    row = Row(np.arange(count) % 97, 0, np.arange(runner.layout.pages_for(count), dtype=np.int32))
    with cProfile.Profile() as recorded:
        for _ in range(steps):
            runner.forward(build_forward_batch([row], runner.layout.page_size, runner.device))
            engine.synchronize()
    found = [(f"{'/'.join(path.split('/')[-2:])}:{line} {name}", calls / steps, 1e6 * own / steps, 1e6 * total / steps)
             for (path, line, name), (_, calls, own, total, _) in pstats.Stats(recorded).stats.items()]
    return sorted(found, key=lambda row: -row[2])[:45]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=SHAPES, default="8b")
    parser.add_argument("--tokens", default="32,128,256,512,1000,1024,2048,4096,8192")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--sizes", default="", help="to record, in place of what a server would")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--host", type=int, help="profile the host in a step of so many tokens")
    args = parser.parse_args()
    shape = SHAPES[args.model] | ({"num_hidden_layers": args.layers} if args.layers else {})
    cuda = torch.cuda.is_available()
    counts = [int(count) for count in args.tokens.split(",")]
    engine = dummy_engine.make(2 * max(counts) + 64, 8, shape=shape, sizes=(1,), device="cuda" if cuda else "cpu")
    freeze_collector()
    result: dict[str, Any] = {}
    runner = engine._parts.runner
    sizes = [int(size) for size in args.sizes.split(",") if size]
    wanted = GraphSizes(sizes, sizes[-1]) if sizes else runner.prefill_graphs.selected
    with torch.inference_mode():
        if wanted is not None:
            result["recording"] = record(engine, wanted)
            result["pieces"] = steps(engine, counts)
        result["calls us"] = single_calls(engine)
        for name, calls, own, total in profiled(engine, args.host) if args.host else ():
            print(f"  {own:8.1f} us own, {total:8.1f} in all, {calls:6.1f} calls: {name[:90]}")
        runner.prefill_graphs.graphs = None
        result["eager"] = steps(engine, counts)
    for name in ("pieces", "eager"):
        for count, row in result.get(name, {}).items():
            print(f"{name:7} {count:6} tokens: " + ", ".join(f"{what} {took:.2f}" for what, took in row.items()))
    print({what: round(took, 2) for what, took in result.get("recording", {}).items()})
    print("host us: " + ", ".join(f"{what} {took:.1f}" for what, took in result["calls us"].items()), flush=True)
    if args.out:
        args.out.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
