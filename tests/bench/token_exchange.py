"""What it costs that attention groups meet: at a layer's MLP, and once a turn on the host.

    python -m baton.tests.bench.token_exchange [--ranks 2] [--dp-size 2] [--hidden 2048,7168]
        [--tokens 1,8,32,128,256] [--prompts 1024,8192] [--dtype bfloat16] [--graphs-only] [--out FILE.json]

One process a rank, over NCCL where there are as many GPUs, else over gloo. Each line is one layer's exchange, without
the MLP: gather and part by a sum of all rows on all ranks (``around``), gather and sum the own rows alone (``summed``),
and beside them the bare collectives on equal parts: all-gather and reduce-scatter. ``uneven`` gives group 0 the tokens
and the others one each, as while one prefills. Microseconds, the slowest rank's median.

On GPUs also what an exchange (``summed``) costs in a CUDA graph of 32, as decode steps have it: by NCCL, and where the
parts are small through the peers' memory. Then the same with the norm before and the norm behind it, and with these by
``--moe-a2a-backend low_latency``, which makes each exchange and its norm one kernel. ``link`` is what the bytes that a
rank sends would take at the rate of one large copy from GPU to GPU.

``--prompts``: rows a rank of steps of prompts, between GPUs alone; see ``token_exchange_prompts``.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ...common.distributed.expert_parallel import ExpertParallel
from ...common.distributed.parallel import Parallel, init_parallel
from ...common.distributed.peer_all_reduce import connect_all
from ...common.layers.norm import RMSNorm, unquantized
from ...common.runner.dp_sync import DPSync
from ...common.weights.slots import allocator
from .token_exchange_prompts import COLUMNS, prompt_rows

_WARM, _REPEATS, _IN_GRAPH = 5, 30, 32
_LARGE = 256 << 20
_EAGER = ("around", "summed", "collectives")
_IN_GRAPHS = ("nccl", "peers", "nccl, norms", "peers, norms", "low latency, norms", "link")


def main() -> None:
    parser = argparse.ArgumentParser(description="Cost of the token exchange.")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--dp-size", type=int, default=2)
    parser.add_argument("--hidden", default="2048,7168")
    parser.add_argument("--tokens", default="1,8,32,128,256")
    parser.add_argument("--prompts", default="", help="rows a rank of steps of prompts, between GPUs")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--graphs-only", action="store_true", help="of the GPUs, none of the eager ones")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        context = multiprocessing.get_context("spawn")
        answers = context.SimpleQueue()
        ranks = [context.Process(target=run, args=(rank, args, f"file://{folder}/meet", answers), daemon=True)
                 for rank in range(args.ranks)]
        for rank in ranks:
            rank.start()
        found = [answers.get() for _ in ranks]
        for rank in ranks:
            rank.join()
    rows = [{name: value if isinstance(value, str) else max(other[i][name] for other in found)
             for name, value in row.items()} for i, row in enumerate(found[0])]
    show(rows, args)
    if args.out is not None:
        args.out.write_text(json.dumps({"args": {name: str(value) for name, value in vars(args).items()},
                                        "rows": rows}, indent=1))


def run(rank: int, args: argparse.Namespace, meeting: str, answers: Any) -> None:
    """One rank's process."""
    torch.set_num_threads(1)
    device = torch.device("cuda", rank) if torch.cuda.device_count() >= args.ranks else torch.device("cpu")
    parallel = init_parallel(rank, args.ranks, args.dp_size, meeting, device, timeout=120,
                             experts=lambda world: ExpertParallel(world, args.ranks, "low_latency"))
    dtype, tokens = getattr(torch, args.dtype), [int(count) for count in args.tokens.split(",") if count]
    rows: list[dict[str, Any]] = []
    for hidden in map(int, args.hidden.split(",")):
        for count, kind in itertools.product(() if args.graphs_only else tokens, ("even", "uneven")):
            counts = [count if kind == "even" or group == 0 else 1 for group in range(args.dp_size)]
            rows.append({"tokens": float(count), "hidden": float(hidden), "kind": kind,
                         **measured(parallel, counts, hidden, dtype)})
    if device.type == "cuda" and args.prompts:
        rows += prompt_rows(parallel, [int(count) for count in args.prompts.split(",")],
                            [int(hidden) for hidden in args.hidden.split(",")], dtype, link_bytes(parallel))
    if device.type == "cuda" and tokens:
        rows += graph_rows(parallel, tokens, [int(hidden) for hidden in args.hidden.split(",")], dtype)
    host = DPSync(parallel)
    rows.append({"tokens": 0.0, "kind": "host meeting", "microseconds": timed(
        parallel, lambda: host.sync(1, 1, can_decode=True))})
    answers.put(rows)
    parallel.close()


