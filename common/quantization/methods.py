"""Linear methods: how a linear layer's weight is stored and multiplied, one class a quantization format."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Protocol

import torch

from ...kernels.arguments import Float8Format, Float8Rows
from ...kernels.gemm.dense_matmul import compile_tiles, dense_matmul, fuses_residual
from ...kernels.rowwise.silu_and_mul import silu_and_mul
from ..api.errors import ConfigError
from ..config.quantization import LayerFormat
from ..distributed.deferred_reduce import DeferredProduct
from ..weights.slots import Allocate, Slot
from .shards import Shard

GatedForward = Callable[["torch.Tensor | Float8Rows", "torch.Tensor | None"], torch.Tensor]
"""``forward(x, bias)`` returns ``silu_and_mul`` of the product; the first half of the weight are gates, the second half
ups."""


class LinearMethod(Protocol):
    """The weight of a linear layer, in one quantization format."""

    def activation_format(self, rows: int) -> Float8Format | None:
        """Returns the format in which a norm before it may pass ``rows`` rows; None: the engine's type only."""

    def fused_activation(self) -> GatedForward | None:
        """Compiles and returns the product with fused activation, so that no request waits for it; None: there is
        none, and the layer that follows activates."""

    def deferred(self, x: torch.Tensor) -> DeferredProduct | None:
        """Returns the product deferred to the norm that follows, where a GEMM that adds to the residual is faster;
        else None."""

    def __call__(self, x: torch.Tensor | Float8Rows, bias: torch.Tensor | None = None, *,
                 gated: bool = False) -> torch.Tensor:
        """Multiplies ``x`` [T, in] by this rank's weight; returns ``[T, out]`` in the type of ``x``. With ``gated``,
        multiplies ``silu_and_mul(x)`` of ``x`` [T, 2 * in]. Float8 rows are in ``activation_format``."""

    def dequantize(self) -> torch.Tensor:
        """Returns the weight ``[out, in]`` in the engine's type: itself, or dequantized."""

    def slots(self) -> Iterator[Slot]: ...


class SeparateProduct:
    """Base of linear methods whose product is one step for itself: it takes rows in the engine's type, the layer that
    follows activates, and the norm that follows adds the residual."""

    def activation_format(self, rows: int) -> None:
        """Returns None: rows are in the engine's type."""

    def fused_activation(self) -> None:
        """Returns None: no kernel activates the product."""

    def deferred(self, x: torch.Tensor) -> None:
        """Returns None: no kernel adds the product to the residual."""


class Unquantized:
    """An unquantized weight, in the engine's type."""

    def __init__(self, shards: Sequence[Shard], width: int, allocate: Allocate):
        self.shards = shards
        self.weight = allocate(sum(shard.size for shard in shards), width)
        if allocate.device.type == "cuda":
            compile_tiles(self.weight)

    def activation_format(self, rows: int) -> Float8Format | None:
        return None

    def fused_activation(self) -> GatedForward:
        if self.weight.is_cuda:
            compile_tiles(self.weight, gated=True)
        return self._forward_gated

    def deferred(self, x: torch.Tensor) -> DeferredProduct | None:
        return DeferredProduct(x, self.weight) if fuses_residual(x, self.weight) else None

    def _forward_gated(self, x: torch.Tensor | Float8Rows, bias: torch.Tensor | None) -> torch.Tensor:
        assert isinstance(x, torch.Tensor)
        return dense_matmul(x, self.weight, bias, gated=True)

    def __call__(self, x: torch.Tensor | Float8Rows, bias: torch.Tensor | None = None, *,
                 gated: bool = False) -> torch.Tensor:
        assert isinstance(x, torch.Tensor)
        return dense_matmul(silu_and_mul(x) if gated else x, self.weight, bias)

    def dequantize(self) -> torch.Tensor:
        return self.weight

    def slots(self) -> Iterator[Slot]:
        for shard in self.shards:
            yield shard.slot(self.weight)


class Joined(SeparateProduct):
    """Consecutive parts of a weight in several formats, multiplied one after the other: projections of one input of
    which a checkpoint quantizes some, or each in another way."""

    def __init__(self, parts: Sequence[LinearMethod], sizes: Sequence[int]):
        """``sizes`` are the parts' outputs."""
        self.parts, self.sizes = parts, list(sizes)

    def __call__(self, x: torch.Tensor | Float8Rows, bias: torch.Tensor | None = None, *,
                 gated: bool = False) -> torch.Tensor:
        biases = [None] * len(self.parts) if bias is None else bias.split(self.sizes)
        return torch.cat([part(x, own, gated=gated) for part, own in zip(self.parts, biases)], -1)

    def dequantize(self) -> torch.Tensor:
        return torch.cat([part.dequantize() for part in self.parts])

    def slots(self) -> Iterator[Slot]:
        for part in self.parts:
            yield from part.slots()


def linear_method(shards: Sequence[Shard], width: int, allocate: Allocate) -> LinearMethod:
    """Creates the method of a weight ``[sum of the shards' sizes, width]``; raises ConfigError where its format does
    not allow such shards."""
    runs = [(layer, [*run]) for layer, run in groupby(shards, lambda shard: _format_of(shard, allocate))]
    made = [_method_of(layer, alone(run), width, allocate) for layer, run in runs]
    return made[0] if len(made) == 1 else Joined(made, [sum(shard.size for shard in run) for _, run in runs])


def alone(shards: Sequence[Shard]) -> list[Shard]:
    """Returns consecutive shards as those of a weight of their own."""
    return [replace(shard, offset=shard.offset - shards[0].offset) for shard in shards]


def _method_of(layer: LayerFormat | None, shards: Sequence[Shard], width: int, allocate: Allocate) -> LinearMethod:
    return Unquantized(shards, width, allocate) if layer is None else layer.linear(shards, width, allocate)


def _format_of(shard: Shard, allocate: Allocate) -> LayerFormat | None:
    return None if allocate.quantization is None else allocate.quantization.for_layer(shard.name)


def format_of(shards: Sequence[Shard], allocate: Allocate) -> LayerFormat | None:
    """Returns the one format of all of these shards, None where they are not quantized; raises ConfigError where they
    are in several, which grouped products do not compute."""
    layers = {_format_of(shard, allocate): shard.name for shard in reversed(shards)}
    if len(layers) > 1:
        one, other, *_ = layers.values()
        raise ConfigError(f"The checkpoint quantizes {one} otherwise than {other}, which are computed together: use a "
                          "checkpoint that treats them alike.")
    return next(iter(layers))
