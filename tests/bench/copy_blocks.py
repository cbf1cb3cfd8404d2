"""The copy of scattered blocks by itself: GB/s for sizes of blocks and numbers of programs, beside a plain copy.

    python -m baton.tests.bench.copy_blocks [--programs 16,32,64] [--out FILE]

512 MiB within GPU 0 and, where there are two, to GPU 1. The host's part of one write, as the ipc backend makes it, is
timed beside: microseconds until the call has returned.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from ...kernels.comm.copy_blocks import copy_blocks
from ...kvtransfer.backends.ipc_cuda import CudaMemory
from .device_time import run_seconds

TOTAL = 512 << 20
BLOCKS = (4 << 10, 16 << 10, 64 << 10, 1 << 20)


def gb_s(work: Callable[[], object]) -> float:
    return TOTAL / statistics.median(run_seconds(work, 8)[2:]) / 1e9


def rows_to(target: int, tried: list[int]) -> list[dict[str, float | str]]:
    torch.cuda.set_device(0)
    source = torch.randint(0, 256, (2 * TOTAL,), dtype=torch.uint8, device="cuda:0")
    there = torch.zeros(2 * TOTAL, dtype=torch.uint8, device=f"cuda:{target}")
    rows: list[dict[str, float | str]] = [
        {"to": f"GPU {target}", "what": "plain copy", "gb_s": gb_s(lambda: there[:TOTAL].copy_(source[:TOTAL]))}]
    for block in BLOCKS:
        count = 2 * TOTAL // block
        ids = torch.stack([torch.randperm(count)[:TOTAL // block] for _ in range(2)]).cuda(0)
        for programs in tried:
            rate = gb_s(lambda: copy_blocks(
                source.data_ptr(), there.data_ptr(), ids, block, programs=programs))  # noqa: B023
            rows.append({"to": f"GPU {target}", "what": f"{block >> 10} KiB, {programs} programs", "gb_s": rate})
        arrived = there.view(-1, block)[ids[1, :64].to(there.device)].cpu()
        assert torch.equal(arrived, source.view(-1, block)[ids[0, :64]].cpu()), "blocks arrived wrong"
    return rows


def host_us(block: int) -> float:
    """Of a write of a 4,096-token prompt's pages."""
    memory = CudaMemory(0)
    pool = torch.zeros(2 * TOTAL, dtype=torch.uint8, device="cuda:0")
    ids = np.random.default_rng(0).permutation(TOTAL // block)
    times = []
    for _ in range(30):
        began = time.perf_counter()
        memory.copy(pool.data_ptr(), pool.data_ptr() + TOTAL, ids, ids, block)
        times.append(time.perf_counter() - began)
        memory.wait_for_copies()
    return statistics.median(times) * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--programs", default="8,16,32,64,128,264")
    parser.add_argument("--to", type=int, default=0, help="the first GPU to copy to")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    programs = [int(n) for n in args.programs.split(",")]
    rows = [row for target in range(args.to, min(2, torch.cuda.device_count())) for row in rows_to(target, programs)]
    print("\n".join(f"{row['to']:6} {row['what']:24} {row['gb_s']:8.1f} GB/s" for row in rows))
    calls = {f"{block >> 10} KiB": host_us(block) for block in (16 << 10, 1 << 20)}
    print("the host's part of a write of 512 MiB:", ", ".join(f"{name} {us:.0f} us" for name, us in calls.items()))
    if args.out:
        args.out.write_text(json.dumps({"device": torch.cuda.get_device_name(0), "rows": rows, "host_us": calls}))


if __name__ == "__main__":
    main()
