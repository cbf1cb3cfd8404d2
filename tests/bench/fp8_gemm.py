"""Time of float8 products over Llama-3-8B's linear layers, beside bfloat16's and what the machine can do at most.

    python -m baton.tests.bench.fp8_gemm [--rows 1,64,4096] [--output figures.json]

``bf16``: torch's product. ``row``: ours with a scale a row, and with the quantizing of its input. ``tensor``:
``torch._scaled_mm`` with one scale for each matrix. ``block``: ours by blocks of 128 x 128, and with the quantizing by
groups; each is made by what is chosen for so many rows. ``row kernel``, ``block kernel``: by ``fp8_matmul`` in any
case.
``floor``: a float8 weight, input and output at the rate of a copy, or the operations at twice the rate of one large
bfloat16 product, whichever takes longer; both rates are measured in the same run. Products run as CUDA graphs, back to
back over weights that together exceed the caches.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

import torch
from torch.nn.functional import linear

from ...kernels.arguments import Float8Format, Float8Rows
from ...kernels.float8.fp8_block_matmul import block_matmul
from ...kernels.float8.fp8_matmul import GROUP, fp8_matmul
from ...kernels.float8.fp8_scaled_matmul import scaled_matmul
from ...kernels.rowwise.fp8_quantize import quantize
from . import ceilings
from .moe_shapes import micros

SHAPES = {"qkv": (4096, 6144), "o": (4096, 4096), "gate_up": (4096, 28672), "down": (14336, 4096)}
BLOCK = (GROUP, GROUP)
_CACHE_BYTES = 256 << 20  # several times an H200's 50 MiB


class Case:
    """Inputs of ``rows`` tokens and as many copies of the weight as exceed the caches."""

    def __init__(self, width: int, out: int, rows: int):
        self.flops = 2 * rows * width * out
        self.bytes = width * out + rows * width + 2 * rows * out
        self.x = torch.randn(rows, width, device="cuda").bfloat16()
        copies = max(2, -(-_CACHE_BYTES // (width * out)))
        self.weights = [torch.randn(out, width, device="cuda").to(torch.float8_e4m3fn) for _ in range(copies)]
        self.wide = [weight.bfloat16() for weight in self.weights]
        self.row_scale = torch.rand(out, device="cuda") + 0.5
        self.block_scale = torch.rand(-(-out // 128), -(-width // 128), device="cuda") + 0.5

    def measure(self) -> dict[str, float]:
        token, group = Float8Format(self.x.shape[1]), Float8Format(GROUP)
        by_token, by_group = quantize(self.x, token), quantize(self.x, group)
        one, bfloat16 = torch.ones(1, device="cuda"), torch.bfloat16

        def by_row(x: Float8Rows, w: torch.Tensor) -> torch.Tensor:
            return scaled_matmul(x.values, x.scale, w, self.row_scale, bfloat16)

        def by_block(x: Float8Rows, w: torch.Tensor) -> torch.Tensor:
            return block_matmul(x.values, x.scale, w, self.block_scale, BLOCK, bfloat16)

        works: dict[str, Callable[[torch.Tensor], object]] = {
            "row": lambda w: by_row(by_token, w),
            "row+quantize": lambda w: by_row(quantize(self.x, token), w),
            "tensor": lambda w: torch._scaled_mm(by_token.values, w.t(), scale_a=one, scale_b=one, out_dtype=bfloat16,
                                                 use_fast_accum=True),
            "block": lambda w: by_block(by_group, w),
            "block+quantize": lambda w: by_block(quantize(self.x, group), w),
            "row kernel": lambda w: fp8_matmul(*by_token[:2], w, self.row_scale, "row", bfloat16),
            "block kernel": lambda w: fp8_matmul(*by_group[:2], w, self.block_scale, "block", bfloat16),
        }
        found = {"bf16": micros(lambda: [linear(self.x, w) for w in self.wide]) / len(self.wide)}
        for name, work in works.items():
            found[name] = micros(lambda work=work: [work(w) for w in self.weights]) / len(self.weights)
        return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default="1,64,4096")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    copy, tflops = ceilings.copy_tb_s(), ceilings.matmul_tflops()
    print(f"{torch.cuda.get_device_name()}: copy {copy:.2f} TB/s, bf16 product {tflops:.0f} TFLOP/s; microseconds")
    measured = []
    for rows in map(int, args.rows.split(",")):
        for name, (width, out) in SHAPES.items():
            case = Case(width, out, rows)
            figures = case.measure()
            floor = max(case.bytes / copy / 1e6, case.flops / (2 * tflops) / 1e6)
            measured.append({"rows": rows, "layer": name, "floor": floor, **figures})
            told = "  ".join(f"{what} {value:.1f}" for what, value in figures.items())
            print(f"M {rows:5d} {name:8s} floor {floor:.1f}  {told}", flush=True)
            del case
            torch.cuda.empty_cache()
    if args.output:
        ceilings.write_products(args.output, copy, tflops, measured)


if __name__ == "__main__":
    main()
