"""What ``many_gpus`` reads from profiles: of the device its kernels, of the host its functions."""

from __future__ import annotations

import cProfile
import pstats
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from torch.autograd import DeviceType

from ...common.distributed.tp import TPGroup

_EXCHANGES = re.compile(r"nccl|peer_", re.IGNORECASE)
Kernel = tuple[float, float, str]
"""Its start and end in microseconds, and its name."""


def kernels_of(profile: Any) -> list[Kernel]:
    return sorted((event.time_range.start, event.time_range.end, event.name) for event in profile.events() or ()
                  if event.device_type == DeviceType.CUDA)


def exchange_times(kernels: list[Kernel], world: TPGroup) -> dict[str, float]:
    """Shares of the time from the first kernel's begin to the last one's end: of ``exchanges``, each as long as it took
    on the rank that came to it last; of ``waits`` for that rank; and of nothing at all."""
    begin, done, busy = kernels[0][0], 0.0, 0.0
    for start, end, _ in kernels:
        busy += max(0.0, end - max(start, done))
        done = max(done, end)
    span = done - begin
    mine = np.array([1e3 * (end - start) for start, end, name in kernels if _EXCHANGES.search(name)], np.int64)
    counts = world.gather_ints(np.array([len(mine)]))
    least = mine.copy()
    if len(mine) and (counts == len(mine)).all():
        least = world.gather_ints(mine).min(0)
    return {"exchanges": float(least.sum() / 1e3 / span), "waits": float((mine - least).sum() / 1e3 / span),
            "idle": 1 - busy / span, "count": float(len(mine))}


def advanced(kernels: list[Kernel]) -> list[Kernel]:
    """Each from where all that ended before it had: one that starts early (programmatic dependent launch) waits until
    then."""
    done, found = float("-inf"), []
    for start, end, name in sorted(kernels, key=lambda kernel: kernel[1]):
        found.append((max(start, done), end, name))
        done = end
    return found


def longest(kernels: list[Kernel], most: int = 16) -> list[tuple[str, int, float]]:
    """Names of kernels with their calls and milliseconds in all."""
    found: dict[str, list[float]] = {}
    for start, end, name in kernels:
        found.setdefault(name[:90], []).append((end - start) / 1e3)
    told = [(name, len(times), sum(times)) for name, times in found.items()]
    return sorted(told, key=lambda row: -row[2])[:most]


def host_times(work: Callable[[], object], most: int = 40) -> list[tuple[str, int, float, float]]:
    """Functions with their calls and milliseconds, their own and with those that they call; a profile slows each call.
    """
    profile = cProfile.Profile()
    profile.runcall(work)
    stats = pstats.Stats(profile).stats  # type: ignore[attr-defined]
    found = [(f"{Path(file).name}:{number} {name}", calls, 1e3 * own, 1e3 * total)
             for (file, number, name), (_, calls, own, total, _) in stats.items()]
    return sorted(found, key=lambda row: -row[2])[:most]
