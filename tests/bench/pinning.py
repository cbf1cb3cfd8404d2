"""Pinning of host memory in the background: GB/s, and how late launches on the main thread are meanwhile.

    python -m baton.tests.bench.pinning [--gb 8] [--chunk-mib 8,32,128,256]

``populate`` and ``pin`` are rates of these two parts alone, ``all`` the rate in the background with its pauses. A
launch is that of a small kernel, as a step makes hundreds; microseconds at percentiles, the latest one in milliseconds,
and the milliseconds by which launches were late for a GB.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import torch

from ...common.kvcache.tiers import slot_memory
from ...common.kvcache.tiers.host import _pin, _unpin
from ...common.kvcache.tiers.slot_memory import SlotMemory

GROUPS = 2
PART_BYTES = 1 << 20  # a page of a layer group
LATE_US = 200.0


def launches_until(done: Callable[[], bool], x: torch.Tensor) -> np.ndarray:
    """Microseconds of launches until ``done()``."""
    times = []
    while not done():
        for _ in range(20):
            began = time.perf_counter()
            x.add_(1.0)
            times.append(time.perf_counter() - began)
        torch.cuda.synchronize()
    return 1e6 * np.array(times)


def show(name: str, rates: str, times: np.ndarray, gigabytes: float) -> None:
    late = times[times > LATE_US].sum() / 1e3 / gigabytes
    print(f"| {name} | {rates} | {np.percentile(times, 50):.1f} | {np.percentile(times, 99):.1f} | "
          f"{np.percentile(times, 99.9):.0f} | {times.max() / 1e3:.2f} | {late:.0f} |", flush=True)


def measure(chunk_bytes: int, num_slots: int, device: torch.device, x: torch.Tensor) -> tuple[str, np.ndarray]:
    """Rates of pinning in chunks, and the microseconds of launches meanwhile."""
    pin, seconds, populate = partial(_pin, device), {"populate": 0.0, "pin": 0.0}, slot_memory._populate

    def timed_populate(part: np.ndarray) -> None:
        began = time.perf_counter()
        populate(part)
        seconds["populate"] += time.perf_counter() - began

    def timed_pin(address: int, num_bytes: int) -> bool:
        began = time.perf_counter()
        done = pin(address, num_bytes)
        seconds["pin"] += time.perf_counter() - began
        return done

    slot_memory._populate = timed_populate
    began = time.perf_counter()
    memory = SlotMemory([PART_BYTES] * GROUPS, num_slots, pin=timed_pin, unpin=partial(_unpin, device),
                        in_background=True, chunk_bytes=chunk_bytes)
    times = launches_until(lambda: memory.num_allocated == num_slots, x)
    total = time.perf_counter() - began
    slot_memory._populate = populate
    memory.close()
    gigabytes = num_slots * GROUPS * PART_BYTES / 1e9
    return ", ".join(f"{gigabytes / each:.1f}" for each in (*seconds.values(), total)), times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gb", type=float, default=8.0)
    parser.add_argument("--chunk-mib", default="8,32,128,256")
    args = parser.parse_args()
    for path in ("enabled", "defrag", "shmem_enabled"):
        print(path, Path(f"/sys/kernel/mm/transparent_hugepage/{path}").read_text().strip())
    device, x = torch.device("cuda", 0), torch.zeros(1024, device="cuda")
    print("| chunk, MiB | populate, pin, all: GB/s | launch p50, us | p99 | p99.9 | latest, ms | late, ms |")
    print("|---" * 7 + "|")
    began = time.perf_counter()
    show("none", "-", launches_until(lambda: time.perf_counter() > began + 1.0, x), args.gb)
    for mebibytes in map(int, args.chunk_mib.split(",")):
        show(str(mebibytes), *measure(mebibytes << 20, int(args.gb * 1e9) // (GROUPS * PART_BYTES), device, x), args.gb)


if __name__ == "__main__":
    main()
