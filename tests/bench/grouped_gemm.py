"""Time of a layer of experts beside what the machine can do at most, measured in the same run.

    python -m baton.tests.bench.grouped_gemm [--shape qwen3-30b-a3b] [--tokens 1,8,64,...] [--output figures.json]

``experts``: alignment, both products and the sum. ``topk``: the choice of experts by router logits. ``floor``: what the
operations take at the rate of one large matrix product, or the weights of the experts that are hit at the rate of a
copy, whichever is more. ``loop``: the same by torch, expert by expert.
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
from .tune_moe import compile_all

DRAWS = 4  # different choices in turn, so that few tokens do not find their experts in the cache


def measure(layer: Layer, tokens: int, copy_tb_s: float | None, tflops: float | None) -> dict[str, object]:
    shape = layer.shape
    draws = [layer.tokens(tokens) for _ in range(DRAWS)]
    spec = MoESpec(num_experts=shape.experts, top_k=shape.top_k, intermediate_size=shape.size, layers=(0,))
    logits = torch.randn(tokens, shape.experts, device=layer.device)

    def experts() -> None:
        for x, places, weights in draws:
            moe_experts(x, layer.gate_up, layer.down, places, weights)

    figures: dict[str, object] = {
        "tokens": tokens, "experts_us": micros(experts) / DRAWS,
        "topk_us": micros(lambda: moe_topk(logits, None, spec)),
        "tiles": str(_tiles(shape, tokens, logits.device).gate_up),
    }
    if copy_tb_s and tflops:
        hit = sum(len(places.unique()) for _, places, _ in draws) / DRAWS
        figures["floor_us"] = max(shape.flops(tokens) / tflops / 1e6, hit * shape.expert_bytes / copy_tb_s / 1e6)
        figures["of_floor"] = figures["floor_us"] / figures["experts_us"]  # type: ignore[operator]
        figures["tflops"] = shape.flops(tokens) / figures["experts_us"] / 1e6  # type: ignore[operator]
        figures["loop_us"] = _loop_us(layer, draws)
    return figures


def _loop_us(layer: Layer, draws: list) -> float:
    turn = cycle(draws)

    def loop() -> None:
        x, places, weights = next(turn)
        reference.moe_experts(x, layer.gate_up, layer.down, places, weights)

    return 1e6 * ceilings._seconds(loop, 5)


def _tiles(shape: Shape, tokens: int, device: torch.device) -> Tiles:
    """What ``moe_experts`` takes."""
    return tiles_for(tokens, shape.experts, shape.hidden, shape.size, shape.top_k, torch.bfloat16, device_name(device),
                     takes_warpgroups(device, shape.hidden, shape.size, torch.bfloat16))


def _compile(shape: Shape, tokens: list[int]) -> None:
    """What the launches will take, side by side: one after the other takes most of a minute."""
    taken = [_tiles(shape, count, torch.device("cuda", 0)) for count in tokens]
    compile_all(list({("bfloat16", tile, tile is tiles.gate_up) for tiles in taken
                      for tile in (tiles.gate_up, tiles.down)}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="qwen3-30b-a3b")
    parser.add_argument("--tokens", default="1,4,16,64,128,256,512,1024,2048,4096,8192")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    on_gpu = torch.cuda.is_available()
    layer = Layer(SHAPES[args.shape], torch.bfloat16 if on_gpu else torch.float32, "cuda" if on_gpu else "cpu")
    copy, tflops = (ceilings.copy_tb_s(), ceilings.matmul_tflops()) if on_gpu else (None, None)
    name = torch.cuda.get_device_name() if on_gpu else "CPU"
    if on_gpu:
        _compile(SHAPES[args.shape], list(map(int, args.tokens.split(","))))
    print(f"{args.shape} on {name}; copy {copy} TB/s, matrix product {tflops} TFLOP/s")
    found = []
    for tokens in map(int, args.tokens.split(",")):
        found.append(measure(layer, tokens, copy, tflops))
        print("  ".join(f"{key} {value:.2f}" if isinstance(value, float) else f"{key} {value}"
                        for key, value in found[-1].items()), flush=True)
    if args.output:
        args.output.write_text(json.dumps({"shape": args.shape, "device": name, "copy_tb_s": copy,
                                           "bf16_matmul_tflops": tflops, "measured": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
