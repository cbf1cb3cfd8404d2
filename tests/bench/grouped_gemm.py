"""Time of a layer of experts beside what the machine can do at most, measured in the same run.

    python -m baton.tests.bench.grouped_gemm [--shapes qwen3-30b-a3b,...] [--dtype float8_e4m3fn] [--tokens 1,8,64,...]
        [--output figures.json]

``experts``: the layer, that is alignment, both products and the sum, which stand behind it, each alone (in float8 the
quantizing of its tokens too). ``topk``: the choice of experts by router logits, which is no part of it. ``floor``: for
each of the two products what its operations take at the rate of one large matrix product of the same type (float8:
``torch._scaled_mm`` with one scale for each matrix), without padding, or its bytes at the rate of a copy, whichever is
more; then both together. Bytes are the matrices of the experts that are hit, and all rows once in and once out.
``of_floor``: the floor in the layer's time; ``products_of_floor``: in that of the two products alone. ``loop``: the
layer by torch, expert by expert.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from itertools import cycle
from pathlib import Path

import torch

from ...common.config.moe import MoESpec
from ...kernels import reference
from ...kernels.device import device_name, num_sms
from ...kernels.moe.moe_experts import moe_experts
from ...kernels.moe.moe_gemm import SCALE_GROUP
from ...kernels.moe.moe_sorted import supports_warp_specialized
from ...kernels.moe.moe_topk import moe_topk
from ...kernels.rowwise.fp8_quantize import quantize_groups
from ...kernels.tuning.moe import Tiles
from ...kernels.tuning.policy import policy_of
from . import ceilings
from .moe_shapes import SHAPES, Layer, Shape, micros
from .tune_moe import DEVICE, Products, compile_all

DRAWS = 4  # different choices in turn, so that few tokens do not find their experts in the cache


def measure(layer: Layer, tokens: int, copy_tb_s: float | None, tflops: float | None) -> dict[str, object]:
    """``tflops`` is of one large product of the experts' type."""
    shape, width = layer.shape, layer.gate_up.dtype.itemsize
    draws = [layer.tokens(tokens) for _ in range(DRAWS)]

    def experts() -> None:
        for x, places, weights in draws:
            moe_experts(x, layer.gate_up, layer.down, places, weights, layer.scales, None, layer.biases,
                        shape.gate_limit)

    took, parts = micros(experts) / DRAWS, _parts(layer, tokens)
    figures: dict[str, object] = {"tokens": tokens, "experts_us": took, **parts}
    if copy_tb_s and tflops:
        hit = sum(len(places.unique()) for _, places, _ in draws) / DRAWS
        floor = floor_us(shape, tokens, hit, width, copy_tb_s, tflops)
        figures |= {"floor_us": floor, "of_floor": floor / took,
                    "products_of_floor": floor / (parts["up_us"] + parts["down_us"]),
                    "tflops": shape.flops(tokens) / took / 1e6, "loop_us": _loop_us(layer, draws)}
    return figures


def floor_us(shape: Shape, tokens: int, hit: float, width: int, copy_tb_s: float, tflops: float) -> float:
    """Of both products, one after the other; ``width``: bytes of one of their values, but for those of the layer."""
    rows, flops, matrices = tokens * shape.top_k, shape.flops(tokens), hit * shape.expert_bytes * width / 2
    up_bytes = matrices * 2 / 3 + width * (tokens * shape.hidden + rows * shape.size)
    down_bytes = matrices / 3 + width * rows * shape.size + max(width, 2) * rows * shape.hidden
    up, down = max(2 / 3 * flops / tflops, up_bytes / copy_tb_s), max(flops / 3 / tflops, down_bytes / copy_tb_s)
    return (up + down) / 1e6


def _each(work: Callable[[], object]) -> float:
    """Microseconds of one of several in a row, as ``experts`` is measured too: a graph takes some to begin."""
    return micros(lambda: [work() for _ in range(DRAWS)]) / DRAWS


def _waves(products: Products, tiles: Tiles) -> dict[str, float]:
    """Tiles of each product for a multiprocessor, where warps with roles share them."""
    if products.aligned.spans is None:
        return {}
    spans = int((products.aligned.spans[:, 2] >= 0).sum()) / num_sms(products.x.device)
    shape = products.layer.shape
    return {"up_waves": spans * -(-shape.size // tiles.gate_up.columns),
            "down_waves": spans * -(-shape.hidden // tiles.down.columns)}


def _parts(layer: Layer, tokens: int) -> dict[str, float]:
    shape = layer.shape
    tiles = _tiles(shape, tokens, layer.gate_up.dtype, layer.gate_up.device)
    products = Products(layer, tokens, tiles.gate_up)
    align, total = products.others()
    spec = MoESpec(num_experts=shape.experts, top_k=shape.top_k, intermediate_size=shape.size, layers=(0,))
    logits = torch.randn(tokens, shape.experts, device=layer.device)
    works = {"up": lambda: products.up(tiles.gate_up), "down": lambda: products.down(tiles.down), "align": align,
             "sum": total, "topk": lambda: moe_topk(logits, None, spec)}
    if layer.scales is not None:
        works["quantize"] = lambda: quantize_groups(products.x, SCALE_GROUP)
    return {f"{name}_us": _each(work) for name, work in works.items()} | _waves(products, tiles)


def _loop_us(layer: Layer, draws: list) -> float:
    turn = cycle(draws)

    def loop() -> None:
        x, places, weights = next(turn)
        reference.moe_experts(x, layer.gate_up, layer.down, places, weights, layer.scales, layer.biases,
                              layer.shape.gate_limit)

    return 1e6 * ceilings._seconds(loop, 5)


def _tiles(shape: Shape, tokens: int, dtype: torch.dtype, device: torch.device) -> Tiles:
    """What ``moe_experts`` takes."""
    return policy_of(device).moe.tiles(tokens, shape.experts, shape.hidden, shape.size, shape.top_k, dtype,
                     supports_warp_specialized(device, shape.hidden, shape.size, dtype))


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
    copy, tflops, name = None, None, device_name(DEVICE)
    product = ceilings.fp8_matmul_tflops if args.dtype.startswith("float8") else ceilings.matmul_tflops
    if DEVICE.type == "cuda":
        _compile(shapes, counts, args.dtype)
        copy, tflops = ceilings.copy_tb_s(), product()
    print(f"{args.dtype} on {name}; copy {copy} TB/s, matrix product {tflops} TFLOP/s")
    found = []
    for shape in shapes:
        layer = Layer(SHAPES[shape], getattr(torch, args.dtype), DEVICE.type)
        for tokens in counts:
            found.append({"shape": shape, **measure(layer, tokens, copy, tflops)})
            print("  ".join(f"{key} {value:.2f}" if isinstance(value, float) else f"{key} {value}"
                            for key, value in found[-1].items()), flush=True)
    after = product() if DEVICE.type == "cuda" else None
    print(f"matrix product after these {after} TFLOP/s")
    if args.output:
        args.output.write_text(json.dumps({"dtype": args.dtype, "device": name, "copy_tb_s": copy,
                                           "matmul_tflops": tflops, "matmul_tflops_after": after,
                                           "measured": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
