"""Sums over GPUs of one host: microseconds through peers' memory, in one shot and two, beside NCCL.

    python -m baton.tests.bench.all_reduce [--ranks 2] [--out FILE]

It starts its ranks itself. Each figure is of a CUDA graph of 32 sums, replayed: what a decode step pays. The slowest
rank's median counts.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing

from ...common.distributed.peers import PeerSums, connect
from ...common.distributed.tp import init_tp
from ...kernels.peer_sum import SLOTS, peer_sum

SIZES = [4 << 10, 16 << 10, 32 << 10, 64 << 10, 128 << 10, 256 << 10, 512 << 10, 1 << 20]
CALLS = 32


def per_call(work: Callable[[torch.Tensor], object], nbytes: int, device: torch.device) -> float:
    """Seconds of one call in a graph of many."""
    tensors = [torch.zeros(nbytes // 2, dtype=torch.bfloat16, device=device) for _ in range(4)]
    for tensor in tensors:
        work(tensor)
    torch.cuda.synchronize()
    dist.barrier()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for i in range(CALLS):
            work(tensors[i % len(tensors)])
    times = []
    for _ in range(25):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) / 1e3 / CALLS)
    return statistics.median(times[5:])


def rank_main(rank: int, size: int, folder: str) -> None:
    group = init_tp(rank, size, f"file://{folder}/rendezvous", f"cuda:{rank}", timeout=240)
    peers = connect(group)
    rows = []
    for nbytes in SIZES:
        ways: dict[str, Callable[[torch.Tensor], object]] = {
            "nccl": lambda tensor: dist.all_reduce(tensor, group=group.device_group)}
        if peers is not None and nbytes // 2 <= SLOTS * 4096:
            for name, two_shot in (("one_shot", False), ("two_shot", True)):
                ways[name] = _through(peers, two_shot)
        own = {name: per_call(work, nbytes, group.device) for name, work in ways.items()}
        told: list[dict[str, float]] = [{} for _ in range(size)]
        dist.all_gather_object(told, own)
        rows.append({"bytes": nbytes} | {name: max(one[name] for one in told) * 1e6 for name in own})
    if rank == 0:
        (Path(folder) / "rows.json").write_text(json.dumps(rows))
    group.barrier()
    group.close()


def _through(peers: PeerSums, two_shot: bool) -> Callable[[torch.Tensor], object]:
    return lambda tensor: peer_sum(tensor, peers._peers[tensor.dtype], two_shot=two_shot)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=min(torch.cuda.device_count(), 8))
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if args.ranks < 2:
        sys.exit("This needs two GPUs or more.")
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(rank_main, (args.ranks, folder), nprocs=args.ranks)
        rows = json.loads((Path(folder) / "rows.json").read_text())
    print(f"{args.ranks} ranks, bfloat16, us a sum in a graph of {CALLS}")
    print("| KiB | NCCL | one shot | two shots |\n|---|---|---|---|")
    for row in rows:
        print(f"| {row['bytes'] >> 10} | " + " | ".join(
            f"{row[name]:.1f}" if name in row else "-" for name in ("nccl", "one_shot", "two_shot")) + " |")
    if args.out:
        args.out.write_text(json.dumps({"ranks": args.ranks, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
