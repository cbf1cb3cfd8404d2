"""Time of products of few rows: our kernel by its tiles, beside cuBLAS and what the machine can do at most.

    python -m baton.tests.bench.skinny_matmul [--sweep] [--rows 1,4,...] [--kinds bf16,row,block] [--seconds 600]
        [--output figures.json]

``floor``: weights, input and output at the rate of a copy, measured in the same run. Products run as CUDA graphs, back
to back over copies of the weight that together exceed the caches. ``--sweep`` tries many tiles, which processes beside
each other compile before, and names the fastest; without it, the tiles are those that the kernel chooses.
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
from typing import NamedTuple

import torch
from torch.nn.functional import linear

from ...kernels import _triton, reference
from ...kernels.forms import Float8Form
from ...kernels.fp8_quantize import quantize
from ...kernels.moe_tiles import device_name
from ...kernels.rmsnorm import rmsnorm
from ...kernels.skinny_matmul import skinny_matmul
from ...kernels.skinny_tiles import SkinnyTile
from . import ceilings
from .moe_shapes import micros

SHAPES = {"8b o": (4096, 4096), "8b down": (14336, 4096), "8b qkv": (4096, 6144), "8b gate_up": (4096, 28672),
          "0.6b qkv": (1024, 4096), "0.6b o": (2048, 1024), "0.6b gate_up": (1024, 6144), "0.6b down": (3072, 1024),
          "8b head": (4096, 128256), "0.6b head": (1024, 151936), "tiny": (256, 1600)}
ALONE = ("8b o", "tiny")
"""Shapes of which one launch is also timed that waits for the end of the one before."""
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # under Triton's interpreter, for a look at this script
WIDE = torch.bfloat16 if DEVICE == "cuda" else torch.float16
KINDS = ("bf16", "row", "block")
_CACHE_BYTES = 144 << 20 if DEVICE == "cuda" else 1 << 20  # several times an H200's 50 MiB


class Inputs(NamedTuple):
    values: torch.Tensor
    scale: torch.Tensor | None


class Case:
    """Weights of one form, as many copies as exceed the caches."""

    def __init__(self, kind: str, width: int, out: int, copies: int | None = None):
        self.kind, self.width, self.out = kind, width, out
        dtype = WIDE if kind == "bf16" else torch.float8_e4m3fn
        self.bytes = width * out * dtype.itemsize
        copies = copies or max(2 if self.bytes < _CACHE_BYTES else 1, -(-_CACHE_BYTES // self.bytes))
        self.weights = [torch.randn(out, width, device=DEVICE, dtype=WIDE).to(dtype) for _ in range(copies)]
        self.block = (128, 128) if kind == "block" else None
        sizes = {"bf16": None, "row": (out,), "block": (-(-out // 128), -(-width // 128))}[kind]
        self.scale = None if sizes is None else torch.rand(sizes, device=DEVICE) + 0.5

    def inputs(self, rows: int) -> Inputs:
        x = torch.randn(rows, self.width, device=DEVICE, dtype=WIDE)
        if self.kind == "bf16":
            return Inputs(x, None)
        given = quantize(x, Float8Form(128 if self.kind == "block" else self.width))
        return Inputs(given.values, given.scale)

    def wanted(self, x: Inputs) -> torch.Tensor:
        return reference.skinny_matmul(x.values, self.weights[0], x_scale=x.scale, scale=self.scale, block=self.block,
                                       rounded=WIDE).float()

    def floor(self, rows: int, copy: float) -> float:
        return (self.bytes + 2 * rows * (self.width + self.out)) / copy / 1e6

    def run(self, x: Inputs, w: torch.Tensor, tile: SkinnyTile) -> torch.Tensor:
        return skinny_matmul(x.values, w, x_scale=x.scale, scale=self.scale, block=self.block, rounded=WIDE, tile=tile)

    def micros(self, rows: int, work: Callable[[torch.Tensor], object]) -> float:
        """Of the product and of a norm before it."""
        x, weight = (torch.ones(count, 1024, device=DEVICE, dtype=WIDE) for count in (rows, 1))
        return micros(lambda: [(rmsnorm(x, weight[0], 1e-5), work(w)) for w in self.weights], 3) / len(self.weights)


W, R, S = "weights first", "rows first", "sums"
FORMS = {
    "bf16": [(W, 64, 128, 4, 4), (W, 64, 128, 4, 5), (W, 64, 64, 4, 6), (W, 32, 128, 2, 4), (W, 32, 128, 2, 6),
             (W, 16, 256, 2, 4), (W, 32, 256, 4, 4)],
    "row": [(W, 64, 256, 4, 4), (W, 64, 128, 4, 6), (W, 32, 256, 2, 4), (W, 16, 512, 2, 4)],
    "block": [(W, 64, 128, 4, 4), (W, 64, 128, 4, 6), (W, 32, 128, 2, 5), (W, 32, 128, 1, 4)],
}
"""Of up to 16 rows: form, columns, depth, warps, stages."""
FORMS_OF_MORE = {
    "bf16": [(W, 64, 128, 4, 4), (W, 64, 128, 4, 5), (W, 128, 64, 8, 5), (W, 128, 128, 8, 3)],
    "row": [(W, 64, 128, 4, 5), (W, 64, 256, 4, 3), (R, 32, 256, 4, 4)],
    "block": [(W, 64, 128, 4, 5), (R, 32, 128, 4, 6)],
}
SUMS = [(S, 8, 1024, 4, 3), (S, 4, 2048, 4, 3)]
ROWS = {"bf16": [1, 16, 32, 64], "row": [1, 16], "block": [1, 16]}
AHEAD = (0, 16 << 10, 64 << 10)
"""Bytes that a program fetches before its rows are there."""
_FEWEST = 100 if DEVICE == "cuda" else 10  # programs


def candidates(kind: str, rows: int, width: int, out: int) -> Iterator[SkinnyTile]:
    forms = FORMS[kind] if rows <= 16 else FORMS_OF_MORE[kind]
    size = 2 if kind == "bf16" else 1
    for form, columns, depth, warps, stages in forms + (SUMS if rows == 1 and kind == "bf16" else []):
        for pieces, fetched in itertools.product((1, 2, 4), AHEAD if kind != "block" and rows <= 16 else AHEAD[:2]):
            programs, ahead = -(-out // columns) * pieces, fetched // columns // size
            if (pieces == 1 or (form != S and programs <= 600)) and (
                    programs >= _FEWEST and width // depth >= 2 * pieces and ahead <= width // pieces):
                yield SkinnyTile(columns, depth, pieces, warps, stages, ahead, form)


@dataclass(frozen=True)
class Variant:
    """What is compiled once."""

    kind: str
    rows: int
    tile: SkinnyTile


def variants(rows: dict[str, list[int]], shapes: list[tuple[int, int]]) -> list[Variant]:
    found = {}
    for kind, counts in rows.items():
        for count, (width, out) in itertools.product(counts, shapes):
            for tile in candidates(kind, count, width, out):
                tall = 1 if tile.form == S else 16 if count <= 16 else count
                found[Variant(kind, tall, replace(tile, pieces=min(tile.pieces, 2)))] = None
    return list(found)


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


def sweep(case: Case, rows: int, want: torch.Tensor, x: Inputs, told: bool) -> dict[str, object]:
    found = []
    for tile in candidates(case.kind, rows, case.width, case.out):
        try:
            got = case.run(x, case.weights[0], tile).float()
            error = float((got - want).square().mean().sqrt() / want.square().mean().sqrt())
            took = case.micros(rows, lambda w, tile=tile: case.run(x, w, tile))
            found.append({**asdict(tile), "micros": round(took, 2), "error": round(error, 5)})
        except Exception as error:  # one that does not fit is no reason to lose the others
            found.append({**asdict(tile), "micros": 1e9, "failure": f"{type(error).__name__} {str(error)[:120]}"})
    found.sort(key=lambda row: row["micros"])
    best = SkinnyTile(**{name: found[0][name] for name in SkinnyTile.__dataclass_fields__})
    return {"tiles": found, "best": found[0]["micros"], "alone": alone(case, rows, x, best) if told else None}


def alone(case: Case, rows: int, x: Inputs, tile: SkinnyTile) -> float:
    """Microseconds where each launch waits for the end of the one before."""
    _triton.PDL_ALLOWED = False
    try:
        return round(case.micros(rows, lambda w: case.run(x, w, tile)), 2)
    finally:
        _triton.PDL_ALLOWED = True


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", help="as 1,16; without it, those where a choice has to be made")
    parser.add_argument("--shapes", default=",".join(name for name in SHAPES if name != "tiny"))
    parser.add_argument("--kinds", default="bf16,row,block")
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    begin = time.monotonic()
    kinds = args.kinds.split(",")
    rows = {kind: [int(count) for count in args.rows.split(",")] if args.rows else ROWS[kind] for kind in kinds}
    shapes = {name: SHAPES[name] for name in args.shapes.split(",")}
    todo = variants(rows, list(shapes.values()))
    for error in compile_beside(todo):
        print("not compiled:", error, flush=True)
    print(f"{len(todo)} kernels compiled in {time.monotonic() - begin:.1f} s", flush=True)
    copy = ceilings.copy_tb_s() if DEVICE == "cuda" else 1.0
    torch.cuda.empty_cache()
    measured: list[dict[str, object]] = []
    for (name, (width, out)), kind in itertools.product(shapes.items(), kinds):
        if kind != "bf16" and name.startswith("0.6b"):
            continue
        case = Case(kind, width, out)
        for count in rows[kind]:
            if time.monotonic() - begin > args.seconds:
                break
            x = case.inputs(count)
            cublas = case.micros(count, partial(linear, x.values)) if kind == "bf16" else 0.0
            row = {"kind": kind, "layer": name, "rows": count, "floor": round(case.floor(count, copy), 2),
                   "cublas": round(cublas, 2),
                   **sweep(case, count, case.wanted(x), x, count == 1 and name in ALONE)}
            measured.append(row)
            if args.output:
                args.output.write_text(json.dumps({"device": device_name(torch.device(DEVICE)), "copy_tb_s": copy,
                                                   "measured": measured}) + "\n")
        torch.cuda.empty_cache()
    print(f"{device_name(torch.device(DEVICE))}: copy {copy:.2f} TB/s; microseconds; {time.monotonic() - begin:.0f} s")
    for row in measured:
        best = row["tiles"][0]
        told = " ".join(str(best[key]) for key in ("columns", "depth", "pieces", "warps", "stages", "ahead", "form"))
        print(f"{row['kind']:5} {row['layer']:12} M {row['rows']:2}: floor {row['floor']:6} cublas {row['cublas']} "
              f"best {row['best']} alone {row['alone']} error {best.get('error')} [{told}]")


if __name__ == "__main__":
    main()
