"""What it costs that attention groups meet: at a layer's MLP, and once a turn on the host.

    python -m baton.tests.bench.token_exchange [--ranks 2] [--dp-size 2] [--hidden 4096] [--tokens 1,16,128,1024]
        [--dtype bfloat16] [--out FILE.json]

One process a rank, over NCCL where there are as many GPUs, else over gloo. Each line is one layer's exchange, without
the MLP: gather and part by a sum of all rows on all ranks (``around``), gather and sum the own rows alone (``summed``),
and beside them the bare collectives on equal parts: all-gather and reduce-scatter. ``uneven`` gives group 0 the tokens
and the others one each, as while one prefills. Microseconds, the slowest rank's median.

On GPUs also what an exchange (``summed``) costs in a CUDA graph of 32, as decode steps have it: by NCCL, and where the
parts are small through the peers' memory.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ...common.distributed.parallel import Parallel, init_parallel
from ...common.distributed.peers import connect_all
from ...common.engine.meeting import Meeting

_WARM, _REPEATS, _IN_GRAPH = 5, 30, 32


def main() -> None:
    parser = argparse.ArgumentParser(description="Cost of the token exchange.")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--dp-size", type=int, default=2)
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--tokens", default="1,16,128,1024")
    parser.add_argument("--dtype", default="bfloat16")
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
    parallel = init_parallel(rank, args.ranks, args.dp_size, meeting, device, timeout=120)
    dtype = getattr(torch, args.dtype)
    rows = []
    for tokens in map(int, args.tokens.split(",")):
        for kind in ("even", "uneven"):
            counts = [tokens if kind == "even" or group == 0 else 1 for group in range(args.dp_size)]
            rows.append({"tokens": float(tokens), "kind": kind, **measured(parallel, counts, args.hidden, dtype)})
    if device.type == "cuda":
        rows += graph_rows(parallel, [int(tokens) for tokens in args.tokens.split(",")], args.hidden, dtype)
    host = Meeting(parallel)
    rows.append({"tokens": 0.0, "kind": "host meeting", "microseconds": timed(
        parallel, lambda: host.agree(1, 1, decodes=True))})
    answers.put(rows)
    parallel.close()


def measured(parallel: Parallel, counts: list[int], hidden: int, dtype: torch.dtype) -> dict[str, float]:
    exchange, across = parallel.tokens, parallel.across
    x = torch.randn(counts[parallel.dp_rank], hidden, device=parallel.device).to(dtype)
    equal = torch.randn(max(counts), hidden, device=parallel.device).to(dtype)
    exchange.begin(counts)
    return {
        "around": timed(parallel, lambda: exchange.around(parallel.mlp.all_reduce, x)),
        "summed": timed(parallel, lambda: exchange.summed(lambda y: y, x)),
        "collectives": timed(parallel, lambda: across.reduce_scatter_rows(across.all_gather_rows(equal))),
    }


def graph_rows(parallel: Parallel, tokens: list[int], hidden: int, dtype: torch.dtype) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = [{"tokens": float(count), "kind": "graph"} for count in tokens]
    for way in ("nccl", "peers"):
        if way == "peers":
            connect_all(parallel)
        for row, count in zip(rows, tokens):
            row[way] = in_graph(parallel, count, hidden, dtype)
    return rows


def in_graph(parallel: Parallel, tokens: int, hidden: int, dtype: torch.dtype) -> float:
    """Microseconds of one exchange of so many rows of each group."""
    x = torch.randn(tokens, hidden, device=parallel.device).to(dtype)
    parallel.tokens.begin([tokens] * parallel.dp_size)

    def exchange() -> None:
        parallel.tokens.summed(lambda y: y, x)

    exchange()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for _ in range(_IN_GRAPH):
            exchange()
    return timed(parallel, graph.replay) / _IN_GRAPH


def timed(parallel: Parallel, work: Callable[[], object]) -> float:
    """Median microseconds; the ranks begin each run together."""
    times = []
    for _ in range(_WARM + _REPEATS):
        parallel.world.min_reduce(np.zeros(1))
        began = time.perf_counter()
        work()
        if parallel.device.type == "cuda":
            torch.cuda.synchronize()
        times.append((time.perf_counter() - began) * 1e6)
    return statistics.median(times[_WARM:])


def show(rows: list[dict[str, Any]], args: argparse.Namespace) -> None:
    where = "NCCL" if torch.cuda.device_count() >= args.ranks else "gloo"
    print(f"{args.ranks} ranks, {args.dp_size} groups, {where}, rows of {args.hidden} {args.dtype}; microseconds")
    print(f"{'tokens':>8} {'parts':>7} {'around':>10} {'summed':>10} {'collectives':>12}")
    for row in rows:
        if "nccl" in row:
            print(f"{row['tokens']:8.0f} in a graph: {row['nccl']:.1f} by NCCL, {row['peers']:.1f} with peers' memory")
        elif "microseconds" in row:
            print(f"host meeting, once a turn: {row['microseconds']:.0f}")
        else:
            print(f"{row['tokens']:8.0f} {row['kind']:>7} {row['around']:10.0f} {row['summed']:10.0f} "
                  f"{row['collectives']:12.0f}")


if __name__ == "__main__":
    main()