def measured(parallel: Parallel, counts: list[int], hidden: int, dtype: torch.dtype) -> dict[str, float]:
    exchange, across = parallel.token_exchange, parallel.dp
    x = torch.randn(counts[parallel.dp_rank], hidden, device=parallel.device).to(dtype)
    equal = torch.randn(max(counts), hidden, device=parallel.device).to(dtype)
    rows = exchange.step(counts)
    return {
        "around": timed(parallel, lambda: exchange.apply(parallel.tp.all_reduce, x, rows)),
        "summed": timed(parallel, lambda: exchange.apply_partial(lambda y: y, in_two, x, rows)),
        "collectives": timed(parallel, lambda: across.reduce_scatter_rows(across.all_gather_rows(equal))),
    }


def graph_rows(parallel: Parallel, tokens: list[int], widths: list[int], dtype: torch.dtype) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = [{"tokens": float(count), "hidden": float(hidden), "kind": "graph"}
                                  for hidden in widths for count in tokens]
    link = link_bytes(parallel)
    for way in ("nccl", "peers", "low latency"):
        if way == "peers":
            connect_all(parallel, rows=max(tokens))
        for row in rows:
            layer = Layer(parallel, int(row["tokens"]), int(row["hidden"]), dtype)
            if way != "low latency":
                row[way] = in_graph(parallel, layer.exchange)
            row[f"{way}, norms"] = in_graph(parallel, partial(layer.normed, way == "low latency"))
            row["link"] = 2 * (parallel.dp_size - 1) * layer.x.nbytes / link
    return rows


class Layer:
    """What stands around an MLP: norms, and so many rows of each group to exchange."""

    def __init__(self, parallel: Parallel, tokens: int, hidden: int, dtype: torch.dtype):
        self._tokens, self._counts = parallel.token_exchange, [tokens] * parallel.dp_size
        allocate = allocator(dtype, parallel.device)
        self._before = RMSNorm("before", hidden, 1e-5, allocate, parallel.token_exchange)
        self._behind = RMSNorm("behind", hidden, 1e-5, allocate)
        for norm in (self._before, self._behind):
            norm.weight.fill_(1.0)
        self.x = torch.randn(tokens, hidden, device=parallel.device).to(dtype)

    def exchange(self) -> None:
        self._tokens.apply_partial(lambda y: y, in_two, self.x, self._tokens.step(self._counts))

    def normed(self, low_latency: bool) -> None:
        rows = self._tokens.step(self._counts, all_decode=low_latency)
        x, residual = self._before.add_norm_as(unquantized, self.x, self.x, rows)
        self._behind.add_norm(self._tokens.apply_partial(lambda y: y, in_two, x, rows), residual)


def in_two(y: torch.Tensor) -> tuple[torch.Tensor, None]:
    return y, None


def in_graph(parallel: Parallel, work: Callable[[], None]) -> float:
    """Microseconds of one exchange."""
    work()
    torch.cuda.synchronize()
    parallel.tp.barrier()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for _ in range(_IN_GRAPH):
            work()
    return timed(parallel, graph.replay) / _IN_GRAPH


def link_bytes(parallel: Parallel) -> float:
    """Bytes a microsecond that every GPU copies to the next one, all at once."""
    x = torch.empty(_LARGE, dtype=torch.uint8, device=parallel.device)
    there = torch.empty(_LARGE, dtype=torch.uint8, device=f"cuda:{(parallel.tp.rank + 1) % parallel.tp.size}")
    return _LARGE / timed(parallel, lambda: there.copy_(x))


def timed(parallel: Parallel, work: Callable[[], object]) -> float:
    """Median microseconds; the ranks begin each run together."""
    times = []
    for _ in range(_WARM + _REPEATS):
        parallel.tp.min_reduce(np.zeros(1))
        began = time.perf_counter()
        work()
        if parallel.device.type == "cuda":
            torch.cuda.synchronize()
        times.append((time.perf_counter() - began) * 1e6)
    return statistics.median(times[_WARM:])


def show(rows: list[dict[str, Any]], args: argparse.Namespace) -> None:
    where = "NCCL" if torch.cuda.device_count() >= args.ranks else "gloo"
    print(f"{args.ranks} ranks, {args.dp_size} groups, {where}, {args.dtype}; microseconds")
    for names in ([*_EAGER], [*_IN_GRAPHS]):
        found = [row for row in rows if names[0] in row]
        if found:
            print("| rows | of | parts | " + " | ".join(names) + " |\n" + "|---" * (3 + len(names)) + "|")
        for row in found:
            print(f"| {row['tokens']:.0f} | {row['hidden']:.0f} | {row['kind']} | "
                  + " | ".join(f"{row[name]:.1f}" for name in names) + " |")
    found = [row for row in rows if row.get("kind") == "prompts"]
    if found:
        print("| rows | of | " + " | ".join(COLUMNS) + " |\n" + "|---" * (2 + len(COLUMNS)) + "|")
    for row in found:
        print("| " + " | ".join(f"{row[name]:.0f}" for name in ("rows", "hidden", *COLUMNS)) + " |")
    print(f"host meeting, once a turn: {rows[-1]['microseconds']:.0f}")


if __name__ == "__main__":
    main()
