"""Sums over GPUs of one host: microseconds through peers' memory, in one shot and two, beside NCCL; plain, and with the
residual and the norm that follow in a decoder.

    python -m baton.tests.bench.all_reduce [--ranks 2] [--width 4096] [--out FILE]

It starts its ranks itself. Each figure is of a CUDA graph of 32 sums, replayed: what a decode step pays. The slowest
rank's median counts. NCCL's norm is a kernel behind its sum.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing

from ...common.distributed.peer_all_reduce import connect, slots_for
from ...common.distributed.tp import TPGroup, init_tp
from ...kernels.comm.all_reduce import SLOT_VALUES, PeerBuffers, all_reduce, all_reduce_rmsnorm, rows_per_program
from ...kernels.rowwise.rmsnorm import rmsnorm
from .device_time import run_seconds

SIZES = [8 << 10, 16 << 10, 32 << 10, 64 << 10, 128 << 10, 256 << 10, 512 << 10,
         *(1 << 20 + bits for bits in range(6))]
CALLS = 32
WAYS = ("nccl", "one shot", "two shots", "nccl, norm", "one shot with norm", "two shots with norm")

Work = Callable[[torch.Tensor], object]


def per_call(work: Work, rows: int, width: int, device: torch.device) -> float:
    """Seconds of one call in a graph of many."""
    tensors = [torch.zeros(rows, width, dtype=torch.bfloat16, device=device) for _ in range(4)]
    for tensor in tensors:
        work(tensor)
    torch.cuda.synchronize()
    dist.barrier()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for i in range(CALLS):
            work(tensors[i % len(tensors)])
    return statistics.median(run_seconds(graph.replay, 25)[5:]) / CALLS


def ways(group: TPGroup, peers: PeerBuffers | None, rows: int, width: int) -> dict[str, Work]:
    residual = torch.zeros(rows, width, dtype=torch.bfloat16, device=group.device)
    weight = torch.ones(width, dtype=torch.bfloat16, device=group.device)
    nccl = partial(dist.all_reduce, group=group.device_group)

    def nccl_and_norm(x: torch.Tensor) -> object:
        nccl(x)
        return rmsnorm(x, weight, 1e-5, residual)

    found: dict[str, Work] = {"nccl": nccl, "nccl, norm": nccl_and_norm}
    for name, two_shots in (("one shot", False), ("two shots", True)):
        if peers is None or (two_shots and peers.size & (peers.size - 1)):
            continue
        if rows * width <= peers.slots * SLOT_VALUES:
            found[name] = partial(all_reduce, peers=peers, two_shots=two_shots)
        if rows_per_program(rows, width, peers.slots) is not None:
            found[f"{name} with norm"] = partial(all_reduce_rmsnorm, residual=residual, weight=weight, eps=1e-5,
                                                 peers=peers, two_shots=two_shots)
    return found


def rank_main(rank: int, size: int, width: int, folder: str) -> None:
    group = init_tp(rank, size, f"file://{folder}/rendezvous", f"cuda:{rank}", timeout=240)
    made = connect(group, slots_for(size))
    table = []
    for nbytes in SIZES:
        rows = nbytes // 2 // width
        own = {name: per_call(work, rows, width, group.device)
               for name, work in ways(group, made and made.shared, rows, width).items()}
        told: list[dict[str, float]] = [{} for _ in range(size)]
        dist.all_gather_object(told, own)
        table.append({"bytes": nbytes} | {name: max(one[name] for one in told) * 1e6 for name in own})
        if rank == 0:
            show(table[-1:])
            (Path(folder) / "rows.json").write_text(json.dumps(table))
    group.barrier()
    group.close()


def show(table: list[dict[str, float]]) -> None:
    """Microseconds, and how many times quicker than NCCL."""
    for row in table:
        cells = []
        for name in WAYS:
            base = row["nccl, norm" if "norm" in name else "nccl"]
            ratio = "" if name.startswith("nccl") or name not in row else f" ({base / row[name]:.1f}x)"
            cells.append(f"{row[name]:.1f}{ratio}" if name in row else "-")
        print(f"| {int(row['bytes']) >> 10} | " + " | ".join(cells) + " |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=min(torch.cuda.device_count(), 8))
    parser.add_argument("--width", type=int, default=4096, help="of a row")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if args.ranks < 2:
        sys.exit("This needs two GPUs or more.")
    print(f"{args.ranks} ranks, bfloat16, rows of {args.width}, us a sum in a graph of {CALLS}")
    print(f"| KiB | {' | '.join(WAYS)} |\n|{'---|' * (len(WAYS) + 1)}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(rank_main, (args.ranks, args.width, folder), nprocs=args.ranks)
        rows = json.loads((Path(folder) / "rows.json").read_text())
    if args.out:
        args.out.write_text(json.dumps({"ranks": args.ranks, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
