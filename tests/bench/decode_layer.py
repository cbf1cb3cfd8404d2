"""A whole layer of a decode step, in a graph of many: which tiles make it fastest, product by product.

    python -m baton.tests.bench.decode_layer [--batches 1,8,64,128,256] [--context 2048] [--seconds 40] [--out FILE]

A product by itself says little of its place in a chain: kernels begin while the ones ahead of them end, and what they
fetch meanwhile is free. So one part of the layer is changed at a time, the fastest is kept, and all are told; the
``floor`` is the time of the layer's weights and keys at the copy ceiling of the same run. The kernels are compiled
before, by processes beside each other.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import product as pairs
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.nn.functional import linear

from ...kernels.attention.current_kv import CurrentKV
from ...kernels.attention.decode_plan import plan_decode
from ...kernels.attention.paged_decode import paged_decode
from ...kernels.device import num_sms
from ...kernels.gemm.dense_matmul import split_product
from ...kernels.gemm.small_m_matmul import small_m_matmul
from ...kernels.gemm.split_k_warp_specialized import split_k_matmul, split_k_partials
from ...kernels.rowwise.silu_and_mul import silu_and_mul
from ...kernels.tuning.attention import DecodeTile
from ...kernels.tuning.gemm import PersistentTile, SmallMTile, SplitKTile
from ...kernels.tuning.policy import policy_of
from . import ceilings
from .device_time import captured, run_seconds
from .small_kernels import LAYERS, SHAPES, Batch

CALLS = 32
POLICY = policy_of(torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu"))
KIB = 1024
Ways = dict[str, Any]
"""Of a part of the layer how it is computed: a product's tile, Splits, or None for what torch takes of cuBLAS's;
``gated``: whether the activation is part of the product; ``attention``: its tile, and what its plan is told;
``stores_current_kv``: see Batch."""


class Left(NamedTuple):
    """The product's sums are left in pieces, for the norm."""

    tile: SplitKTile
    dtype: torch.dtype


class Splits(NamedTuple):
    """cuBLAS's batched product of so many parts of the inner dimension, for the norm."""

    splits: int


def tiles(columns: int, depth: int, warps: int, stages: int, pieces: tuple[int, ...],
          ahead: tuple[int, ...]) -> Iterator[SmallMTile]:
    for count in pieces:
        for kib in ahead:
            yield SmallMTile(columns, depth, count, warps, stages, kib * KIB)


def few_rows() -> dict[str, list[SmallMTile]]:
    """Of a program's stages all but two or three are on their way from memory: deep ones, or two programs beside each
    other, keep as much under way as memory's latency asks for."""
    usual = (0, 16)
    return {
        "qkv": [*tiles(64, 128, 4, 4, (2, 4), (16,)), *tiles(64, 128, 4, 3, (4,), (16,)),
                *tiles(64, 128, 4, 5, (1, 2), (16,)), *tiles(64, 128, 4, 10, (1,), usual),
                *tiles(64, 64, 4, 5, (4,), (0,)), *tiles(64, 64, 4, 10, (2,), usual),
                *tiles(64, 64, 4, 7, (4,), (0,)), *tiles(32, 128, 2, 8, (1,), usual),
                *tiles(32, 128, 4, 8, (1,), (16,)), *tiles(128, 64, 8, 10, (2,), (16,))],
        "o": [*tiles(64, 128, 4, 4, (4,), (16,)), *tiles(64, 128, 4, 10, (1, 2), usual),
              *tiles(64, 128, 4, 5, (4,), usual), *tiles(64, 64, 4, 10, (4,), usual),
              *tiles(64, 64, 4, 5, (8,), (0,)), *tiles(32, 128, 2, 8, (1, 2), usual),
              *tiles(32, 128, 4, 16, (1,), usual), *tiles(32, 256, 4, 8, (1,), usual)],
        "gate_up": [*tiles(64, 128, 4, 4, (1,), (0, 16)), *tiles(64, 128, 4, 5, (1,), usual),
                    *tiles(64, 64, 4, 5, (1,), usual), *tiles(64, 64, 4, 6, (1,), (0,)),
                    *tiles(64, 64, 4, 7, (1,), usual), *tiles(64, 64, 4, 10, (1,), usual),
                    *tiles(128, 64, 8, 5, (1,), usual), *tiles(128, 64, 8, 6, (1,), usual),
                    *tiles(128, 128, 8, 6, (1,), (0,)), *tiles(32, 128, 2, 6, (1,), (0,)),
                    *tiles(64, 128, 4, 10, (1,), (0,))],
        "down": [*tiles(64, 128, 4, 4, (4,), (0, 16)), *tiles(64, 128, 4, 5, (4,), usual),
                 *tiles(64, 128, 4, 10, (2,), usual), *tiles(64, 64, 4, 10, (4,), usual),
                 *tiles(64, 64, 4, 5, (8,), (0,)), *tiles(32, 128, 4, 16, (1,), usual),
                 *tiles(32, 256, 4, 8, (1,), usual), *tiles(128, 64, 8, 10, (4,), (16,)),
                 *tiles(128, 64, 8, 5, (8,), (16,))],
    }


