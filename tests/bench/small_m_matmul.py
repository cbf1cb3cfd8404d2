"""Time of products of few rows: our kernel by its tiles, beside cuBLAS and what the machine can do at most.

    python -m baton.tests.bench.small_m_matmul [--sweep] [--rows 1,4,8] [--kinds bf16,row] [--shapes "8b o,8b down"]
        [--seconds 600] [--output figures.json]

``floor``: weights, input and output at the rate of a copy, measured in the same run. Products run as CUDA graphs, each
behind a norm as in a model, over copies of the weight that together exceed the caches; the norm's microsecond is in all
figures but the floor. ``row``: float8 with a scale a row. ``others``: cuBLAS's product, or for float8 that of more
rows. ``--sweep`` tries many tiles beside the chosen one, which processes beside each other compile before, and names
the fastest.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.nn.functional import linear

from ...kernels import _triton, reference
from ...kernels.arguments import Float8Format
from ...kernels.device import device_name
from ...kernels.float8.fp8_matmul import fp8_matmul
from ...kernels.gemm.small_m_matmul import small_m_matmul
from ...kernels.rowwise.fp8_quantize import quantize
from ...kernels.rowwise.rmsnorm import rmsnorm
from ...kernels.tuning.gemm import SmallMTile
from ...kernels.tuning.policy import policy_of
from . import ceilings
from .moe_shapes import micros

SHAPES = {"8b o": (4096, 4096), "8b down": (14336, 4096), "8b qkv": (4096, 6144), "8b gate_up": (4096, 28672),
          "0.6b qkv": (1024, 4096), "0.6b o": (2048, 1024), "0.6b gate_up": (1024, 6144), "0.6b down": (3072, 1024),
          "8b head": (4096, 128256), "0.6b head": (1024, 151936), "tiny": (256, 1600)}
ALONE = ("8b o", "tiny")
"""Shapes of which one launch is also timed that waits for the end of the one before."""
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # under Triton's interpreter, for a look at this script
WIDE = torch.bfloat16 if DEVICE == "cuda" else torch.float16
_CACHE_BYTES = 144 << 20 if DEVICE == "cuda" else 1 << 20  # several times an H200's 50 MiB


def dtype_of(kind: str) -> torch.dtype:
    return WIDE if kind == "bf16" else torch.float8_e4m3fn


class Inputs(NamedTuple):
    values: torch.Tensor
    scale: torch.Tensor | None


class Case:
    """Weights of one form, as many copies as exceed the caches."""

    def __init__(self, kind: str, width: int, out: int, copies: int | None = None):
        self.kind, self.width, self.out = kind, width, out
        dtype = dtype_of(kind)
        self.bytes = width * out * dtype.itemsize
        copies = copies or max(2 if self.bytes < _CACHE_BYTES else 1, -(-_CACHE_BYTES // self.bytes))
        self.weights = [torch.randn(out, width, device=DEVICE, dtype=WIDE).to(dtype) for _ in range(copies)]
        self.scale = None if kind == "bf16" else torch.rand(out, device=DEVICE) + 0.5

    def inputs(self, rows: int) -> Inputs:
        x = torch.randn(rows, self.width, device=DEVICE, dtype=WIDE)
        if self.kind == "bf16":
            return Inputs(x, None)
        given = quantize(x, Float8Format(self.width))
        return Inputs(given.values, given.scale)

    def wanted(self, x: Inputs) -> torch.Tensor:
        made = reference.small_m_matmul(x.values, self.weights[0], x_scale=x.scale, scale=self.scale, dtype=WIDE)
        return made.float()

    def floor(self, rows: int, copy: float) -> float:
        return (self.bytes + 2 * rows * (self.width + self.out)) / copy / 1e6

    def run(self, x: Inputs, w: torch.Tensor, tile: SmallMTile) -> torch.Tensor:
        return small_m_matmul(x.values, w, x_scale=x.scale, scale=self.scale, dtype=WIDE, tile=tile)

    def others(self, x: Inputs, w: torch.Tensor) -> torch.Tensor:
        if x.scale is None or self.scale is None:
            return linear(x.values, w)
        if DEVICE == "cpu":
            return reference.scaled_matmul(x.values, x.scale, w, self.scale, WIDE)
        return fp8_matmul(x.values, x.scale, w, self.scale, "row", WIDE)

    def micros(self, rows: int, work: Callable[[torch.Tensor], object]) -> float:
        """Of the product and of a norm before it."""
        x, weight = (torch.ones(count, 1024, device=DEVICE, dtype=WIDE) for count in (rows, 1))
        return micros(lambda: [(rmsnorm(x, weight[0], 1e-5), work(w)) for w in self.weights], 3) / len(self.weights)


FORMS = {
    "bf16": [(64, 128, 4, 4), (64, 128, 4, 5), (64, 64, 4, 6), (32, 128, 2, 4), (32, 128, 2, 6), (16, 256, 2, 4)],
    "row": [(64, 256, 4, 4), (64, 128, 4, 6), (32, 256, 2, 4), (16, 512, 2, 4)],
}
"""Columns, depth, warps, stages."""
FORMS_OF_ONE = [(8, 1024, 4, 3), (4, 2048, 4, 3), (16, 512, 4, 4), (8, 1024, 4, 4)]
"""Where tensor cores have nothing to do."""
ROWS = {"bf16": [1, 4, 16, 32], "row": [1, 4, 16]}
AHEAD = (0, 16 << 10)
_FEWEST = 100 if DEVICE == "cuda" else 10  # programs


def candidates(kind: str, rows: int, width: int, out: int) -> Iterator[SmallMTile]:
    """Beside the chosen one."""
    alone = rows == 1 and kind == "bf16"
    chosen = policy_of(torch.device(DEVICE)).gemm.small_m(rows, out, width, dtype_of(kind))
    for columns, depth, warps, stages in FORMS_OF_ONE if alone else FORMS[kind]:
        for pieces, ahead in itertools.product((1,) if alone else (1, 2, 4, 8), AHEAD):
            tile = SmallMTile(columns, depth, pieces, warps, stages, ahead)
            programs = -(-out // columns) * pieces
            if tile != chosen and programs >= _FEWEST and (pieces == 1 or (
                    programs <= 600 and width // depth >= 2 * pieces)):
                yield tile


@dataclass(frozen=True)
class Job:
    """A product to be timed, and by which tiles; the chosen one is the first."""

    kind: str
    layer: str
    rows: int
    tiles: list[SmallMTile]


def jobs(kinds: list[str], layers: list[str], rows: list[int] | None, sweep: bool) -> list[Job]:
    found = []
    for layer, kind in itertools.product(layers, kinds):
        width, out = SHAPES[layer]
        for count in rows or ROWS[kind]:
            others = candidates(kind, count, width, out) if sweep else ()
            chosen = policy_of(torch.device(DEVICE)).gemm.small_m(count, out, width, dtype_of(kind))
            found.append(Job(kind, layer, count, [chosen, *others]))
    return found


@dataclass(frozen=True)
class Variant:
    """What is compiled once."""

    kind: str
    rows: int
    tile: SmallMTile


def variants(todo: list[Job]) -> list[Variant]:
    """Kernels know whether there are pieces, not how many; and rows rounded up, but one."""
    tall = {job.rows: 1 if job.rows == 1 else 32 if job.rows > 16 else 16 for job in todo}
    return list(dict.fromkeys(Variant(job.kind, tall[job.rows], replace(tile, pieces=min(tile.pieces, 2)))
                              for job in todo for tile in job.tiles))


def build(todo: list[Variant]) -> list[str]:
    """Compiles; returns what did not."""
    errors = []
    for variant in todo:
        try:
            case = Case(variant.kind, 4096, 256, copies=1)
            case.run(case.inputs(variant.rows), case.weights[0], variant.tile)
        except Exception as error:  # what a compiler or a device refuses is what is asked for
            errors.append(f"{variant}: {type(error).__name__} {str(error)[:200]}")
    return errors


def compile_beside(todo: list[Variant]) -> list[str]:
    workers = max(1, min(len(todo), (os.cpu_count() or 1)))
    with multiprocessing.get_context("spawn").Pool(workers) as pool:
        return [error for errors in pool.imap_unordered(build, [todo[i::workers] for i in range(workers)])
                for error in errors]


def measure(case: Case, job: Job, copy: float) -> dict[str, Any]:
    x = case.inputs(job.rows)
    want, tiles = case.wanted(x), []
    for tile in job.tiles:
        try:
            got = case.run(x, case.weights[0], tile).float()
            error = float((got - want).square().mean().sqrt() / want.square().mean().sqrt())
            took = case.micros(job.rows, lambda w, tile=tile: case.run(x, w, tile))
            tiles.append({**asdict(tile), "micros": round(took, 2), "error": round(error, 5)})
        except Exception as error:  # one that does not fit is no reason to lose the others
            print(f"{job.kind} {job.layer} {tile}: {type(error).__name__} {str(error)[:120]}", flush=True)
    told = job.rows == 1 and job.layer in ALONE
    return {"kind": job.kind, "layer": job.layer, "rows": job.rows, "floor": round(case.floor(job.rows, copy), 2),
            "others": round(case.micros(job.rows, partial(case.others, x)), 2), "chosen": tiles[0],
            "alone": alone(case, job, x) if told else None, "fastest": sorted(tiles, key=lambda tile: tile["micros"])}


def alone(case: Case, job: Job, x: Inputs) -> float:
    """Microseconds of the chosen tile where each launch waits for the end of the one before."""
    _triton.PDL_ALLOWED = False
    try:
        return round(case.micros(job.rows, lambda w: case.run(x, w, job.tiles[0])), 2)
    finally:
        _triton.PDL_ALLOWED = True


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", help="as 1,16; without it, what the kernel is used for")
    parser.add_argument("--shapes", default=",".join(name for name in SHAPES if name != "tiny"))
    parser.add_argument("--kinds", default="bf16,row")
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--seconds", type=float, default=600.0, help="begin no further product after so many")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    begin = time.monotonic()
    rows = [int(count) for count in args.rows.split(",")] if args.rows else None
    todo = jobs(args.kinds.split(","), args.shapes.split(","), rows, args.sweep)
    kernels = variants(todo)
    for error in compile_beside(kernels):
        print("not compiled:", error, flush=True)
    print(f"{len(kernels)} kernels compiled in {time.monotonic() - begin:.1f} s", flush=True)
    copy = ceilings.copy_tb_s() if DEVICE == "cuda" else 1.0
    torch.cuda.empty_cache()
    device, measured = device_name(torch.device(DEVICE)), []
    for (kind, layer), same in itertools.groupby(todo, key=lambda job: (job.kind, job.layer)):
        if time.monotonic() - begin > args.seconds:
            break
        case = Case(kind, *SHAPES[layer])
        measured += [measure(case, job, copy) for job in same]
        if args.output:
            args.output.write_text(json.dumps({"device": device, "copy_tb_s": copy, "measured": measured}) + "\n")
    print(f"{device}: copy {copy:.2f} TB/s; microseconds; {time.monotonic() - begin:.0f} s")
    for row in measured:
        best = row["fastest"][0]
        told = " ".join(str(best[key]) for key in ("columns", "depth", "pieces", "warps", "stages", "ahead"))
        print(f"{row['kind']:4} {row['layer']:12} M {row['rows']:2}: floor {row['floor']:6} others {row['others']:6} "
              f"chosen {row['chosen']['micros']:6} (alone {row['alone']}) fastest {best['micros']:6} [{told}]")


if __name__ == "__main__":
    main()
