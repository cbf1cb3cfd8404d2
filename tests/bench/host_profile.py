"""Where the host's time of a step goes, and where the GPU waits for it, with dummy models in this process.

    python -m baton.tests.bench.host_profile [--out FILE]
    python -m baton.tests.bench.host_profile --tiny       # a tiny model on a CPU: does the bench itself run?

Decode steps at several batch sizes: the host's microseconds by part of the step (medians; a part's own time, without
what it calls of other parts), the functions that cost most, and the GPU's idle time between kernels. Prefill steps of
8,192 tokens with many waiting: wall time a step beside the sum of its kernels, the GPU's gaps and what the host did in
them, the GPU's clock and power meanwhile. Last one stream of a model shaped as Qwen3-0.6B.
"""

from __future__ import annotations

import argparse
import cProfile
import dataclasses
import json
import os
import pstats
import statistics
import subprocess
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.profiler import ProfilerActivity, profile

from ...common.bench.client.stepped_engine import SteppedEngine
from ...common.garbage_collector import freeze_collector
from . import dummy_engine
from .host_parts import PARTS, watch, watch_classes


def _first_gpu() -> list[str]:
    """nvidia-smi's argument: it tells of cards that this process does not see, too."""
    return ["-i", os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0] or "0"]


class Clocks:
    """The GPU's clock in MHz and power in W, sampled meanwhile.

    Not for where the host is timed: polled every 100 ms, ``nvidia-smi`` makes calls of CUDA and all else take up to
    four times as long on a virtual machine.
    """

    def __init__(self) -> None:
        self.samples: list[tuple[float, str]] = []
        try:
            self._process: subprocess.Popen[str] | None = subprocess.Popen(
                ["nvidia-smi", *_first_gpu(),
                 "--query-gpu=clocks.sm,power.draw.instant,clocks_event_reasons.active,temperature.gpu",
                 "--format=csv,noheader,nounits", "-lms", "50"], stdout=subprocess.PIPE, text=True)
        except OSError:
            self._process = None
            return
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self._process is not None and self._process.stdout is not None
        for line in self._process.stdout:
            self.samples.append((time.perf_counter(), line.strip()))

    def between(self, begin: float, end: float) -> str:
        rows = [line.split(", ") for at, line in self.samples if begin <= at <= end]
        rows = [row for row in rows if len(row) == 4]
        if not rows:
            return "no clock samples"
        clocks, power = [float(row[0]) for row in rows], [float(row[1]) for row in rows]
        return (f"SM clock {statistics.mean(clocks):.0f} MHz (least {min(clocks):.0f}), power "
                f"{statistics.mean(power):.0f} W (most {max(power):.0f}), reasons {sorted({row[2] for row in rows})}, "
                f"{len(rows)} samples")

    def close(self) -> None:
        if self._process is not None:
            self._process.terminate()
            self._process.wait()


def gaps(recorded: Any, steps: int) -> dict[str, Any]:
    """Idle time of the GPU between kernels, milliseconds a step, and where it was longest."""
    device, host = [], []
    for event in recorded.profiler.kineto_results.events():
        row = (event.start_ns(), event.start_ns() + event.duration_ns(), event.name())
        (device if event.device_type() == torch.autograd.DeviceType.CUDA else host).append(row)
    device = sorted(row for row in device if not row[2].startswith("# "))
    if not device:
        return {}
    host.sort()
    idle: dict[str, list[float]] = defaultdict(list)
    busy, end, last = 0, device[0][0], device[0][2]
    holes = []
    for begin, stop, name in device:
        if begin > end:
            idle[f"{last[:42]} -> {name[:42]}"].append((begin - end) / 1e3)
            holes.append((begin - end, end, begin, name))
        busy += max(0, stop - max(begin, end))
        if stop >= end:
            end, last = stop, name
    span = end - device[0][0]
    kernels = sum(row[1] - row[0] for row in device)
    print(f"  GPU: span {span / 1e6 / steps:.3f} ms a step, busy {busy / 1e6 / steps:.3f}, "
          f"idle {(span - busy) / 1e6 / steps:.3f}; sum of kernels {kernels / 1e6 / steps:.3f}")
    for pair, times in sorted(idle.items(), key=lambda item: -sum(item[1]))[:8]:
        print(f"    {sum(times) / steps:9.1f} us a step idle, {len(times) / steps:6.1f} times: {pair}")
    for length, begin, stop, name in sorted(holes, reverse=True)[:6]:
        during = [(min(stop, row[1]) - max(begin, row[0]), row[2]) for row in host if row[0] < stop and row[1] > begin]
        told = ", ".join(f"{what[:40]} {took / 1e3:.0f}" for took, what in sorted(during, reverse=True)[:7])
        print(f"    gap {length / 1e3:.1f} us before {name[:50]}: {told}")
    return {"span_ms": span / 1e6 / steps, "busy_ms": busy / 1e6 / steps}


