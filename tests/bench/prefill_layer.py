"""Products, norms and activation of a layer in prefill, back to back until the power limit acts, one way beside others.

    python -m baton.tests.bench.prefill_layer [--rows 8192] [--seconds 1.0] [--rounds 3] [--ways plain,gated 192,...]

Llama-3-8B's sizes in bfloat16; attention is left out. Each way runs for ``--seconds`` in each round, the first 0.3 of
which do not count. A product that is timed alone, on a card that has rested, runs at clocks that a step of prefill does
not see.

Ways: ``plain`` is cuBLAS and the activation as a kernel; ``onto`` adds residuals in the products; ``gated ROWS BAND``
makes the activation in the product of gates and ups; ``all ROWS BAND`` makes other products by warp groups. With +
between them they go together: ``gated+onto 192``.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch.nn.functional import linear

from ...kernels.rowwise.rmsnorm import rmsnorm
from ...kernels.rowwise.silu_and_mul import silu_and_mul
from ...kernels.tuning.gemm import WarpSpecializedTile
from . import ceilings
from .host_profile import Clocks

HIDDEN, QKV, BETWEEN, LAYERS = 4096, 6144, 14336, 4


class Layer:
    def __init__(self, generator: torch.Generator):
        def random(*shape: int) -> torch.Tensor:
            return (torch.randn(shape, generator=generator, device="cuda") * shape[1]**-0.5).bfloat16()

        self.qkv, self.o = random(QKV, HIDDEN), random(HIDDEN, HIDDEN)
        self.gate_up, self.down = random(2 * BETWEEN, HIDDEN), random(HIDDEN, BETWEEN)
        self.norm = torch.ones(HIDDEN, device="cuda", dtype=torch.bfloat16)


Step = Callable[[Layer, torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
"""A layer's ``(what it adds, residual)`` of the last one's."""


def way(words: str) -> Step:
    named, *numbers = words.split()
    rows, band = (int(number) for number in (*numbers, *("192", "16")[len(numbers):]))
    flags = named.split("+")

    def warp_specialized(x: torch.Tensor, weight: torch.Tensor, gated: bool = False) -> torch.Tensor:
        from ...kernels.gemm.dense_warp_specialized import warp_specialized_matmul  # not there without Triton
        return warp_specialized_matmul(x, weight, WarpSpecializedTile(rows, 3 if rows == 192 else 4, band), gated=gated)

    other = warp_specialized if "all" in flags else linear

    def step(layer: Layer, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        onto = "onto" in flags
        if onto:
            normed = rmsnorm(residual, layer.norm, 1e-5)[0]
        else:
            normed, residual = rmsnorm(x, layer.norm, 1e-5, residual)
        heads = other(normed, layer.qkv)[:, :HIDDEN].contiguous()
        if onto:
            torch.addmm(residual, heads, layer.o.T, out=residual)
            normed = rmsnorm(residual, layer.norm, 1e-5)[0]
        else:
            normed, residual = rmsnorm(other(heads, layer.o), layer.norm, 1e-5, residual)
        if "gated" in flags:
            between = warp_specialized(normed, layer.gate_up, True)
        else:
            between = silu_and_mul(linear(normed, layer.gate_up))
        if onto:
            torch.addmm(residual, between, layer.down.T, out=residual)
            return x, residual
        return other(between, layer.down), residual

    return step


def run(step: Step, layers: list[Layer], x: torch.Tensor, seconds: float) -> tuple[float, float, float]:
    """Microseconds a layer, and from when to when these were counted."""
    count, begin, counted = 0, time.perf_counter(), None
    while time.perf_counter() - begin < seconds or counted is None:
        made, residual = x, x.clone()
        for index in range(16):
            made, residual = step(layers[index % len(layers)], made, residual)
        torch.cuda.synchronize()
        count += 16
        if counted is None and time.perf_counter() - begin > 0.3:
            count, counted = 0, time.perf_counter()
    end = time.perf_counter()
    return 1e6 * (end - counted) / max(count, 1), counted, end


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=8192)
    parser.add_argument("--seconds", type=float, default=1.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--ways", default="plain,onto,gated 192,gated+onto 192")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    generator = torch.Generator("cuda").manual_seed(0)
    layers = [Layer(generator) for _ in range(LAYERS)]
    x = torch.randn(args.rows, HIDDEN, generator=generator, device="cuda").bfloat16()
    ways = {words: way(words) for words in args.ways.split(",")}
    clocks = Clocks()
    took: dict[str, list[float]] = {words: [] for words in ways}
    for step in ways.values():
        step(layers[0], x, x.clone())
    for round_ in range(args.rounds):
        for words, step in ways.items():
            micros, begin, end = run(step, layers, x, args.seconds)
            took[words].append(micros)
            print(f"  round {round_}, {words}: {micros:.0f} us a layer; {clocks.between(begin, end)}", flush=True)
    clocks.close()
    ceiling = {"copy_tb_s": ceilings.copy_tb_s(), "bf16_matmul_tflops": ceilings.matmul_tflops()}
    first = statistics.median(next(iter(took.values())))
    print(f"{args.rows} rows, {ceiling}")
    for words, each in took.items():
        print(f"{words:20} {statistics.median(each):7.0f} us a layer ({statistics.median(each) / first - 1:+.2%}), "
              f"{' '.join(f'{micros:.0f}' for micros in each)}")
    if args.out:
        args.out.write_text(json.dumps({"rows": args.rows, "ceiling": ceiling, "us": took}, indent=1))


if __name__ == "__main__":
    main()