def streamed(rows: int) -> list[PersistentTile]:
    """Rings of weights that as much shared memory holds as there is, or half of it for two programs."""
    tall, found = max(8, 1 << (rows - 1).bit_length()), []
    for block, split, depth in ((64, 1, 64), (64, 2, 64), (64, 4, 64), (64, 2, 128), (128, 1, 64), (128, 2, 64)):
        step, small = (block + tall * split) * depth * 2, block * tall * split <= 4096
        if tall * split <= 128:
            found += [PersistentTile(block, split, depth, (216 if small else 192) * KIB // step, 1),
                      PersistentTile(block, split, depth, 104 * KIB // step, 2)]
    return found


def one_row() -> dict[str, list[SmallMTile]]:
    narrow = [*tiles(8, 1024, 4, 3, (1,), (0, 16)), *tiles(8, 1024, 4, 4, (1,), (0,)),
              *tiles(4, 2048, 4, 3, (1,), (0, 16)), *tiles(4, 2048, 4, 4, (1,), (0,)),
              *tiles(8, 2048, 8, 3, (1,), (0,)), *tiles(16, 1024, 8, 3, (1,), (0,))]
    return {name: narrow + found for name, found in few_rows().items()}


def many_rows() -> dict[str, list[SmallMTile]]:
    found = {}
    for name, few, more in (("qkv", (1, 2), (2, 4)), ("o", (2,), (4, 8)), ("gate_up", (1,), (1,)),
                            ("down", (2,), (4, 8))):
        found[name] = [*tiles(64, 64, 4, 6, more[:1], (0, 16)), *tiles(64, 64, 4, 5, more[:1], (0,)),
                       *tiles(64, 128, 4, 3, more[:1], (0, 16)), *tiles(64, 64, 4, 13, few, (0,)),
                       *tiles(64, 128, 4, 6, few, (0,)), *tiles(128, 64, 8, 9, more[:1], (0, 16)),
                       *tiles(128, 64, 8, 4, more, (0,)), *tiles(128, 128, 8, 4, more[:1], (0,)),
                       *tiles(256, 64, 8, 5, more[-1:], (0,))]
    return found


def split(rows: int) -> dict[str, list[Any]]:
    """Of more than 64 rows; the sums of ``o`` and ``down`` are left to the norm."""
    if rows > 128:
        return {"gate_up": [], "qkv": [], "o": [Splits(2)], "down": [Splits(2), Splits(4)]}
    narrow = SplitKTile(128, 64, 64, 6)
    left = [Left(replace(narrow, splits=4), dtype) for dtype in (torch.float32, torch.bfloat16)]
    return {"gate_up": [narrow, SplitKTile(128, 128, 64, 4)], "qkv": [], "o": left, "down": left}


def attention_splits(kv_heads: int) -> dict[str, int]:
    return POLICY.attention.decode_splits(128, 2, 2, kv_heads)._asdict()


def candidates(rows: int) -> dict[str, list[Any]]:
    if rows > 64:
        found: dict[str, list[Any]] = {name: [None, *some] for name, some in split(rows).items()}
    else:
        products = one_row() if rows == 1 else few_rows() if rows <= 32 else many_rows()
        found = {name: [None, *streamed(rows), *some] for name, some in products.items()}
    usual = attention_splits(rows * 8)
    tried = [(DecodeTile(64, 4, 2), 4), (DecodeTile(64, 4, 3), 3), (DecodeTile(64, 4, 3), 2), (DecodeTile(64, 4, 4), 2),
             (DecodeTile(64, 2, 3), 3), (DecodeTile(32, 2, 4), 4), (DecodeTile(32, 2, 3), 5),
             (DecodeTile(64, 4, 2, 1), 4), (DecodeTile(128, 4, 2), 2)]
    found["attention"] = [(None, usual), *((tile, usual | {"programs_per_sm": count}) for tile, count in tried)]
    return found


def product(tile: SmallMTile | PersistentTile | SplitKTile | Left | Splits | None, gated: bool, x: torch.Tensor,
            weight: torch.Tensor) -> torch.Tensor:
    if isinstance(tile, Splits):
        return split_product(x, weight, tile.splits)
    if isinstance(tile, Left):
        return split_k_partials(x, weight, tile.tile, tile.dtype)
    if isinstance(tile, SplitKTile):
        return split_k_matmul(x, weight, tile, gated=gated)
    if tile is not None:
        return small_m_matmul(x, weight, tile=tile, gated=gated)
    return silu_and_mul(linear(x, weight)) if gated else linear(x, weight)


def apply(batch: Batch, ways: Ways) -> None:
    batch.times = lambda name, x, w: product(ways[name], False, x, w)
    one, tile = ways["gated"], ways["gate_up"]
    batch.gated = lambda x, w: product(tile, True, x, w) if one else silu_and_mul(product(tile, False, x, w))
    batch.tile, batch.pieces = ways["attention"]
    batch.stores_current_kv = ways["stores_current_kv"]


def micros(batch: Batch, ways: Ways) -> float:
    """Of a layer, its rows and residual those of the one before."""
    apply(batch, ways)

    def chain() -> None:
        batch.plan()
        x, residual = batch.run(0, batch.x, batch.residual)
        for i in range(1, CALLS):
            x, residual = batch.run(i % LAYERS, x, residual)

    return statistics.median(run_seconds(captured(chain), 6)[1:]) * 1e6 / CALLS


class Search:
    """Changes one part at a time, and keeps what is faster."""

    def __init__(self, batch: Batch, rows: int, ways: Ways, until: float):
        self._batch, self._rows, self.ways, self._until = batch, rows, ways, until
        self.best = micros(batch, ways)
        self.told: list[dict[str, Any]] = []
        print(f"{rows} rows: {self.best:.1f} us with {ways}", flush=True)

    def part(self, name: str, options: list[Any]) -> list[Any]:
        """The fastest few of them."""
        trials = []
        for option in options:
            if option == self.ways[name] or time.monotonic() > self._until:
                continue
            try:
                trials.append((micros(self._batch, self.ways | {name: option}), option))
            except Exception as error:  # one that does not fit is no reason to lose the others
                print(f"{name} {option}: {type(error).__name__} {str(error)[:120]}", flush=True)
        self.told += [{"rows": self._rows, "part": name, "us": us, "option": str(option)} for us, option in trials]
        trials = sorted(trials, key=lambda trial: trial[0])
        print(f"{self._rows} rows, {name}: {self.best:.1f} before; "
              + "; ".join(f"{us:.1f} {short(option)}" for us, option in trials[:7]), flush=True)
        if trials and trials[0][0] < self.best:
            self.best, self.ways = trials[0][0], self.ways | {name: trials[0][1]}
        return [option for _, option in trials[:4]]


def short(option: Any) -> str:
    told = str(option)
    for long, brief in (
            ("SmallMTile", ""), ("SplitKTile", "split"), ("PersistentTile", "streamed"),
            ("block=", ""), ("folds=", "/"), ("programs_per_sm=", "n"), ("columns=", ""), ("depth=", ""),
            ("splits=", "p"), ("warps=", "w"), ("stages=", "s"), ("prefetch_bytes=", "a")):
        told = told.replace(long, brief)
    return told


def usual_ways(rows: int) -> Ways:
    shapes = {"qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (28672, 4096), "down": (4096, 14336)}
    ways: Ways = {}
    for name, shape in shapes.items():
        few = POLICY.gemm.small_m(rows, *shape, torch.bfloat16) if rows <= POLICY.gemm.small_m_max_rows(
            *shape, 2) else None
        ways[name] = POLICY.gemm.is_persistent(*shape, 2) and POLICY.gemm.persistent(rows, *shape) or few
    return ways | {"gated": True, "stores_current_kv": POLICY.attention.stores_current_kv(128, 2, 2, rows * 8),
                   "attention": (None, attention_splits(rows * 8))}


Job = tuple[int, SmallMTile | PersistentTile | SplitKTile | Left, bool] | DecodeTile
"""A product's rows, tile, and whether it is gated; or attention's tile."""


def compile_product(rows: int, tile: SmallMTile | PersistentTile | SplitKTile | Left, gated: bool,
                    device: str = "cuda") -> None:
    weight = torch.zeros(384, 4096, device=device, dtype=torch.bfloat16)
    product(tile, gated, weight.new_zeros(rows, 4096), weight)


def compile_attention(tile: DecodeTile, device: str = "cuda") -> None:
    pool = torch.zeros(4, LAYERS, 2, 8, 16, 128, device=device, dtype=torch.bfloat16)
    indptr = torch.tensor([0, 4], dtype=torch.int32, device=device)
    q, k, v = pool.new_zeros(1, 48, 128).split([32, 8, 8], 1)
    last = torch.full((1,), 16, dtype=torch.int32, device=device)
    current_kv = CurrentKV(k, v, torch.zeros(64, 128, device=device), torch.full((1,), 63, device=device))
    plan = plan_decode(indptr, last, 16, 8, num_sms(pool.device), 2048, **attention_splits(8))
    for early, rows in pairs((False, True), (None, current_kv)):
        paged_decode(q, pool[:, 0, 0], pool[:, 0, 1], indptr, indptr, last, 0.1, plan, tile, inputs_ready=early,
                     current_kv=rows)


def build(todo: list[Job]) -> list[str]:
    errors = []
    for job in todo:
        try:
            if isinstance(job, DecodeTile):
                compile_attention(job)
            else:
                compile_product(*job)
        except Exception as error:  # what a compiler or a device refuses is what is asked for
            errors.append(f"{job}: {type(error).__name__} {str(error)[:160]}")
    return errors


def jobs(batches: list[int]) -> list[Job]:
    """Each kernel once: it knows whether there are pieces, not how many, and rows rounded up, but one."""
    found: dict[Job, None] = {}
    for rows in batches:
        for name, options in candidates(rows).items():
            for option in options:
                if name == "attention" and option[0]:
                    found[option[0]] = None
                elif isinstance(option, PersistentTile):
                    for gated in (False, True)[:1 + (name == "gate_up")]:
                        found[max(rows, 8), replace(option, programs_per_sm=1), gated] = None
                elif isinstance(option, (SplitKTile, Left)):
                    for gated in (False, True)[:1 + (name == "gate_up")]:
                        found[rows, option, gated] = None
                elif name != "attention" and option and not isinstance(option, Splits):
                    narrow = rows == 1 and option.splits == 1 and option.columns <= 16
                    tall = 1 if narrow else 8 if rows <= 16 else rows
                    for gated in (False, True)[:1 + (name == "gate_up")]:
                        found[tall, replace(option, splits=min(option.splits, 2)), gated] = None
    return list(found)


def compile_beside(todo: list[Job]) -> list[str]:
    workers = max(1, min(len(todo), os.cpu_count() or 1))
    with multiprocessing.get_context("spawn").Pool(workers) as pool:
        return [error for errors in pool.imap_unordered(build, [todo[i::workers] for i in range(workers)])
                for error in errors]


def search(rows: int, context: int, copy: float, seconds: float) -> dict[str, Any]:
    shape = SHAPES["llama"]
    batch = Batch(shape, rows, context)
    options = candidates(rows)
    found = Search(batch, rows, usual_ways(rows), time.monotonic() + seconds)
    before = found.best
    options["gated"] = options["stores_current_kv"] = [False, True]
    for name in ("gate_up", "down", "qkv", "o", "attention", "gated", "stores_current_kv"):
        options[name] = [found.ways[name], *found.part(name, options[name])]
    for name in ("gate_up", "down", "qkv", "o"):  # once more, beside what has been found since
        found.part(name, options[name])
    floor = (4 * rows * context * shape.kv_heads * shape.dim + 2 * shape.layer_values) / copy / 1e6
    print(f"{rows} rows: {before:.1f} us before, {found.best:.1f} now, floor {floor:.1f}, "
          f"{found.best / floor:.3f} of it (before {before / floor:.3f})\n  "
          + "\n  ".join(f"{name}: {short(way)}" for name, way in found.ways.items()), flush=True)
    return {"rows": rows, "before": before, "us": found.best, "floor": floor, "told": found.told,
            "ways": {name: str(way) for name, way in found.ways.items()}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", default="1,8,64")
    parser.add_argument("--context", type=int, default=2048)
    parser.add_argument("--seconds", type=float, default=40, help="for all batches together, compiling apart")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    batches = [int(rows) for rows in args.batches.split(",")]
    begin = time.monotonic()
    todo = jobs(batches)
    for error in compile_beside(todo):
        print("not compiled:", error, flush=True)
    copy = ceilings.copy_tb_s()
    torch.cuda.empty_cache()
    print(f"{len(todo)} kernels compiled in {time.monotonic() - begin:.1f} s; copy {copy:.2f} TB/s", flush=True)
    measured = []
    for rows in batches:
        measured.append(search(rows, args.context, copy, args.seconds / len(batches)))
        torch.cuda.empty_cache()
        if args.out:
            args.out.write_text(json.dumps({"copy_tb_s": copy, "measured": measured}, indent=1))


if __name__ == "__main__":
    main()
