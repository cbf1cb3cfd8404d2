"""Finds the fastest tiles of layers of experts and writes them into the table of this device.

    python -m baton.tests.bench.tune_moe [--shapes qwen3-30b-a3b,...] [--dtypes bfloat16,float8_e4m3fn]
        [--tokens 1,16,...] [--folder kernels/tuning]

What other runs have found for other shapes or counts stays in the table, which is written after each count. All
candidates are compiled first, by as many processes as there are cores; one shape's kernels serve the others.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import torch

from ...kernels.device import device_name
from ...kernels.moe.moe_align import Alignment, moe_align
from ...kernels.moe.moe_experts import moe_experts
from ...kernels.moe.moe_gemm import moe_gemm
from ...kernels.moe.moe_sorted import fits, moe_down, moe_up, moe_up_in_float8, supports_warp_specialized
from ...kernels.moe.moe_sum import moe_sum
from ...kernels.rowwise.fp8_quantize import quantize_groups
from ...kernels.tuning.moe import Tile, Tiles, default_tiles, shape_key, warp_specialized_tiles
from ...kernels.tuning.policy import FOLDER, file_of, policy_of, write_moe_tiles
from .moe_shapes import SHAPES, Layer, Shape, micros

DEVICE = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
FEW_ROWS, MANY_ROWS = (16, 32), (64, 128)  # of a block: in the order of tokens, and in that of experts


def candidates(rows: int, dtype: torch.dtype, gated: bool) -> Iterator[Tile]:
    """All that may be sensible: a tile's values fit into registers, and its loads into shared memory."""
    if rows in FEW_ROWS:
        for columns in (64, 128):
            for stages in (3, 4, 5) if rows == 16 else (3, 4):
                yield Tile(rows, columns, 128 if dtype.itemsize <= 2 else 32, 1, 4, stages)
        if dtype.itemsize == 2:  # for layers whose depth is no multiple of 128: steps that end beyond it are slow
            for columns, stages in ((64, 4), (64, 6), (128, 4)):
                yield Tile(rows, columns, 64, 1, 4, stages)
        return
    depth = 128 // dtype.itemsize
    wide = (64 if gated else 128) if dtype.itemsize == 1 or rows == 64 else (128 if gated else 256)
    for columns in {64 if gated else 128, wide}:
        for warps in (4, 8) if columns <= 128 // (2 if gated else 1) else (8,):
            for stages in (2, 3, 4) if warps == 4 else (3, 4):
                yield Tile(rows, columns, depth, 16, warps, stages)
    if rows == 64 and dtype.itemsize == 2:
        # Less depth or fewer stages let two programs share a multiprocessor: one's loop hides the other's end.
        for deep, stages in ((64, 2), (64, 3), (64, 4), (32, 4), (32, 5)):
            yield Tile(rows, 128 if gated else 256, deep, 16, 4, stages)
    if rows == 128 and dtype.itemsize == 2:
        for stages in (4, 6):
            yield Tile(rows, 64 if gated else 128, 32, 16, 4, stages)
    if rows == 128 and dtype.itemsize == 1 and gated:
        yield Tile(rows, 128, depth, 16, 8, 3)


def warpgroup_candidates(dtype: torch.dtype, gated: bool) -> list[Tile]:
    tiles = warp_specialized_tiles(dtype, 16)
    return [tiles.gate_up if gated else tiles.down] if supports_warp_specialized(DEVICE, 256, 128, dtype) else []


def suits(tile: Tile, depth: int, layer: Layer) -> bool:
    """Whether a product of the layer with this depth is cut into whole steps of the tile."""
    return depth % tile.depth == 0 if tile.rows in FEW_ROWS else fits(tile, depth, depth, layer.scales is not None)


