"""Prompts of an 8B-shaped dummy model through the stages of a pipeline, beside one GPU.

    python -m baton.tests.bench.pipeline [--stages 2] [--prompts 8] [--length 4096] [--chunks 4096,2048] [--out FILE]

Seconds from the prompts' arrival, all at once, to the last first token, in the running loop, without a prefix cache: on
one GPU, and over the stages. A pipeline fills and drains: n chunks take s stages (n + s - 1) / s chunks' time of one
GPU, which is the bound that is printed. It starts its ranks itself.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import os
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
import torch.multiprocessing

from ...common.api.messages import FromEngine, Generate, Shutdown
from ...common.api.sampling import SamplingParams
from ...common.config import cli
from ...common.config.server import ServerConfig
from ...common.distributed.parallel import Parallel, init_parallel
from ...common.distributed.tp import TPGroup
from ...common.engine.control import Control
from ...common.engine.loop import EngineLoop
from ...common.engine.rank import EngineParts, build_parts, unified_scheduler
from ...common.engine.rank_channel import PPTicker, Ticker
from ...common.engine.rank_spec import RankSpec
from ...common.execution.pp_channel import PPChannel
from .dummy_engine import TINY
from .relay import LLAMA_8B

REPEATS = 3
_READY, _FILLED = os.pipe()  # always has something to read
os.write(_FILLED, b"!")


class Front:
    """In place of a channel: all prompts at once, and the end when they are answered."""

    def __init__(self, messages: list[Generate], parts: EngineParts):
        self._messages = messages
        self._parts = parts

    @property
    def inbox(self) -> int | None:
        """What a turn waits for beside results."""
        return _READY if self._messages or not self._parts.tracker.live else None

    def receive(self, wait_ms: int) -> list[Generate | Shutdown]:
        if self._messages:
            given, self._messages = self._messages, []
            return list(given)
        return [] if self._parts.tracker.live else [Shutdown()]


def build(parallel: Parallel, args: argparse.Namespace, chunk: int) -> EngineParts:
    tokens = args.prompts * (args.length + 64)
    shape = TINY if args.tiny else LLAMA_8B
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(shape))
        config = cli.build(ServerConfig, {
            "model_path": folder, "dtype": "float32" if args.tiny else "bfloat16", "load_format": "dummy",
            "max_total_tokens": tokens, "disable_radix_cache": True, "chunked_prefill_size": chunk,
            "max_running_requests": 2 * args.prompts, "pp_size": parallel.pp.size, "disable_cuda_graph": True})
        line = PPChannel(parallel) if parallel.pp.size > 1 else None
        return build_parts(RankSpec(config, parallel.world.rank, parallel.world.size, "", "", ""), parallel,
                           _nowhere, lambda stage, share: None, line)


def seconds_of(parts: EngineParts, args: argparse.Namespace, chunk: int) -> float:
    """The best of some runs, behind one that warms up."""
    parallel, batcher = parts.parallel, parts.batcher
    batcher.set_args(dataclasses.replace(batcher.args, chunked_prefill_size=chunk))
    control = Control(parts.config, parallel.world, parts.runner, batcher)
    rng = np.random.default_rng(0)
    best = float("inf")
    for _ in range(1 + REPEATS):
        prompts = [rng.integers(2, 500, args.length).tolist() for _ in range(args.prompts)]
        messages = [Generate(str(i), prompt, SamplingParams(temperature=0.0, max_new_tokens=1, ignore_eos=True))
                    for i, prompt in enumerate(prompts)]
        front = Front(messages, parts)
        ticker = Ticker(front, TPGroup()) if parts.pp_channel is None else PPTicker(front, parts.pp_channel)  # type: ignore[arg-type]
        loop = EngineLoop(ticker, parts.tracker, unified_scheduler(parts), batcher.cache, control, _nowhere)
        parallel.world.barrier()
        began = time.perf_counter()
        loop.run()
        best = min(best, time.perf_counter() - began)
    return best


def _nowhere(message: FromEngine) -> None:
    """Nobody reads the answers."""


def measure(parallel: Parallel, args: argparse.Namespace, chunks: list[int]) -> list[float]:
    parts = build(parallel, args, max(chunks))
    found = []
    for chunk in chunks:
        found.append(seconds_of(parts, args, chunk))
        if parallel.world.rank == 0:
            print(f"{parallel.pp.size} stages, chunks of {chunk}: {found[-1]:.3f} s", flush=True)
    if parts.pp_channel is not None:
        parts.pp_channel.close()
    del parts
    gc.collect()
    torch.cuda.empty_cache()
    return found


def rank_main(rank: int, args: argparse.Namespace, chunks: list[int], folder: str) -> None:
    device = "cpu" if args.tiny else f"cuda:{rank}"
    if args.tiny:
        torch.set_num_threads(1)
    parallel = init_parallel(rank, args.stages, 1, f"file://{folder}/rendezvous", device, timeout=240,
                             pp_size=args.stages)
    found: dict[str, list[float]] = {}
    if rank == 0:
        found["one GPU"] = measure(Parallel(TPGroup(device=parallel.device)), args, chunks)
    parallel.world.barrier()
    found[f"{args.stages} stages"] = measure(parallel, args, chunks)
    if rank == 0:
        (Path(folder) / "found.json").write_text(json.dumps(found))
    parallel.world.barrier()
    parallel.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stages", type=int, default=2)
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--chunks", default="8192,4096,2048")
    parser.add_argument("--tiny", action="store_true", help="a small model over gloo on a CPU, to try the program")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if torch.cuda.device_count() < args.stages and not args.tiny:
        sys.exit(f"This needs {args.stages} GPUs.")
    chunks = [int(chunk) for chunk in args.chunks.split(",")]
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(rank_main, (args, chunks, folder), nprocs=args.stages)
        found = json.loads((Path(folder) / "found.json").read_text())
    one, staged = found.values()
    total = args.prompts * args.length
    print(f"{args.prompts} prompts of {args.length} tokens; seconds, and tokens a second")
    for chunk, alone, together in zip(chunks, one, staged):
        steps = -(-total // chunk)
        bound = args.stages * steps / (steps + args.stages - 1)
        print(f"chunks of {chunk}: one GPU {alone:.3f} s ({total / alone:,.0f}), {args.stages} stages {together:.3f} s "
              f"({total / together:,.0f}): {alone / together:.2f} x, of {bound:.2f}")
    print(f"best against best: {min(one) / min(staged):.2f} x")
    if args.out is not None:
        args.out.write_text(json.dumps({"prompts": args.prompts, "length": args.length, "chunks": chunks, **found}))


if __name__ == "__main__":
    main()
