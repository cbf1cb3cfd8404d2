"""One rank of ``many_gpus``: builds an engine for each case, and drives it in step with the other ranks."""

from __future__ import annotations

import argparse
import gc
import json
import os
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from ...common.api.errors import ConfigError
from ...common.bench.client.stepped_engine import SteppedEngine
from ...common.bench.step_parts import recorder
from ...common.config.cli import parse
from ...common.config.server import ServerConfig
from ...common.distributed.expert_parallel import ExpertParallel
from ...common.distributed.parallel import OVERLAP_CTAS, Parallel, overlap_group
from ...common.distributed.peer_all_reduce import connect_all
from ...common.distributed.tp import TPGroup, init_tp
from ...common.garbage_collector import freeze_collector
from . import ceilings
from .many_gpus import setting_flags, shape_of
from .many_gpus_profile import Kernel, advanced, exchange_times, host_times, kernels_of, longest

WARM, TIMED, RECORDED = 8, 24, 3
"""Decode steps."""
LEVEL = WARM + TIMED + RECORDED + 4
"""Tokens that a batch writes until it is made smaller."""
REHEARSED_LAYERS = 2
"""The first may have no experts."""
COLUMNS = ("prompt tok/s", "a step ms", "exchanges ms", "share", "waits ms", "idle ms")


class Steps(NamedTuple):
    """Decode steps of a batch: seconds of one, and the kernels of RECORDED."""

    seconds: float
    kernels: list[Kernel]

    def told(self) -> dict[str, Any]:
        """Of a step its microseconds as it is recorded, and how far each kind of kernel brings it on."""
        begin, end = self.kernels[0][0], max(end for _, end, _ in self.kernels)
        return {"steps": RECORDED, "us": (end - begin) / RECORDED, "kernels": longest(advanced(self.kernels))}


class Driven:
    """An engine that is stepped together with those of the other ranks."""

    def __init__(self, engine: SteppedEngine, world: TPGroup, groups: int, group: int):
        self.engine = engine
        self._world = world
        self._groups = groups
        self._group = group

    def start(self, requests: int, length: int, answer: int) -> None:
        """So many over all attention groups."""
        self.engine.start(self._share(requests), length, answer)

    def _share(self, requests: int) -> int:
        """Of so many over all groups, this one's."""
        each, more = divmod(requests, self._groups)
        return each + (self._group < more)

    def until(self, done: Callable[[], bool]) -> int:
        """Step until all ranks are ``done``; returns in how many steps."""
        steps = 0
        while self._world.gather_ints(np.array([not done()])).any():
            self.engine.step()
            steps += 1
        return steps

    def meet(self) -> float:
        """The time at which all ranks' devices have done what was asked."""
        self.engine.synchronize()
        self._world.barrier()
        return time.perf_counter()

    def prefill(self, prompts: int, length: int) -> tuple[float, int]:
        """Seconds to the last first token, and steps."""
        self.start(prompts, length, 1)
        began = self.meet()
        steps = self.until(lambda: not self.engine.prefilling)
        seconds = self.meet() - began
        self.finish()
        return seconds, steps

    def decode(self, batches: list[int], context: int) -> dict[int, Steps]:
        """Steps of each. All begin with the largest, whose prompts are computed once, and end while the next smaller
        goes on."""
        falling, found = sorted(set(batches), reverse=True), {}
        for level, (batch, smaller) in enumerate(zip(falling, [*falling[1:], 0]), 1):
            self.engine.start(self._share(batch) - self._share(smaller), context, level * LEVEL)
        self.until(lambda: not self.engine.prefilling)
        for batch in falling:
            self.until(lambda batch=batch: self.engine.num_decoding <= self._share(batch))  # type: ignore[misc]
            for _ in range(WARM):
                self.engine.step()
            began = self.meet()
            for _ in range(TIMED):
                self.engine.step()
            seconds = (self.meet() - began) / TIMED
            assert self.engine.num_decoding == self._share(batch), "some ended early, or late"
            found[batch] = Steps(seconds, self._recorded_steps())
        self.finish()
        return found

    def _recorded_steps(self) -> list[Kernel]:
        """Those of RECORDED steps; none on a CPU."""
        if self.engine.device.type != "cuda":
            return []
        with recorder(self.engine.device) as profile:
            self.meet()  # a recorder takes each rank another time to start
            for _ in range(RECORDED):
                self.engine.step()
            self.engine.synchronize()
        return kernels_of(profile)

    def finish(self) -> None:
        self.until(lambda: self.engine.idle)
        self.engine.finish()

    def recorded(self, prompts: int, length: int) -> list[Kernel]:
        """Those of a prefill."""
        self.start(prompts, length, 1)
        self.meet()
        with recorder(self.engine.device) as profile:
            self.until(lambda: not self.engine.prefilling)
            self.engine.synchronize()
        self.finish()
        return kernels_of(profile)