class Products:
    """The two products of a layer's tokens, each alone."""

    def __init__(self, layer: Layer, tokens: int, tile: Tile):
        """Of ``tile`` it matters how rows are aligned for it."""
        self.layer, self.tile = layer, tile
        self.up_bias, self.down_bias = layer.biases or (None, None)
        self.x, self.places, self.weights = layer.tokens(tokens)
        self.in_order = tile.rows in FEW_ROWS
        self.aligned: Alignment = moe_align(self.places, layer.shape.experts, tile.block, tile.max_blocks)
        self.given, self.given_scale = self._quantized(self.x)
        length = self.places.numel() if self.in_order else len(self.aligned.sorted_choices)
        self.between, self.between_scale = self._quantized(
            torch.randn(length, layer.shape.size, device=self.x.device).to(layer.dtype))

    def _quantized(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        return (rows, None) if self.layer.scales is None else quantize_groups(rows, 128)

    def up(self, tile: Tile) -> torch.Tensor:
        layer, total = self.layer, self.places.numel()
        scale = None if layer.scales is None else layer.scales.gate_up
        if scale is not None and self.given_scale is not None and tile.is_warp_specialized:
            return moe_up_in_float8(self.given, layer.gate_up, self.aligned, layer.shape.top_k, total, tile,
                                    layer.dtype, self.given_scale, scale, self.up_bias, layer.shape.gate_limit)[0]
        if not self.in_order:
            return moe_up(self.given, layer.gate_up, self.aligned, layer.shape.top_k, total, tile, layer.dtype,
                          self.given_scale, scale, self.up_bias, layer.shape.gate_limit)
        return moe_gemm(self.given, layer.gate_up, self.aligned, layer.shape.top_k, total, tile, layer.dtype,
                        gated=True, a_scale=self.given_scale, b_scale=scale, bias=self.up_bias,
                        limit=layer.shape.gate_limit)

    def down(self, tile: Tile) -> torch.Tensor:
        layer, total = self.layer, self.places.numel()
        scale = None if layer.scales is None else layer.scales.down
        if not self.in_order:
            return moe_down(self.between, layer.down, self.aligned, total, tile, layer.dtype, self.between_scale, scale,
                            self.down_bias)
        return moe_gemm(self.between, layer.down, self.aligned, 1, total, tile, layer.dtype,
                        a_scale=self.between_scale, b_scale=scale, bias=self.down_bias)

    def whole(self, tiles: Tiles) -> torch.Tensor:
        layer = self.layer
        return moe_experts(self.x, layer.gate_up, layer.down, self.places, self.weights, layer.scales, tiles,
                           layer.biases, layer.shape.gate_limit)

    def others(self) -> tuple[Callable[[], object], Callable[[], object]]:
        """The alignment and, of sorted rows, the sum."""
        out, count = torch.empty_like(self.x), self.layer.shape.experts
        made = torch.zeros(len(self.aligned.sorted_choices), self.x.shape[1], dtype=self.x.dtype, device=self.x.device)
        return (lambda: moe_align(self.places, count, self.tile.block, self.tile.max_blocks),
                lambda: moe_sum(made, self.places, count, self.weights, self.aligned.positions, out))


Job = tuple[str, Tile, bool, float]
"""A type, a tile, whether of the gated product, and the gate's limit."""


def compile_one(job: Job) -> str:
    """In a process of its own: one expert of the shape is enough for the kernel."""
    name, tile, gated, limit = job
    dtype, device = getattr(torch, name), "cuda" if torch.cuda.is_available() else "cpu"
    try:
        products = Products(Layer(Shape(2048, 1, 1, 768, limit), dtype, device), 16, tile)
        products.up(tile) if gated else products.down(tile)
    except Exception as error:  # what a device cannot hold is not compiled; the measurement finds it again
        return f"{job}: {type(error).__name__} {str(error)[:200]}"
    return ""


def all_candidates(dtypes: list[str], most_rows: int, limits: set[float]) -> list[Job]:
    return [(name, tile, gated, limit) for name in dtypes for gated in (True, False)
            for tiles in _kinds(getattr(torch, name), gated, most_rows) for tile in tiles for limit in limits]


def _kinds(dtype: torch.dtype, gated: bool, most_rows: int) -> list[list[Tile]]:
    """Tiles whose rows are aligned alike stand together."""
    by_rows = [list(candidates(rows, dtype, gated)) for rows in FEW_ROWS + MANY_ROWS if rows <= most_rows]
    return [*by_rows, warpgroup_candidates(dtype, gated)]


def compile_all(jobs: list[Job]) -> None:
    """Of each job's type the product with this tile, gated or not, in as many processes as there are cores."""
    began = time.perf_counter()
    jobs = sorted(jobs, key=lambda job: -job[1].rows)  # the longest first
    with multiprocessing.get_context("spawn").Pool(min(len(jobs), os.cpu_count() or 1)) as pool:
        troubles = [said for said in pool.imap_unordered(compile_one, jobs) if said]
    print(f"{len(jobs)} kernels compiled in {time.perf_counter() - began:.1f} s", *troubles, sep="\n", flush=True)


def best(run: Callable[[Tile], object], tiles: Iterator[Tile]) -> tuple[float, Tile]:
    """The fastest tile that the device can run, and its microseconds."""
    found = []
    for tile in tiles:
        try:
            found.append((micros(lambda tile=tile: run(tile), 3), tile))  # type: ignore[misc]
        except Exception as error:  # by name: Triton's own class moves between its versions
            if "OutOfResources" not in type(error).__name__:
                raise
    return min(found, key=lambda pair: pair[0])


def best_banded(run: Callable[[Tile], object], tiles: list[Tile]) -> tuple[float, Tile]:
    """As ``best``, then with other bands, which compile nothing anew for rows in the order of experts."""
    took, tile = best(run, iter(tiles))
    if tile.rows in FEW_ROWS:
        return took, tile
    others = (replace(tile, band=band) for band in (2, 4, 8))
    return min((took, tile), best(run, others), key=lambda pair: pair[0])


def tune(layer: Layer, tokens: int, most_rows: int, verbose: bool) -> Tiles:
    """The best of each number of rows in a block that suits so many tokens, measured as a whole."""
    shape, dtype = layer.shape, layer.gate_up.dtype
    each, tried = tokens * shape.top_k / shape.experts, []
    for kind in zip(*(_kinds(dtype, gated, most_rows) for gated in (True, False)), strict=True):
        suiting = [[tile for tile in tiles if suits(tile, depth, layer)]
                   for tiles, depth in zip(kind, (shape.hidden, shape.size), strict=True)]
        if not all(suiting):
            continue
        rows = suiting[0][0].rows
        if rows > 16 and each < rows / 8 or rows < 64 and each > 8 * rows:
            continue
        products = Products(layer, tokens, suiting[0][0])
        up_us, up = best_banded(products.up, suiting[0])
        down_us, down = best_banded(products.down, suiting[1])
        tiles = Tiles(up, down, rows not in FEW_ROWS)
        tried.append((micros(lambda t=tiles, p=products: p.whole(t)), tiles))  # type: ignore[misc]
        if verbose:
            flops = shape.flops(tokens)
            align_us, sum_us = map(micros, products.others())
            print(f"  {rows} rows: {tried[-1][0]:.0f} us; up {up_us:.0f} us, {2 * flops / 3e6 / up_us:.0f} TFLOP/s, "
                  f"down {down_us:.0f} us, {flops / 3e6 / down_us:.0f} TFLOP/s, align {align_us:.0f}, "
                  f"sum {sum_us:.0f}; {_short(up)} {_short(down)}", flush=True)
    rule = default_tiles(each, dtype)
    by_rule = micros(lambda: products.whole(rule))
    took, tiles = min([*tried, (by_rule, rule)], key=lambda pair: pair[0])
    print(f"{tokens} tokens: {took:.1f} us (by the rule {by_rule:.1f} us) with {_short(tiles.gate_up)} "
          f"{_short(tiles.down)}", flush=True)
    return tiles


def _short(tile: Tile) -> str:
    return f"{tile.rows}x{tile.columns}x{tile.depth} {tile.warps}w {tile.stages}s {tile.band}b"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default="qwen3-30b-a3b")
    parser.add_argument("--dtypes", default="bfloat16" if torch.cuda.is_available() else "float32")
    parser.add_argument("--tokens", default="1,16,64,256,1024,2048,4096,8192")
    parser.add_argument("--most-rows", type=int, default=128)
    parser.add_argument("--folder", type=Path, default=FOLDER)
    parser.add_argument("--verbose", action="store_true", help="each product's time by each number of rows in a block")
    args = parser.parse_args()
    name, dtypes = device_name(DEVICE), args.dtypes.split(",")
    if DEVICE.type == "cuda":
        limits = {SHAPES[shape].gate_limit for shape in args.shapes.split(",")}
        compile_all(all_candidates(dtypes, args.most_rows, limits))
    measured = dict(policy_of(DEVICE).moe.numbers.tiles)
    for dtype, shape_name in ((getattr(torch, dtype), shape) for dtype in dtypes for shape in args.shapes.split(",")):
        shape = SHAPES[shape_name]
        layer = Layer(shape, dtype, DEVICE.type)
        print(f"{shape_name}, {dtype}", flush=True)
        key = shape_key(shape.experts, shape.hidden, shape.size, shape.top_k, dtype)
        measured[key] = dict(measured.get(key, {}))
        for tokens in map(int, args.tokens.split(",")):
            measured[key][tokens] = tune(layer, tokens, args.most_rows, args.verbose)
            write_moe_tiles(name, measured, args.folder)
    print(f"written to {file_of(name, args.folder)}")


if __name__ == "__main__":
    main()
