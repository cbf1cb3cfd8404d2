"""Decode steps of Llama 3 8B's shape by transformers' code and by Baton's own layers, with dummy weights, in a process.

    python -m baton.tests.bench.transformers_code [--context 2048] [--batches 1,16,64] [--attention-backend triton]

The time of a token (TPOT) of both, and the ratio: transformers' code is to have at least 90 % of the speed.
"""

from __future__ import annotations

import argparse
import gc
import json
from pathlib import Path

import torch

from . import dummy_engine
from .decode_step import measure

LEAST_SPEED = 0.9


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--context", type=int, default=2048)
    parser.add_argument("--batches", default="1,16,64")
    parser.add_argument("--attention-backend", default="triton", help="flashinfer: a minute to compile at first")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    batches = [int(batch) for batch in args.batches.split(",")]
    steps: dict[str, dict[int, float]] = {}
    for implementation in ("baton", "transformers"):
        engine = dummy_engine.make(tokens=max(batches) * (args.context + 64), max_running=max(batches),
                                   sizes=tuple(batches), model_impl=implementation,
                                   attention_backend=args.attention_backend)
        steps[implementation] = {}
        for batch in batches:
            figures = measure(engine, batch, args.context)
            steps[implementation][batch] = figures["step_ms"]
            print(f"{implementation}: batch {batch} {figures['step_ms']:.2f} ms, host {figures['host_median_ms']:.2f}",
                  flush=True)
        del engine
        gc.collect()
        torch.cuda.empty_cache()
    print("| batch | own ms | transformers' ms | speed |\n|---|---|---|---|")
    for batch in batches:
        own, theirs = (steps[name][batch] for name in ("baton", "transformers"))
        print(f"| {batch} | {own:.2f} | {theirs:.2f} | {100 * own / theirs:.0f} % |")
    if args.out:
        args.out.write_text(json.dumps({"context": args.context, "step_ms": steps}, indent=1))
    slow = [batch for batch in batches if steps["baton"][batch] < LEAST_SPEED * steps["transformers"][batch]]
    if slow:
        raise SystemExit(f"less than {LEAST_SPEED:.0%} of the speed at batches of {', '.join(map(str, slow))}")


if __name__ == "__main__":
    main()
