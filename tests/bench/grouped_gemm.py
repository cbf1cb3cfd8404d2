"""Time of a layer of experts beside what the machine can do at most, measured in the same run.

    python -m baton.tests.bench.grouped_gemm [--shapes qwen3-30b-a3b,...] [--dtype float8_e4m3fn] [--tokens 1,8,64,...]
        [--output figures.json]

``experts``: alignment, both products and the sum, which stand behind it, each alone. ``topk``: the choice of experts by
router logits. ``floor``: what the operations take at the rate of one large matrix product (in float8 at twice that of
bfloat16), or the weights of the experts that are hit at the rate of a copy, whichever is more. ``loop``: the same by
torch, expert by expert.
"""

from __future__ import annotations

import argparse
import json
from itertools import cycle
from pathlib import Path

import torch

from ...common.config.moe import MoESpec
from ...kernels import reference
from ...kernels.moe_experts import moe_experts
from ...kernels.moe_sorted import takes_warpgroups
from ...kernels.moe_tiles import Tiles, device_name, tiles_for
from ...kernels.moe_topk import moe_topk
from . import ceilings
from .moe_shapes import SHAPES, Layer, Shape, micros
from .tune_moe import DEVICE, Products, compile_all

DRAWS = 4  # different choices in turn, so that few tokens do not find their experts in the cache


def measure(layer: Layer, tokens: int, copy_tb_s: float | None, tflops: float | None) -> dict[str, object]:
    shape, width = layer.shape, layer.gate_up.dtype.itemsize
    draws = [layer.tokens(tokens) for _ in range(DRAWS)]

    def experts() -> None:
        for x, places, weights in draws:
            moe_experts(x, layer.gate_up, layer.down, places, weights, layer.scales, None, layer.biases,
                        shape.gate_limit)

    figures: dict[str, object] = {"tokens": tokens, "experts_us": micros(experts) / DRAWS, **_parts(layer, tokens)}
    if copy_tb_s and tflops:
        hit = sum(len(places.unique()) for _, places, _ in draws) / DRAWS
        figures["floor_us"] = max(shape.flops(tokens) * width / 2 / tflops / 1e6,
                                  hit * shape.expert_bytes * width / 2 / copy_tb_s / 1e6)
        figures["of_floor"] = figures["floor_us"] / figures["experts_us"]  # type: ignore[operator]
        figures["tflops"] = shape.flops(tokens) / figures["experts_us"] / 1e6  # type: ignore[operator]
        figures["loop_us"] = _loop_us(layer, draws)
    return figures


def _parts(layer: Layer, tokens: int) -> dict[str, object]:
    shape = layer.shape
    tiles = _tiles(shape, tokens, layer.gate_up.dtype, layer.gate_up.device)
    products = Products(layer, tokens, tiles.gate_up)
    align_us, sum_us = products.others()
    spec = MoESpec(num_experts=shape.experts, top_k=shape.top_k, intermediate_size=shape.size, layers=(0,))
    logits = torch.randn(tokens, shape.experts, device=layer.device)
    return {"up_us": micros(lambda: products.up(tiles.gate_up)), "down_us": micros(lambda: products.down(tiles.down)),
            "align_us": align_us, "sum_us": sum_us, "topk_us": micros(lambda: moe_topk(logits, None, spec)),
            "tiles": f"{tiles.gate_up}"}


def _loop_us(layer: Layer, draws: list) -> float:
    turn = cycle(draws)

    def loop() -> None:
        x, places, weights = next(turn)
        reference.moe_experts(x, layer.gate_up, layer.down, places, weights, layer.scales, layer.biases,
                              layer.shape.gate_limit)

    return 1e6 * ceilings._seconds(loop, 5)


def _tiles(shape: Shape, tokens: int, dtype: torch.dtype, device: torch.device) -> Tiles:
    """What ``moe_experts`` takes."""
    return tiles_for(tokens, shape.experts, shape.hidden, shape.size, shape.top_k, dtype, device_name(device),
                     takes_warpgroups(device, shape.hidden, shape.size, dtype))


def _compile(shapes: list[str], tokens: list[int], dtype: str) -> None:
    """What the launches will take, side by side: one after the other takes most of a minute."""
    taken = [(_tiles(SHAPES[shape], count, getattr(torch, dtype), DEVICE), SHAPES[shape].gate_limit)
             for shape in shapes for count in tokens]
    compile_all(list({(dtype, tile, tile is tiles.gate_up, limit) for tiles, limit in taken
                      for tile in (tiles.gate_up, tiles.down)}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default="qwen3-30b-a3b", help=f"of {', '.join(SHAPES)}")
    parser.add_argument("--dtype", default="bfloat16" if DEVICE.type == "cuda" else "float32")
    parser.add_argument("--tokens", default="1,4,16,64,128,256,512,1024,2048,4096,8192")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    shapes, counts = args.shapes.split(","), list(map(int, args.tokens.split(",")))
    copy, tflops = (ceilings.copy_tb_s(), ceilings.matmul_tflops()) if DEVICE.type == "cuda" else (None, None)
    name = device_name(DEVICE)
    if DEVICE.type == "cuda":
        _compile(shapes, counts, args.dtype)
    print(f"{args.dtype} on {name}; copy {copy} TB/s, matrix product {tflops} TFLOP/s")
    found = []
    for shape in shapes:
        layer = Layer(SHAPES[shape], getattr(torch, args.dtype), DEVICE.type)
        for tokens in counts:
            found.append({"shape": shape, **measure(layer, tokens, copy, tflops)})
            print("  ".join(f"{key} {value:.2f}" if isinstance(value, float) else f"{key} {value}"
                            for key, value in found[-1].items()), flush=True)
    if args.output:
        args.output.write_text(json.dumps({"dtype": args.dtype, "device": name, "copy_tb_s": copy,
                                           "bf16_matmul_tflops": tflops, "measured": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
