"""The kernels between a decode step's products: microseconds a call, one after the other in a CUDA graph.

    python -m baton.tests.bench.small_kernels [--batches 1,8,64,256] [--context 2048] [--shape llama|qwen]
                                             [--only WORDS] [--out FILE]

Each kernel by itself, then a layer's of them in order, then whole layers with cuBLAS's products between them; with
programmatic dependent launch and without. ``floor`` is what the copy ceiling allows for the layer's weights and keys.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from torch.nn.functional import linear

from ...kernels import _triton
from ...kernels.arguments import HeadNorms
from ...kernels.attention.current_kv import CurrentKV
from ...kernels.attention.decode_plan import DecodePlan, plan_decode
from ...kernels.attention.paged_decode import paged_decode
from ...kernels.attention.rope_and_store import rope_and_store
from ...kernels.device import num_sms
from ...kernels.rowwise.rmsnorm import rmsnorm
from ...kernels.rowwise.silu_and_mul import silu_and_mul
from ...kernels.rowwise.split_k_rmsnorm import split_k_rmsnorm
from ...kernels.sampling.argmax import argmax
from ...kernels.tuning.attention import DecodeTile
from ...kernels.tuning.policy import policy_of
from . import ceilings
from .device_time import run_seconds

PAGE, LAYERS = 16, 8
CALLS = 64


class Shape(NamedTuple):
    hidden: int
    heads: int
    kv_heads: int
    dim: int
    intermediate: int
    vocab: int
    norms: bool

    @property
    def layer_values(self) -> int:
        return self.hidden * ((2 * self.heads + 2 * self.kv_heads) * self.dim + 3 * self.intermediate)


SHAPES = {"llama": Shape(4096, 32, 8, 128, 14336, 128_256, False), "qwen": Shape(1024, 16, 8, 128, 3072, 151_936, True)}
_Steps = dict[str, Callable[[int], object]]


class Batch:
    """Tensors of a decode batch over ``LAYERS`` layers, and the kernels of layer ``i`` over them. ``times`` is told a
    product's name, rows and weight, ``gated`` those of gates beside ups; attention's ``tile`` and ``pieces`` are
    ``paged_decode``'s and ``plan_decode``'s."""

    times: Callable[[str, torch.Tensor, torch.Tensor], torch.Tensor] = staticmethod(lambda name, x, w: linear(x, w))
    gated: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = staticmethod(lambda x, w: silu_and_mul(linear(x, w)))
    tile: DecodeTile | None = None
    stores_current_kv = True  # whether attention turns and stores the rows, in place of a kernel before it

    def __init__(self, shape: Shape, rows: int, context: int, device: str = "cuda"):
        self.shape, self.rows = shape, rows
        self._device = torch.device(device)
        pages = rows * -(-context // PAGE)
        self.x, self.residual = self._random(rows, shape.hidden), self._random(rows, shape.hidden)
        self._fused = self._random(rows, (shape.heads + 2 * shape.kv_heads) * shape.dim)
        self._gate_up = self._random(rows, 2 * shape.intermediate)
        self.logits = self._random(rows, shape.vocab).float()
        self._pool = self._random(pages, LAYERS, 2, shape.kv_heads, PAGE, shape.dim)
        self._weight = self._random(shape.hidden)
        self._norms = HeadNorms(self._random(shape.dim), self._random(shape.dim), 1e-6) if shape.norms else None
        table = torch.randperm(pages, device=device)
        self._indices = table.to(torch.int32)
        self._indptr = torch.arange(0, pages + 1, pages // rows, dtype=torch.int32, device=device)
        self._last = torch.full((rows,), (context - 1) % PAGE + 1, dtype=torch.int32, device=device)
        self._pages = table[pages // rows - 1::pages // rows]
        self._offsets = self._last.long() - 1
        self._positions = torch.full((rows,), context - 1, device=device)
        self._cos_sin = torch.rand(context, shape.dim, device=device)
        self._context = context
        self.pieces = policy_of(torch.device("cuda", 0)).attention.decode_splits(
            shape.dim, 2, 2, rows * shape.kv_heads)._asdict()
        self._plan: DecodePlan | None = None
        self._products = [[self._random(out, wide) * 0.02 for out, wide in (
            (self._fused.shape[1], shape.hidden), (shape.hidden, shape.heads * shape.dim),
            (2 * shape.intermediate, shape.hidden), (shape.hidden, shape.intermediate))] for _ in range(LAYERS)]

    def _random(self, *size: int) -> torch.Tensor:
        dtype = torch.bfloat16 if self._device.type == "cuda" else torch.float16
        return torch.empty(size, dtype=dtype, device=self._device).normal_()

    def plan(self) -> None:
        """A step begins: its first layer makes the plan."""
        self._plan = None

    def _heads(self, fused: torch.Tensor) -> list[torch.Tensor]:
        shape = self.shape
        sizes = [shape.heads * shape.dim, shape.kv_heads * shape.dim, shape.kv_heads * shape.dim]
        return [part.unflatten(-1, (-1, shape.dim)) for part in fused.split(sizes, -1)]

    def _rope(self, layer: int, fused: torch.Tensor) -> torch.Tensor:
        q, k, v = self._heads(fused)
        rope_and_store(q, k, v, self._pool[:, layer, 0], self._pool[:, layer, 1], self._pages, self._offsets,
                       self._cos_sin, self._positions, norms=self._norms, inputs_ready=self._plan is not None)
        return q

    def _attend(self, layer: int, q: torch.Tensor, current_kv: CurrentKV | None = None) -> torch.Tensor:
        inputs_ready = self._plan is not None
        if self._plan is None:
            self._plan = plan_decode(self._indptr, self._last, PAGE, self.shape.kv_heads, num_sms(self._device),
                                     self._context, **self.pieces)
        return paged_decode(q, self._pool[:, layer, 0], self._pool[:, layer, 1], self._indptr, self._indices,
                            self._last, self.shape.dim**-0.5, self._plan, self.tile, inputs_ready=inputs_ready,
                            current_kv=current_kv)

    def _attended(self, layer: int, fused: torch.Tensor) -> torch.Tensor:
        if not self.stores_current_kv:
            return self._attend(layer, self._rope(layer, fused))
        q, k, v = self._heads(fused)
        return self._attend(layer, q, CurrentKV(k, v, self._cos_sin, self._positions, self._norms))

    def steps(self) -> _Steps:
        q = self._heads(self._fused)[0]
        return {
            "rmsnorm": lambda i: rmsnorm(self.x, self._weight, 1e-5),
            "rmsnorm, residual": lambda i: rmsnorm(self.x, self._weight, 1e-5, self.residual),
            "rope_and_store": lambda i: self._rope(i, self._fused),
            "paged_decode": lambda i: self._attend(i, q),
            "silu_and_mul": lambda i: silu_and_mul(self._gate_up),
            "argmax": lambda i: argmax(self.logits),
            "torch's argmax": lambda i: self.logits.argmax(-1),
            "a layer's small kernels": self.small,
            "a layer": self.layer,
        }

    def small(self, layer: int) -> None:
        _, total = rmsnorm(self.x, self._weight, 1e-5, self.residual)
        self._attended(layer, self._fused)
        rmsnorm(self.x, self._weight, 1e-5, total)
        silu_and_mul(self._gate_up)

    def _norm(self, x: torch.Tensor, residual: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        if x.dim() == 3:
            assert residual is not None
            return split_k_rmsnorm(x, self._weight, 1e-5, residual)
        return rmsnorm(x, self._weight, 1e-5, residual)

    def layer(self, layer: int) -> None:
        self.run(layer, self.x, self.residual)

    def run(self, layer: int, x: torch.Tensor, residual: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """Layer ``layer`` of hidden states [rows, hidden], or the pieces that add up to them, and their residual: the
        same of the next."""
        qkv, out, gate_up, down = self._products[layer]
        x, residual = self._norm(x, residual)
        attended = self._attended(layer, self.times("qkv", x, qkv))
        x, residual = self._norm(self.times("o", attended.flatten(1), out), residual)
        return self.times("down", self.gated(x, gate_up), down), residual


def seconds(batch: Batch, step: Callable[[int], object]) -> float:
    """Of one call, in a graph of ``CALLS``."""
    def chain() -> None:
        batch.plan()
        for i in range(CALLS):
            step(i % LAYERS)

    chain()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        chain()
    return statistics.median(run_seconds(graph.replay, 9)[2:]) / CALLS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", default="1,8,64,256")
    parser.add_argument("--context", type=int, default=2048)
    parser.add_argument("--only", default="", help="words of kernels, as layer,argmax")
    parser.add_argument("--shape", choices=SHAPES, default="llama")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    shape, copy = SHAPES[args.shape], ceilings.copy_tb_s()
    torch.cuda.empty_cache()
    print(f"copy ceiling {copy:.2f} TB/s; {args.shape}, context {args.context}")
    print("| kernel | batch | us | us without PDL | floor us |\n|---|---|---|---|---|")
    rows = []
    for size in map(int, args.batches.split(",")):
        batch = Batch(shape, size, args.context)
        keys = 4 * size * args.context * shape.kv_heads * shape.dim
        floors = {"paged_decode": keys, "a layer's small kernels": keys, "a layer": keys + 2 * shape.layer_values,
                  "argmax": 4 * batch.logits.numel(), "torch's argmax": 4 * batch.logits.numel()}
        for name, step in batch.steps().items():
            if args.only and not any(word in name for word in args.only.split(",")):
                continue
            found = {True: math.inf, False: math.inf}
            for allowed in (True, False, False, True):  # a clock that falls while this runs is told from a gain
                _triton.PDL_ALLOWED = allowed
                found[allowed] = min(found[allowed], seconds(batch, step) * 1e6)
            floor = floors.get(name, 0) / copy / 1e6
            rows.append({"kernel": name, "batch": size, "us": found[True], "us_without": found[False], "floor": floor})
            print(f"| {name} | {size} | {found[True]:.1f} | {found[False]:.1f} | {floor:.1f} |", flush=True)
        _triton.PDL_ALLOWED = True
        del batch
        torch.cuda.empty_cache()
    if args.out:
        args.out.write_text(json.dumps({"copy_tb_s": copy, "shape": args.shape, "context": args.context, "rows": rows},
                                       indent=1))


if __name__ == "__main__":
    main()
