"""Tensor-parallel linear layers: split by output column, then by input row, with one all-reduce a pair."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from ...kernels.arguments import Float8Format, Float8Rows
from ..distributed.deferred_reduce import DeferredSum, MaybeDeferred
from ..distributed.tp import TPGroup
from ..quantization.methods import GatedForward, linear_method
from ..quantization.shards import Shard
from ..weights.slots import Allocate, Slot

Rows = torch.Tensor | Float8Rows
"""A layer's input: in the engine's type, or quantized by the norm before it."""


@dataclass(frozen=True)
class Columns:
    """This rank's outputs ``[start, start + size)`` of the checkpoint's projection ``name`` with ``full`` outputs."""

    name: str
    full: int
    start: int
    size: int

    @staticmethod
    def shard(name: str, full: int, tp: TPGroup) -> Columns:
        size = full // tp.size
        return Columns(name, full, tp.rank * size, size)

    @staticmethod
    def whole(name: str, full: int) -> Columns:
        """All outputs, on every rank."""
        return Columns(name, full, 0, full)

    @staticmethod
    def kv_shard(name: str, num_heads: int, head_dim: int, tp: TPGroup) -> Columns:
        """KV heads are split evenly; with more ranks than heads, neighbouring ranks replicate the same head."""
        size = max(1, num_heads // tp.size)
        return Columns(name, num_heads * head_dim, tp.rank * num_heads // tp.size * head_dim, size * head_dim)


class ColumnLinear:
    """Projections of one input, fused into one GEMM: ``[T, in] -> [T, sum of this rank's sizes]``."""

    def __init__(self, in_features: int, parts: list[Columns], bias: bool, allocate: Allocate):
        self.parts = parts
        self.sizes = [part.size for part in parts]
        offsets = [sum(self.sizes[:index]) for index in range(len(parts))]
        self.method = linear_method(
            [Shard(part.name, offset, part.size, (part.full, in_features), 0, part.start)
             for part, offset in zip(parts, offsets)], in_features, allocate)
        self.bias = allocate(sum(self.sizes)) if bias else None
        self._forward_gated: GatedForward | None = None

    def activation_format(self, rows: int) -> Float8Format | None:
        return self.method.activation_format(rows)

    def __call__(self, x: Rows) -> torch.Tensor:
        return self.method(x, self.bias)

    def enable_fused_activation(self) -> bool:
        """Compiles the GEMM with fused activation, and returns whether there is one. Without it the layer that follows
        activates."""
        self._forward_gated = self.method.fused_activation()
        return self._forward_gated is not None

    def forward_gated(self, x: Rows) -> torch.Tensor:
        """Returns ``silu_and_mul`` ``[T, size]`` of the gate and up projections of ``x``, which are of one size."""
        assert self._forward_gated is not None
        return self._forward_gated(x, self.bias)

    def slots(self) -> Iterator[Slot]:
        yield from self.method.slots()
        biases = self.bias.split(self.sizes) if self.bias is not None else ()
        for part, bias in zip(self.parts, biases):
            yield Slot(f"{part.name}.bias", bias, (part.full,), 0, part.start)


class RowLinear:
    """``[T, in / size] -> [T, out]``, summed over the ranks, the bias once."""

    def __init__(self, name: str, in_features: int, out_features: int, bias: bool, tp: TPGroup, allocate: Allocate):
        self.name = name
        self.tp = tp
        local = in_features // tp.size
        shard = Shard(name, 0, out_features, (out_features, in_features), 1, tp.rank * local)
        self.method = linear_method([shard], local, allocate)
        self.bias = allocate(out_features) if bias else None

    def __call__(self, x: torch.Tensor, *, gated: bool = False) -> torch.Tensor:
        """Projects ``x`` [T, in / size]; with ``gated``, ``silu_and_mul(x)`` of ``x`` [T, 2 * in / size]."""
        if self.tp.size == 1:
            return self.method(x, self.bias, gated=gated)
        y = self.tp.all_reduce(self.partial(x, gated=gated))
        return y if self.bias is None else y + self.bias

    def forward_deferred(self, x: torch.Tensor, *, gated: bool = False) -> MaybeDeferred:
        """Projects ``x``, with the sum over ranks, or with the residual, deferred to the norm that follows."""
        if self.tp.size == 1:
            deferred = self.method.deferred(x) if self.bias is None and not gated else None
            return self(x, gated=gated) if deferred is None else deferred
        return DeferredSum(self.method(x, self.bias if self.tp.rank == 0 else None, gated=gated), self.tp)

    def partial(self, x: torch.Tensor, *, gated: bool = False) -> torch.Tensor:
        """Returns this rank's summand, without the bias: for callers that add more before the ranks are summed."""
        return self.method(x, gated=gated)

    def slots(self) -> Iterator[Slot]:
        yield from self.method.slots()
        if self.bias is not None:
            yield Slot(f"{self.name}.bias", self.bias, tuple(self.bias.shape))