def build(case: dict[str, str], args: argparse.Namespace, world: TPGroup) -> tuple[Driven, dict[str, float]]:
    """The engine, and what its start took in seconds. Raises ConfigError."""
    shape = shape_of(case["model"]) | ({"num_hidden_layers": args.layers} if args.layers else {})
    batches = batches_of(args, case)
    groups = args.gpus if "dp" in case["setting"].split("+") else 1
    most = -(-max(batches, default=1) // groups)
    tokens = max(most * (args.context + 32) + answered(batches), -(-args.prompts // groups) * (args.length + 32))
    flags = ["--load-format", "dummy", "--max-total-tokens", str(tokens), "--disable-radix-cache",
             "--max-running-requests", str(max(most, args.prompts)), *setting_flags(case["setting"], args.gpus),
             *args.server_flags.split()]
    if batches:
        sizes = sorted({-(-batch // groups) for batch in batches})
        flags += ["--cuda-graph-bs", *map(str, sizes), "--cuda-graph-max-bs", str(sizes[-1])]
    else:
        flags += ["--disable-cuda-graph"] if "eager" in case["setting"] else ["--cuda-graph-bs", "1"]
    if case["quantization"] != "none":
        flags += ["--quantization", case["quantization"]]
    stages: dict[str, float] = {}
    began = time.perf_counter()

    def progress(what: str, share: float) -> None:
        stages[what] = time.perf_counter() - began

    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(shape))
        config = parse(ServerConfig, ["--model-path", folder, "--device", world.device.type, *flags],
                       prog="many_gpus", description="")
        share = ExpertParallel.from_args(config.parallel, world)
        parallel = Parallel(world, experts=share)
        if groups > 1:
            parallel = Parallel(world, TPGroup(device=world.device), world, share,
                                dp_head=config.data_parallel.enable_dp_lm_head,
                                dp_overlap=beside(case["setting"], world))
        engine = SteppedEngine(config, parallel, progress)
    return Driven(engine, world, groups, world.rank if groups > 1 else 0), stages


def beside(setting: str, world: TPGroup) -> TPGroup | None:
    """What the exchanges of two batches go by; None without them."""
    given = next((part[3:] for part in setting.split("+") if part.startswith("two")), "0")
    ctas = int(given or OVERLAP_CTAS)
    return overlap_group(world, list(range(world.size)), timedelta(seconds=120), ctas) if ctas else None


def batches_of(args: argparse.Namespace, case: dict[str, str] | None = None) -> list[int]:
    """Of one engine; without a ``case`` of all."""
    if case is not None and "prompts" in case["setting"].split("+"):
        return []
    return [int(batch) for batch in args.batches.split(",") if batch]


def answered(batches: list[int]) -> int:
    """Tokens that those write which ``decode`` begins with, at most."""
    return sum(LEVEL * batch for batch in set(batches))


def measure(case: dict[str, str], args: argparse.Namespace, world: TPGroup) -> dict[str, Any]:
    driven, stages = build(case, args, world)
    freeze_collector()
    began, some = time.perf_counter(), max(args.prompts // 4, args.gpus)
    try:
        driven.prefill(some, args.length)
        warm = time.perf_counter() - began
        seconds, steps = driven.prefill(args.prompts, args.length)
        row: dict[str, Any] = {**case, "started_s": stages, "warm_s": warm, "prefill_s": seconds,
                               "prefill_steps": steps, "in_tok_s": args.prompts * args.length / seconds}
        if (graphs := driven.engine.prompt_graphs) is not None:
            row["prompts in graphs"] = graphs._asdict()
        if world.device.type == "cuda":
            kernels = driven.recorded(some, args.length)
            row |= {"shares": exchange_times(kernels, world), "kernels": longest(kernels)}
        if args.host:
            row["host"] = host_times(lambda: driven.prefill(args.prompts, args.length))
        took = driven.decode(batches_of(args, case), args.context)
        row["decode_ms"] = {str(batch): 1e3 * steps.seconds for batch, steps in took.items()}
        row["steps_of"] = {str(batch): steps.told() for batch, steps in took.items() if steps.kernels}
        row["took_s"] = time.perf_counter() - began
        if world.device.type == "cuda":
            row["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
    finally:
        gc.unfreeze()
    return row


def rehearse(rank: int, case: dict[str, str], args: argparse.Namespace, folder: str) -> None:
    """A rank's process that runs ``case`` with few layers, so that Triton's cache has its kernels."""
    began = time.time()
    args.layers = min(args.layers or REHEARSED_LAYERS, REHEARSED_LAYERS)
    world = joined(rank, args, folder)
    told = "built"
    try:
        driven, stages = build(case, args, world)
        driven.prefill(max(args.prompts // 4, args.gpus), args.length)
        if batches_of(args, case):
            driven.start(args.gpus, 8, WARM)
            driven.finish()
    except ConfigError as error:
        stages, told = {}, f"{error}"
    if rank == 0:
        print(f"  {'/'.join(case.values())}, rehearsed: {told} {rounded(stages)}, {time.time() - began:.1f} s in all",
              flush=True)
    os._exit(0)


def rounded(stages: dict[str, float]) -> dict[str, Any]:
    return {name: round(seconds, 1) for name, seconds in stages.items()}


def exchange_ceiling(world: TPGroup, rows: int = 8192, width: int = 2048) -> dict[str, float]:
    """Microseconds of NCCL's gather and scattered sum of so many rows of each rank in bfloat16, back to back."""
    if world.device.type != "cuda":
        return {}
    mine = torch.randn(rows, width, device=world.device).bfloat16()
    with world.without_symm_comm():
        every = world.all_gather_rows(mine)
        found = {}
        for name, work in (("all_gather_us", lambda: world.all_gather_rows(mine)),
                           ("reduce_scatter_us", lambda: world.reduce_scatter_rows(every))):
            for _ in range(3):
                work()
            torch.cuda.synchronize()
            world.barrier()
            began = time.perf_counter()
            for _ in range(20):
                work()
            torch.cuda.synchronize()
            found[name] = (time.perf_counter() - began) / 20 * 1e6
    found["gb_s_each_way"] = (world.size - 1) * mine.nbytes / found["all_gather_us"] / 1e3
    return found


def line(row: dict[str, Any], batches: list[int]) -> str:
    step = 1e3 * row["prefill_s"] / max(row["prefill_steps"], 1)
    shares = row.get("shares") or {"exchanges": 0.0, "waits": 0.0, "idle": 0.0}
    figures = [f"{row['in_tok_s']:,.0f}", f"{step:.1f}", f"{step * shares['exchanges']:.2f}",
               f"{100 * shares['exchanges']:.1f} %", f"{step * shares['waits']:.2f}", f"{step * shares['idle']:.2f}"]
    figures += [f"{row['decode_ms'][str(batch)]:.2f} ({1e3 * batch / row['decode_ms'][str(batch)]:,.0f})"
                for batch in batches if str(batch) in row["decode_ms"]]
    return "| " + " | ".join([row["model"], row["quantization"], row["setting"], *figures]) + " |"


def joined(rank: int, args: argparse.Namespace, folder: str) -> TPGroup:
    cuda = torch.cuda.device_count() >= args.gpus
    if not cuda:
        torch.set_num_threads(1)
    world = init_tp(rank, args.gpus, f"file://{folder}/meet", f"cuda:{rank}" if cuda else "cpu", timeout=120)
    connect_all(Parallel(world), rows=-(-max(batches_of(args), default=0) // args.gpus))
    return world


def rank_main(rank: int, cases: list[dict[str, str]], args: argparse.Namespace, folder: str, began: float,
              rehearsed: Event) -> None:
    rehearsed.wait()  # before the ranks try each other's memory, which takes turns with what others do there
    world = joined(rank, args, folder)
    cuda = world.device.type == "cuda"
    limits: dict[str, Any] = {}
    if cuda:
        if rank == 0:
            limits = ceilings.measure()
        world.barrier()
        limits |= exchange_ceiling(world)
    batches = batches_of(args)
    rows: list[dict[str, Any]] = []
    if rank == 0:
        print(f"{args.gpus} ranks on {world.device.type}, {args.layers or 'all'} layers; {limits}; "
              f"{time.time() - began:.1f} s to here", flush=True)
        heads = ["model", "weights", "setting", *COLUMNS, *(f"decode {batch}: ms (tok/s)" for batch in batches)]
        print("| " + " | ".join(heads) + " |\n" + "|---" * len(heads) + "|", flush=True)
    for case in cases:
        late = time.time() - began > args.seconds
        if world.gather_ints(np.array([late])).any():
            if rank == 0:
                print(f"no time left for {case}", flush=True)
            break
        try:
            rows.append(measure(case, args, world))
        except ConfigError as error:  # on all ranks alike: the flags do not fit the model
            if rank == 0:
                print(f"{case}: {error}", flush=True)
            continue
        gc.collect()
        if cuda:
            torch.cuda.empty_cache()
        if rank == 0:
            print(line(rows[-1], batches), flush=True)
            told = rounded(rows[-1]["started_s"])
            if graphs := rows[-1].get("prompts in graphs"):
                told |= {"prompts in graphs": (len(graphs["sizes"]), graphs["sizes"][-1])}
            print(f"  start {told}, measured in {rows[-1]['took_s']:.1f} s, {time.time() - began:.1f} s in all",
                  flush=True)
            figures = {"gpus": args.gpus, "layers": args.layers, "ceilings": limits, "rows": rows,
                       "command": args.command}
            if args.out:  # after each engine: a later one may run out of time
                args.out.write_text(json.dumps(figures, indent=1))
    world.barrier()
    os._exit(0)  # as servers' ranks end: destructors of libraries do not all work
