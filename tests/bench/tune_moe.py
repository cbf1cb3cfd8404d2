"""Finds the fastest tiles of a layer of experts and writes them into the table of this device.

    python -m baton.tests.bench.tune_moe [--shape qwen3-30b-a3b] [--tokens 1,16,...] [--folder kernels/tiles]

What other runs have found for other shapes or counts stays in the table. Compiling takes most of the time, about 3
minutes for the first count of tokens; the others reuse it.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from ...kernels import moe_tiles
from ...kernels.moe_align import moe_align
from ...kernels.moe_experts import moe_experts
from ...kernels.moe_gemm import moe_gemm
from ...kernels.moe_tiles import Tile, Tiles, default_tiles, device_name, shape_key, to_json
from .moe_shapes import SHAPES, Layer, micros


def candidates(rows: int, dtype: torch.dtype) -> Iterator[Tile]:
    """All that may be sensible: a tile's values fit into registers, and its loads into shared memory."""
    for columns in (64, 128):
        for depth in (64, 128) if dtype.itemsize == 2 else (32,):
            for warps in (4, 8) if rows * columns >= 64 * 64 else (4,):
                for stages in (3, 4, 5) if rows <= 32 else (3, 4):
                    yield Tile(rows, columns, depth, 1 if rows <= 32 else 16, warps, stages)


def best(run: Callable[[Tile], object], tiles: Iterator[Tile]) -> tuple[float, Tile]:
    """The fastest tile that the device can run, and its microseconds."""
    found = []
    for tile in tiles:
        try:
            found.append((micros(lambda tile=tile: run(tile)), tile))  # type: ignore[misc]
        except Exception as error:  # by name: Triton's own class moves between its versions
            if "OutOfResources" not in type(error).__name__:
                raise
    return min(found, key=lambda pair: pair[0])


def tune(layer: Layer, tokens: int, most_rows: int) -> Tiles:
    """The best of each number of rows in a block that suits so many tokens, measured as a whole."""
    shape = layer.shape
    x, places, weights = layer.tokens(tokens)
    total, dtype = places.numel(), x.dtype
    between = torch.randn(total, shape.size, device=x.device).to(dtype)
    tried = []
    for rows in (16, 32, 64, 128):
        if rows > 16 and (rows > most_rows or total / shape.experts < rows / 8):
            continue
        aligned = moe_align(places, shape.experts, rows)
        _, gate_up = best(lambda tile, a=aligned: moe_gemm(x, layer.gate_up, a, shape.top_k, total, tile, dtype,
                                                           gated=True), candidates(rows, dtype))
        _, down = best(lambda tile, a=aligned: moe_gemm(between, layer.down, a, 1, total, tile, dtype,
                                                        weights=weights), candidates(rows, dtype))
        tiles = Tiles(gate_up, down)
        tried.append((micros(lambda t=tiles: moe_experts(x, layer.gate_up, layer.down, places, weights, tiles=t)),
                      tiles))
    rule = default_tiles(total / shape.experts, dtype)
    by_rule = micros(lambda: moe_experts(x, layer.gate_up, layer.down, places, weights, tiles=rule))
    took, tiles = min([*tried, (by_rule, rule)], key=lambda pair: pair[0])
    print(f"{tokens} tokens: {took:.1f} us (by the rule {by_rule:.1f} us) with {tiles}", flush=True)
    return tiles


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="qwen3-30b-a3b")
    parser.add_argument("--tokens", default="1,16,64,256,1024,4096,8192")
    parser.add_argument("--most-rows", type=int, default=128)
    parser.add_argument("--folder", type=Path, default=moe_tiles.FOLDER)
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    shape, name = SHAPES[args.shape], device_name(device)
    layer = Layer(shape, dtype, device.type)
    moe_tiles.FOLDER = args.folder
    measured = dict(moe_tiles.table(name))
    key = shape_key(shape.experts, shape.hidden, shape.size, shape.top_k, dtype)
    measured[key] = dict(measured.get(key, {}))
    for tokens in map(int, args.tokens.split(",")):
        measured[key][tokens] = tune(layer, tokens, args.most_rows)
    args.folder.mkdir(exist_ok=True)
    file = args.folder / f"{name.replace(' ', '_')}.json"
    file.write_text(to_json(measured))
    print(f"written to {file}")


if __name__ == "__main__":
    main()
