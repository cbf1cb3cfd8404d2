"""Time of products with weights in 4 and 8 bits over Llama-3-8B's linear layers, beside bfloat16's and what the machine
can do at most.

    python -m baton.tests.bench.packed_int_gemm [--rows 1,16,64,4096] [--bits 4,8] [--sweep] [--output figures.json]

``bf16``: what is chosen for an unquantized weight. ``packed``: what is chosen for a packed one, groups of 128 with
zeros. ``kernel``: our kernel in any case. ``library``: the weight dequantized into a buffer, then the library, in any
case. ``floor``: weight, scales, input and output at the rate of a copy of the same run, or the operations at the
rate of one large bfloat16 product, whichever takes longer. ``share``: the floor's part of ``packed``.
``--sweep`` times tiles and names the fastest. Products run as CUDA graphs, back to back over weights that together
exceed the caches.
"""

from __future__ import annotations

import argparse
import itertools
from pathlib import Path

import torch

from ...kernels.arguments import PackedInts
from ...kernels.gemm.dense_matmul import dense_matmul
from ...kernels.gemm.packed_int_matmul import dequantize_ints, packed_int_matmul
from ...kernels.reference import scale_words
from ...kernels.tuning.policy import policy_of
from ...kernels.tuning.split_tile import SplitTile
from . import ceilings
from .fp8_gemm import SHAPES
from .moe_shapes import micros

GROUP = 128
_CACHE_BYTES = 256 << 20  # several times an H200's 50 MiB


class Case:
    """Inputs of ``rows`` tokens and as many copies of the weight as exceed the caches."""

    def __init__(self, width: int, out: int, rows: int, bits: int):
        self.flops = 2 * rows * width * out
        each = width * out * bits // 8 + width // GROUP * out * 4
        self.bytes = each + 2 * rows * (width + out)
        self.x = torch.randn(rows, width, device="cuda").bfloat16()
        self.weights = [self._packed(width, out, bits) for _ in range(max(2, -(-_CACHE_BYTES // each)))]
        self.wide = [dequantize_ints(weight, torch.bfloat16) for weight in self.weights[:4]]

    @staticmethod
    def _packed(width: int, out: int, bits: int) -> PackedInts:
        return PackedInts(torch.randint(0, 256, (out, width * bits // 8), dtype=torch.uint8, device="cuda"),
                          scale_words(torch.rand(width // GROUP, out, device="cuda") * 0.01,
                                      torch.randint(0, 2**bits, (width // GROUP, out), device="cuda")), None, bits,
                          GROUP)

    def measure(self) -> dict[str, float]:
        (out, width), rows = self.wide[0].shape, len(self.x)
        tile = policy_of(self.x.device).packed_ints.tile(rows, out, width, GROUP, 2, bits=self.weights[0].bits)
        count = len(self.weights)
        return {"bf16": micros(lambda: [dense_matmul(self.x, w) for w in self.wide]) / len(self.wide),
                "packed": micros(lambda: [packed_int_matmul(self.x, w) for w in self.weights]) / count,
                "kernel": self.by(tile),
                "library": micros(lambda: [dense_matmul(self.x, dequantize_ints(w, torch.bfloat16))
                                           for w in self.weights]) / count}

    def by(self, tile: SplitTile) -> float:
        return micros(lambda: [packed_int_matmul(self.x, w, tile=tile) for w in self.weights]) / len(self.weights)

    def fastest(self) -> tuple[SplitTile, float]:
        """Tries tiles with the rows of the policy's."""
        (out, width), rows = self.wide[0].shape, len(self.x)
        own = policy_of(self.x.device).packed_ints.tile(rows, out, width, GROUP, 2, bits=self.weights[0].bits)
        found = {own: self.by(own)}
        for columns, splits, warps, stages in itertools.product((64, 128), (1, 2, 4, 8), (4, 8), (2, 3, 4, 6)):
            tile = SplitTile(own.rows, columns, GROUP, splits, warps, stages)
            try:
                found[tile] = self.by(tile)
            except Exception as error:  # more shared memory or registers than there are
                print("skipped", tile, type(error).__name__)
        best = min(found, key=lambda tile: found[tile])
        return best, found[best]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default="1,16,64,256,512,4096")
    parser.add_argument("--bits", default="4,8")
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    copy, tflops = ceilings.copy_tb_s(), ceilings.matmul_tflops()
    print(f"{torch.cuda.get_device_name()}: copy {copy:.2f} TB/s, bf16 product {tflops:.0f} TFLOP/s; microseconds")
    measured = []
    for bits, (name, (width, out)), rows in itertools.product(map(int, args.bits.split(",")), SHAPES.items(),
                                                              map(int, args.rows.split(","))):
        case = Case(width, out, rows, bits)
        figures = case.measure()
        figures["floor"] = max(case.bytes / copy / 1e6, case.flops / tflops / 1e6)
        figures["share"] = figures["floor"] / figures["packed"]
        told = "  ".join(f"{what} {value:.2f}" for what, value in figures.items())
        print(f"{bits} bits M {rows:5d} {name:8s} {told}", flush=True)
        if args.sweep:
            print("   fastest", *case.fastest(), flush=True)
        measured.append({"bits": bits, "rows": rows, "layer": name, **figures})
        del case
        torch.cuda.empty_cache()
    if args.output:
        ceilings.write_products(args.output, copy, tflops, measured)


if __name__ == "__main__":
    main()