def record(engine: SteppedEngine, steps: int, marks: bool) -> dict[str, Any]:
    """``marks``: with the host's parts, which slows it."""
    kinds = [ProfilerActivity.CPU] if marks or engine.device.type == "cpu" else []
    kinds += [ProfilerActivity.CUDA] if engine.device.type == "cuda" else []
    engine.synchronize()
    PARTS.marks = marks
    with profile(activities=kinds) as recorded:
        for _ in range(steps):
            engine.step()
        engine.synchronize()
    PARTS.marks = False
    return gaps(recorded, steps)


def decode(engine: SteppedEngine, batch: int, context: int, steps: int, name: str, detail: bool = True) -> dict[str,
                                                                                                                Any]:
    """A batch that is computed already (``context`` 0) or is prefilled first."""
    if context:
        engine.start(batch, context, 3 * steps + 40)
    while engine.prefilling:
        engine.step()
    for _ in range(5):
        engine.step()
    walls = []
    for _ in range(steps):
        begin = time.perf_counter()
        engine.step()
        walls.append(1e3 * (time.perf_counter() - begin))
    PARTS.start()
    for _ in range(steps):
        PARTS.begin()
        engine.step()
        PARTS.end()
    PARTS.on = False
    table = PARTS.table()
    print(f"\n## decode, {name}, batch {batch}: step {statistics.mean(walls):.3f} ms (median "
          f"{statistics.median(walls):.3f}, most {max(walls):.3f})\n  host us by part: "
          + ", ".join(f"{part} {took:.0f}" for part, took in table.items()), flush=True)
    found = {"batch": batch, "step_ms": statistics.mean(walls), "parts_us": table}
    found |= record(engine, 10, marks=False)
    if detail:
        record(engine, 4, marks=True)
        top(engine, steps // 2)
    engine.finish()
    return found


def life(engine: SteppedEngine, batch: int, context: int, tokens: int) -> dict[str, Any]:
    """A batch that begins together, comes to new pages together and ends together: which steps cost most."""
    engine.start(batch, context, tokens)
    begin, prompts = time.perf_counter(), []
    while engine.prefilling:
        engine.step()
        prompts.append(time.perf_counter() - begin)
    engine.synchronize()
    PARTS.start()
    spins = []
    while not engine.idle:
        PARTS.begin()
        engine.step()
        PARTS.end()
        spins.append(spin(1000))
    PARTS.on = False
    hosts = [1e6 * sum(took for name, took in step.items() if name != "wait") for step in PARTS.steps]
    print(f"\n## a life of {batch}, {context} + {tokens} tokens: prompts {prompts[-1]:.2f} s, the first two steps "
          f"{1e3 * prompts[min(1, len(prompts) - 1)]:.0f} ms; host {statistics.mean(hosts):.0f} us a step (median "
          f"{statistics.median(hosts):.0f}, {len(hosts)} steps)")
    for place in sorted(sorted(range(len(hosts)), key=hosts.__getitem__)[-14:]):
        parts = sorted((-1e6 * took, name) for name, took in PARTS.steps[place].items() if name != "wait")
        print(f"  step {place}: {hosts[place]:.0f} us: " + ", ".join(f"{name} {-took:.0f}" for took, name in parts[:7]))
    engine.finish()
    print(f"  a short loop of Python behind each step, us: least {min(spins):.1f}, median "
          f"{statistics.median(spins):.1f}, most {max(spins):.1f}; correlation with the host's time "
          f"{np.corrcoef(spins, hosts)[0, 1]:.2f}")
    return {"batch": batch, "context": context, "host_us": hosts, "spin_us": spins}


def lives(engine: SteppedEngine, batch: int, context: int, tokens: int) -> dict[str, Any]:
    """The first batches of an engine, each a whole life: is the first one slower, and in which parts?"""
    found = {}
    far = np.arange(1 << 25)
    places = np.random.default_rng(0).integers(0, len(far), 1 << 18)
    for name in ("first", "second", "third"):
        spins = [spin() for _ in range(20)]
        found[name] = life(engine, batch, context, tokens)
        table = PARTS.table()
        print(f"  {name} life's medians, us: " + ", ".join(f"{part} {took:.0f}" for part, took in table.items()))
        print("  of the thread in all: " + ", ".join(
            f"{what} {sum(used[what] for used in PARTS.usages):.4g}" for what in PARTS.usages[0])
              + f"; a loop of Python before took {min(spins):.0f} to {max(spins):.0f} us, behind "
              f"{min(spin() for _ in range(20)):.0f}; a random place of 256 MiB takes {_reach_ns(far, places):.1f} ns",
              flush=True)
    return found


def _reach_ns(far: np.ndarray, places: np.ndarray) -> float:
    """Nanoseconds to read one of ``far``'s ``places``."""
    begin = time.perf_counter()
    far.take(places)
    return 1e9 * (time.perf_counter() - begin) / len(places)


def spin(turns: int = 10_000) -> float:
    """Microseconds of a loop that does always the same: how fast the processor is now, wherever memory is."""
    begin = time.perf_counter()
    for _ in range(turns):
        pass
    return 1e6 * (time.perf_counter() - begin)


def top(engine: SteppedEngine, steps: int) -> None:
    with cProfile.Profile() as recorded:
        for _ in range(steps):
            engine.step()
    rows = [(own, calls, place) for place, (_, calls, own, _, _) in pstats.Stats(recorded).stats.items()]
    print("  own us a step under cProfile, calls a step:")
    for own, calls, (path, line, name) in sorted(rows, reverse=True)[:25]:
        print(f"    {1e6 * own / steps:8.1f} {calls / steps:7.1f}  {'/'.join(path.split('/')[-2:])}:{line} {name[:80]}")


def prefill(engine: SteppedEngine, count: int, length: int, clocks: Clocks) -> dict[str, Any]:
    """``count`` prompts wait; steps back to back. They go on to decode."""
    engine.start(count, length, 400)
    engine.synchronize()
    walls: list[float] = []
    begin = begin_all = time.perf_counter()
    steps = min(12, count // 2 - 4)
    for _ in range(steps):
        engine.step()
        now = time.perf_counter()
        walls.append(1e3 * (now - begin))
        begin = now
    engine.synchronize()
    total = time.perf_counter() - begin_all
    tokens = 2 * length * steps
    print(f"\n## prefill, {count} x {length}, {steps} steps back to back: {1e3 * total / steps:.2f} ms a step, "
          f"{tokens / total:,.0f} tok/s; steps {' '.join(f'{wall:.1f}' for wall in walls)}")
    print("  " + clocks.between(begin_all, time.perf_counter()), flush=True)
    found = {"ms": 1e3 * total / steps, "tok_s": tokens / total}
    begin = time.perf_counter()
    found |= record(engine, 3, marks=False)
    print("  while recorded: " + clocks.between(begin, time.perf_counter()))
    PARTS.start()
    for _ in range(3):
        PARTS.begin()
        engine.step()
        PARTS.end()
    PARTS.on = False
    print("  host us by part: " + ", ".join(f"{part} {took:.0f}" for part, took in PARTS.table().items()))
    record(engine, 1, marks=True)
    return found


def closed_loop(engine: SteppedEngine, length: int, users: int, steps: int, clocks: Clocks) -> dict[str, Any]:
    """``users`` ask for one token each and ask again at once."""
    live = engine._parts.tracker.live

    def refill() -> None:
        while len(live) < users:
            engine.start(1, length, 1)

    refill()
    for _ in range(3):
        engine.step()
        refill()
    begin, walls = time.perf_counter(), []
    for _ in range(steps):
        start = time.perf_counter()
        engine.step()
        refill()
        walls.append(1e3 * (time.perf_counter() - start))
    took = time.perf_counter() - begin
    rate = 2 * length * steps / took
    print(f"\n## prefill, {users} users of {length}/1: {1e3 * took / steps:.2f} ms a step, {rate:,.0f} tok/s; "
          f"steps {' '.join(f'{wall:.1f}' for wall in walls)}\n  {clocks.between(begin, time.perf_counter())}",
          flush=True)
    engine.finish()
    return {"ms": 1e3 * took / steps, "tok_s": rate}


def by_size(engine: SteppedEngine, length: int) -> dict[str, Any]:
    """Milliseconds of prefill steps of 1, 2, 4 and 8 prompts."""
    found = {}
    for count in (1, 2, 4, 8):
        times = []
        for _ in range(4):
            engine.start(count, length, 1)
            engine.synchronize()
            begin = time.perf_counter()
            engine.step()
            engine.synchronize()
            times.append(1e3 * (time.perf_counter() - begin))
            engine.finish()
        found[str(count)] = statistics.median(times[1:])
    print(f"\n## prefill of 1, 2, 4, 8 x {length}, ms a step: {found}", flush=True)
    return found


def mixed(engine: SteppedEngine, riding: int, length: int, context: int) -> dict[str, Any]:
    """Prompts in steps of their own between decode steps, and with the decode rows riding along."""
    batcher = engine._scheduler.batcher
    engine.start(riding, context, 300)
    while engine.prefilling:
        engine.step()
    plain, found = batcher.args, {}
    for name, args in (("apart", plain), ("riding", dataclasses.replace(plain, enable_mixed_chunk=True))):
        batcher.set_args(args)
        for _ in range(12):
            engine.step()
        engine.synchronize()
        begin = time.perf_counter()
        for _ in range(10):
            engine.step()
        engine.synchronize()
        alone = 1e2 * (time.perf_counter() - begin)
        engine.start(16, length, 1)
        begin, steps = time.perf_counter(), 0
        while engine.prefilling:
            engine.step()
            steps += 1
        engine.synchronize()
        found[name] = {"decode_ms": alone, "prompts_ms": 1e3 * (time.perf_counter() - begin), "steps": steps}
    batcher.set_args(plain)
    print(f"\n## 16 prompts of {length} beside {riding} that decode: {found}", flush=True)
    engine.finish()
    return found


def clocked(work: Callable[[Clocks], dict[str, Any]]) -> dict[str, Any]:
    clocks = Clocks()
    try:
        return work(clocks)
    finally:
        clocks.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--only", help="names of parts, with commas between: lives 256,prefill,decode of these,"
                        "decode 256,decode 1,life 256,life 64,small,by size,mixed,closed loop")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    tiny = args.tiny
    found: dict[str, Any] = {}
    born = time.perf_counter()

    def attempt(name: str, work: Callable[[], dict[str, Any]]) -> None:
        if args.only and name not in args.only.split(","):
            return
        try:
            found[name] = work()
        except Exception as error:  # the other parts' figures are worth having
            print(f"{name}: {type(error).__name__}: {error}", flush=True)
        print(f"[{time.perf_counter() - born:.1f} s]", flush=True)
        if args.out:
            args.out.write_text(json.dumps(found, indent=1))

    watch_classes()
    make: dict[str, Any] = {"device": "cpu", "shape": dummy_engine.TINY} if tiny else {}
    length, wide, steps = (64, 20, 8) if tiny else (4096, 256, 40)
    engine = dummy_engine.make(20_000 if tiny else 330_000, wide, sizes=(1, 64, wide), **make)
    watch(engine._scheduler, engine._parts)
    freeze_collector()
    print(f"engine after {time.perf_counter() - born:.1f} s; threads of Python {threading.enumerate()}", flush=True)
    many = 16 if tiny else 40
    attempt(f"lives {wide}", lambda: lives(engine, wide, 40 if tiny else 1024, 20 if tiny else 90))
    attempt("prefill", lambda: clocked(lambda clocks: prefill(engine, many, length, clocks)))
    attempt("decode of these", lambda: decode(engine, many, 0, steps, "8B", detail=False))
    for batch in (wide, 1):
        attempt(f"decode {batch}", lambda batch=batch: decode(engine, batch, 32 if tiny else 512, steps, "8B"))

    for batch in (wide, 64):
        attempt(f"life {batch}", lambda batch=batch: life(engine, batch, 40 if tiny else 1024, 20 if tiny else 90))

    def of_the_small_one() -> dict[str, Any]:
        shape: dict[str, Any] = {"shape": dummy_engine.TINY if tiny else dummy_engine.QWEN3_06B}
        small = dummy_engine.make(20_000, 8, sizes=(1,), **(make | shape))
        watch(small._scheduler, small._parts)
        freeze_collector()
        return decode(small, 1, 64 if tiny else 1024, 2 * steps, "0.6B")

    attempt("small", of_the_small_one)
    attempt("by size", lambda: by_size(engine, length // 4))
    attempt("mixed", lambda: mixed(engine, wide - 16 if not tiny else 2, length // 4, length // 8))
    attempt("closed loop", lambda: clocked(lambda clocks: closed_loop(engine, length, 8, 8, clocks)))


if __name__ == "__main__":
    main()
