"""What float8 makes of a server's two phases: an 8B-shaped dummy in bfloat16 and in float8, in one process.

    python -m baton.tests.bench.fp8_serving [--out FILE]
    python -m baton.tests.bench.fp8_serving --tiny        # a tiny model on a CPU: does the bench itself run?

For each kind of weights: tokens a second of a prefill of 2 x 4,096 tokens, and milliseconds of a decode step (CUDA
graphs, overlap on) of 1 and of 64 requests with 1,024 tokens of context; beside them, how many times as fast that is as
bfloat16 in the same run.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ...common.bench.client.stepped_engine import SteppedEngine
from ...common.bench.one_batch import once
from . import dummy_engine

WARM_UP = 5
"""Decode steps that are not counted."""
TINY = dummy_engine.TINY | {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 8,
                            "num_key_value_heads": 4, "head_dim": 32}
"""Every projection fills blocks of 128 x 128."""


class Kind(NamedTuple):
    name: str
    quantization: dummy_engine.Quantization = None
    kv_cache_dtype: dummy_engine.CacheType = "auto"


KINDS = (Kind("bfloat16"), Kind("float8, a scale an output", "fp8"), Kind("float8, 128 x 128 blocks", "fp8_per_block"),
         Kind("float8, and its KV cache", "fp8", "fp8_e4m3"))


class Load(NamedTuple):
    """``prompts`` of ``length`` tokens for prefill; for decode ``batches`` of requests with ``context`` tokens."""

    prompts: int
    length: int
    batches: tuple[int, ...]
    context: int
    steps: int
    repeats: int

    @property
    def pool(self) -> int:
        return max(self.prompts * (self.length + 64), max(self.batches) * (self.context + 64))


FULL = Load(2, 4096, (1, 64), 1024, 30, 3)
SMALL = Load(2, 40, (1, 3), 24, 8, 1)


def measure(engine: SteppedEngine, load: Load) -> dict[str, float]:
    """Prompt tokens a second, the best of the repeats, and a decode step's median milliseconds by batch."""
    runs = [once(engine, load.prompts, load.length, 1) for _ in range(load.repeats + 1)][1:]
    found = {"prefill_tok_s": load.prompts * load.length / min(run.prefill for run in runs)}
    for batch in load.batches:
        run = once(engine, batch, load.context - load.steps, WARM_UP + load.steps)
        found[f"decode_{batch}_ms"] = 1e3 * statistics.median(run.steps[WARM_UP:])
    return found


def each(load: Load, kinds: tuple[Kind, ...], make: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for kind in kinds:
        engine = dummy_engine.make(load.pool, max(load.batches), sizes=load.batches, quantization=kind.quantization,
                                   kv_cache_dtype=kind.kv_cache_dtype, **make)
        try:
            yield {"weights": kind.name, "figures": measure(engine, load)}
        finally:
            engine.close()
            del engine
            gc.collect()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()


def faster(figures: dict[str, float], base: dict[str, float]) -> dict[str, float]:
    """How many times as fast as ``base`` each figure is."""
    return {name: value / base[name] if name.endswith("tok_s") else base[name] / value
            for name, value in figures.items()}


def table(rows: list[dict[str, Any]], load: Load) -> str:
    titles = [f"prefill of {load.prompts} x {load.length}, tok/s", *(f"decode step of {b}, ms" for b in load.batches)]
    lines = [f"| weights | {' | '.join(titles)} |", "|---" * (1 + len(titles)) + "|"]
    for row in rows:
        cells = [f"{value:,.{0 if name.endswith('tok_s') else 2}f} ({row['faster'][name]:.2f}x)"
                 for name, value in row["figures"].items()]
        lines.append(f"| {row['weights']} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--kinds", type=int, default=len(KINDS), help="so many of the kinds, bfloat16 first")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    load = SMALL if args.tiny else FULL
    rows: list[dict[str, Any]] = []
    for row in each(load, KINDS[:args.kinds], {"device": "cpu", "shape": TINY} if args.tiny else {}):
        row["faster"] = faster(row["figures"], (rows or [row])[0]["figures"])
        rows.append(row)
        print(rows[-1], flush=True)
        if args.out:
            device = "a CPU" if args.tiny else torch.cuda.get_device_name()
            args.out.write_text(json.dumps({"device": device, "load": load._asdict(), "rows": rows}, indent=1) + "\n")
    print(table(rows, load))


if __name__ == "__main__":
    main()
