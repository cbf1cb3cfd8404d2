"""Requests that outgrow the KV pool, retracted to host memory and computed again: time, and what each retraction costs.

    python -m baton.tests.bench.retraction [--requests 64] [--prompt 1024] [--output 512] [--share 0.7] [--json FILE]

On a GPU an 8B-shaped dummy model, on a CPU the shipped chat model. The pool holds ``--share`` of what all requests need
at their end, and nothing is reserved for output, so that requests are retracted. Beside it stand the same requests in a
pool that holds all of them, and the ceilings of either way: bytes a second to and from host memory, prompt tokens a
second of one long prompt. "More" is what takes longer than with room for all, smaller batches included.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ...common.scheduler.preemption.copy_rates import link_rate
from ...common.tinychat import CHECKPOINT
from ..helpers.hand_driven import Engine
from .relay import LLAMA_8B

PAGE = 16


def make_engine(folder: Path, device: str, max_total_tokens: int, host_gb: float) -> Engine:
    schedule = {"retract_host_memory_gb": host_gb}
    shared: dict[str, Any] = {
        "page_size": PAGE, "max_total_tokens": max_total_tokens, "max_running": 256, "radix": False,
        "schedule": schedule, "device": device, "overlap": device == "cuda"}
    if device == "cuda":
        return Engine(folder, dtype="bfloat16", load_format="dummy", **shared)
    return Engine(CHECKPOINT, **shared)


def run(engine: Engine, args: argparse.Namespace) -> dict[str, float]:
    rng = np.random.default_rng(0)
    vocab = engine.runner.spec.vocab_size
    for i in range(args.requests):
        engine.start(str(i), rng.integers(10, vocab, args.prompt).tolist(), max_new_tokens=args.output, ignore_eos=True)
    began = time.perf_counter()
    engine.run()
    batcher = engine.scheduler.batcher
    swap = batcher.swap
    return {"seconds": time.perf_counter() - began, "retracted": batcher.num_retracted,
            "saved": 0 if swap is None else swap.num_saved}


def prefill_rate(engine: Engine, num_tokens: int) -> float:
    engine.start("warm", [11] * num_tokens, max_new_tokens=1)
    engine.run()
    engine.start("long", [12] * num_tokens, max_new_tokens=1)
    began = time.perf_counter()
    engine.run()
    return num_tokens / (time.perf_counter() - began)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name, default in (("--requests", 64), ("--prompt", 1024), ("--output", 512)):
        parser.add_argument(name, type=int, default=default)
    parser.add_argument("--share", type=float, default=0.7)
    parser.add_argument("--host-gb", type=float, default=8.0)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    whole = args.requests * -(-(args.prompt + args.output) // PAGE) * PAGE
    rows: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as name:
        (Path(name) / "config.json").write_text(json.dumps(LLAMA_8B))
        for case, tokens, host_gb in (("room for all", whole, 0.0), ("computed again", int(whole * args.share), 0.0),
                                      ("host memory", int(whole * args.share), args.host_gb)):
            engine = make_engine(Path(name), device, tokens, host_gb)
            page_bytes = engine.runner.layout.page_bytes
            rate = prefill_rate(engine, min(tokens - PAGE, 8192))
            rows[case] = run(engine, args)
            del engine
            if device == "cuda":
                torch.cuda.empty_cache()
    link = link_rate(torch.device(device))
    print(f"ceilings: {link / 1e9:.1f} GB/s to and from host memory, {rate:.0f} prompt tokens/s; a token is "
          f"{page_bytes // PAGE} bytes: copied both ways in {2e6 * page_bytes / PAGE / link:.1f} us, computed in "
          f"{1e6 / rate:.1f} us")
    print(f"{'case':16}{'seconds':>9}{'retracted':>11}{'to host':>9}{'ms more for each':>17}")
    base = rows["room for all"]["seconds"]
    for case, row in rows.items():
        cost = 1000 * (row["seconds"] - base) / row["retracted"] if row["retracted"] else 0.0
        print(f"{case:16}{row['seconds']:9.2f}{row['retracted']:11.0f}{row['saved']:9.0f}{cost:17.1f}")
    if args.json:
        args.json.write_text(json.dumps({"link_bytes_s": link, "prompt_tokens_s": rate, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
