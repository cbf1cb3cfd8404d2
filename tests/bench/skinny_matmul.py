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
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch.nn.functional import linear

from ...kernels import _triton
from ...kernels.moe_tiles import device_name
from ...kernels.skinny_matmul import skinny_matmul
from ...kernels.skinny_tiles import SkinnyTile
from . import ceilings
from .moe_shapes import micros

SHAPES = {"8b qkv": (4096, 6144), "8b o": (4096, 4096), "8b gate_up": (4096, 28672), "8b down": (14336, 4096),
          "0.6b qkv": (1024, 4096), "0.6b o": (2048, 1024), "0.6b gate_up": (1024, 6144), "0.6b down": (3072, 1024),
          "8b head": (4096, 128256), "0.6b head": (1024, 151936), "tiny": (256, 1600)}
ALONE = ("8b o", "8b down", "tiny")
"""Shapes of which one launch is also timed that waits for the end of the one before."""
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # under Triton's interpreter, for a look at this script
WIDE = torch.bfloat16 if DEVICE == "cuda" else torch.float16
KINDS = ("bf16", "row", "block")
_CACHE_BYTES = 192 << 20 if DEVICE == "cuda" else 1 << 20  # several times an H200's 50 MiB


class Case:
    """Weights of one form, as many copies as exceed the caches."""

    def __init__(self, kind: str, width: int, out: int):
        self.kind, self.width, self.out = kind, width, out
        dtype = WIDE if kind == "bf16" else torch.float8_e4m3fn
        self.bytes = width * out * dtype.itemsize
        copies = max(2 if self.bytes < _CACHE_BYTES else 1, -(-_CACHE_BYTES // self.bytes))
        self.weights = [torch.randn(out, width, device=DEVICE, dtype=WIDE).to(dtype) for _ in range(copies)]
        self.block = (128, 128) if kind == "block" else None
        sizes = {"bf16": None, "row": (out,), "block": (-(-out // 128), -(-width // 128))}[kind]
        self.scale = None if sizes is None else torch.rand(sizes, device=DEVICE) + 0.5

    def inputs(self, rows: int) -> torch.Tensor:
        return torch.randn(rows, self.width, device=DEVICE, dtype=WIDE)

    def wanted(self, x: torch.Tensor) -> torch.Tensor:
        w = self.weights[0].to(WIDE)
        if self.kind == "block":
            wide = self.scale.repeat_interleave(128, 0)[:self.out].repeat_interleave(128, 1)[:, :self.width]
            return x.float() @ (w.float() * wide).T
        y = linear(x, w).float()
        return y if self.scale is None else y * self.scale

    def floor(self, rows: int, copy: float) -> float:
        return (self.bytes + 2 * rows * (self.width + self.out)) / copy / 1e6

    def run(self, x: torch.Tensor, w: torch.Tensor, tile: SkinnyTile) -> torch.Tensor:
        return skinny_matmul(x, w, scale=self.scale, block=self.block, tile=tile)

    def micros(self, work: Callable[[torch.Tensor], object]) -> float:
        return micros(lambda: [work(w) for w in self.weights]) / len(self.weights)


def bases(kind: str, tall: int) -> Iterator[SkinnyTile]:
    """Forms of a program, of one piece."""
    first = "weights first"
    if kind == "bf16":
        forms = [(64, 64, 4, 6), (64, 64, 4, 8), (64, 128, 4, 4), (64, 128, 4, 5), (64, 256, 4, 3),
                 (128, 64, 4, 4), (128, 64, 8, 5), (128, 128, 8, 3)]
        if tall <= 32:
            forms += [(32, 128, 2, 4), (32, 128, 4, 4), (32, 256, 4, 4), (16, 256, 1, 3), (16, 256, 2, 4),
                      (16, 128, 1, 6), (32, 256, 2, 3)]
    else:
        forms = [(32, 128, 2, 5), (64, 128, 4, 5), (32, 128, 4, 5), (128, 128, 8, 4)]
        if kind == "row":
            forms += [(32, 256, 2, 4), (64, 256, 4, 3)]
        if tall <= 32:
            forms += [(16, 128, 1, 6), (64, 128, 2, 4), (32, 128, 1, 4)]
        if tall <= 32 and kind == "row":
            forms += [(16, 256, 1, 4), (16, 512, 1, 3), (32, 256, 4, 4)]
    for columns, depth, warps, stages in forms:
        yield SkinnyTile(columns, depth, 1, warps, stages, 0, first)
    if tall == 1 and kind != "block":
        for columns, depth, warps, stages in [(8, 1024, 4, 3), (16, 512, 4, 4), (4, 2048, 4, 3)]:
            yield SkinnyTile(columns, depth, 1, warps, stages, 0, "sums")


_FEWEST = 100 if DEVICE == "cuda" else 10  # programs
AHEAD = {"bf16": (512, 1024, 2048), "row": (512, 2048), "block": (512, 2048)}

UNFETCHED = [(64, 128, 4), (32, 128, 2)]
"""Tiles by columns, depth and warps that are also tried without a fetch ahead."""


def candidates(kind: str, rows: int, width: int, out: int) -> Iterator[SkinnyTile]:
    for base in bases(kind, rows):
        for pieces in (1, 2, 4, 8):
            programs = -(-out // base.columns) * pieces
            if pieces > 1 and (base.form == "sums" or programs > 1056):
                continue
            if programs < _FEWEST or width // base.depth < 2 * pieces:
                continue
            ahead = max((a for a in AHEAD[kind] if a <= width // pieces), default=512)
            for fetched in (ahead, 0) if (base.columns, base.depth, base.warps) in UNFETCHED else (ahead,):
                yield SkinnyTile(base.columns, base.depth, pieces, base.warps, base.stages, fetched, base.form)


@dataclass(frozen=True)
class Variant:
    """What is compiled once."""

    kind: str
    rows: int
    tile: SkinnyTile


def variants(kinds: list[str], rows: list[int], shapes: list[tuple[int, int]]) -> list[Variant]:
    found = {}
    for kind, count, (width, out) in itertools.product(kinds, rows, shapes):
        for tile in candidates(kind, count, width, out):
            joined = min(tile.pieces, 2)
            same = SkinnyTile(**{**asdict(tile), "pieces": joined})
            tall = 1 if tile.form == "sums" else 16 if count <= 16 else count
            found[Variant(kind, tall, same)] = None
    return list(found)


def build(todo: list[Variant]) -> list[str]:
    """Compiles; returns what did not."""
    errors = []
    for variant in todo:
        try:
            dtype = WIDE if variant.kind == "bf16" else torch.float8_e4m3fn
            w = torch.zeros(256, 4096, device=DEVICE, dtype=WIDE).to(dtype)
            scale = {"bf16": None, "row": torch.zeros(256, device=DEVICE),
                     "block": torch.zeros(2, 32, device=DEVICE)}[variant.kind]
            x = torch.zeros(variant.rows, 4096, device=DEVICE, dtype=WIDE)
            skinny_matmul(x, w, scale=scale, block=(128, 128) if variant.kind == "block" else None, tile=variant.tile)
        except Exception as error:  # what a compiler or a device refuses is what is asked for
            errors.append(f"{variant}: {type(error).__name__} {str(error)[:200]}")
    return errors


def compile_beside(todo: list[Variant]) -> list[str]:
    workers = max(1, min(len(todo), (os.cpu_count() or 1)))
    with multiprocessing.get_context("spawn").Pool(workers) as pool:
        return [error for errors in pool.imap_unordered(build, [todo[i::workers] for i in range(workers)])
                for error in errors]


def sweep(case: Case, rows: int, reference: torch.Tensor, x: torch.Tensor, told: bool) -> dict[str, object]:
    found = []
    for tile in candidates(case.kind, rows, case.width, case.out):
        try:
            got = case.run(x, case.weights[0], tile).float()
            error = float((got - reference).square().mean().sqrt() / reference.square().mean().sqrt())
            took = case.micros(lambda w, tile=tile: case.run(x, w, tile))
            found.append({**asdict(tile), "micros": round(took, 2), "error": round(error, 5)})
        except Exception as error:  # one that does not fit is no reason to lose the others
            found.append({**asdict(tile), "micros": 1e9, "failure": f"{type(error).__name__} {str(error)[:120]}"})
    found.sort(key=lambda row: row["micros"])
    best = SkinnyTile(**{name: found[0][name] for name in SkinnyTile.__dataclass_fields__})
    return {"tiles": found, "best": found[0]["micros"], "alone": alone(case, x, best) if told else None}


def alone(case: Case, x: torch.Tensor, tile: SkinnyTile) -> float:
    """Microseconds where each launch waits for the end of the one before."""
    _triton.PDL_ALLOWED = False
    try:
        return round(case.micros(lambda w: case.run(x, w, tile)), 2)
    finally:
        _triton.PDL_ALLOWED = True


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default="1,16,64")
    parser.add_argument("--shapes", default=",".join(name for name in SHAPES if name != "tiny"))
    parser.add_argument("--kinds", default="bf16,row,block")
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    begin = time.monotonic()
    rows = [int(count) for count in args.rows.split(",")]
    kinds = args.kinds.split(",")
    shapes = {name: SHAPES[name] for name in args.shapes.split(",")}
    todo = variants(kinds, rows, list(shapes.values()))
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
        for count in rows:
            if time.monotonic() - begin > args.seconds:
                break
            x = case.inputs(count)
            row = {"kind": kind, "layer": name, "rows": count, "floor": round(case.floor(count, copy), 2),
                   "cublas": round(case.micros(lambda w, x=x: linear(x, w)), 2) if kind == "bf16" else None,
                   **sweep(case, count, case.wanted(x), x, count == 1 and name in ALONE)}
            measured.append(row)
            if args.output:
                args.output.write_text(json.dumps({"device": device_name(torch.device(DEVICE)), "copy_tb_s": copy,
                                                   "measured": measured}) + "\n")
        del case
        torch.cuda.empty_cache()
    print(f"{device_name(torch.device(DEVICE))}: copy {copy:.2f} TB/s; microseconds; {time.monotonic() - begin:.0f} s")
    for row in measured:
        best = row["tiles"][0]
        told = " ".join(str(best[key]) for key in ("columns", "depth", "pieces", "warps", "stages", "ahead", "form"))
        print(f"{row['kind']:5} {row['layer']:12} M {row['rows']:2}: floor {row['floor']:6} cublas {row['cublas']} "
              f"best {row['best']} alone {row['alone']} error {best.get('error')} [{told}]")


if __name__ == "__main__":
    main()
