"""Linear methods: how a linear layer's weight is stored and multiplied, one class a quantization format."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import torch

from ...kernels.arguments import Float8Format, Float8Rows
from ...kernels.gemm.dense_matmul import compile_tiles, dense_matmul, fuses_residual
from ...kernels.rowwise.silu_and_mul import silu_and_mul
from ..api.errors import ConfigError
from ..config.quantization import QuantFormat
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


def linear_method(shards: Sequence[Shard], width: int, allocate: Allocate) -> LinearMethod:
    """Creates the method of a weight ``[sum of the shards' sizes, width]``; raises ConfigError where its format does
    not allow such shards."""
    quantization = format_of(shards, allocate)
    if quantization is None:
        return Unquantized(shards, width, allocate)
    return quantization.linear(shards, width, allocate)


def format_of(shards: Sequence[Shard], allocate: Allocate) -> QuantFormat | None:
    """Returns the format of the weight of these shards, None where it is not quantized; raises ConfigError where they
    are in several."""
    quantization = allocate.quantization
    quantized = [shard.name for shard in shards if quantization is not None and quantization.quantizes(shard.name)]
    if quantized and len(quantized) < len(shards):
        others = [shard.name for shard in shards if shard.name not in quantized]
        raise ConfigError(f"The checkpoint quantizes {quantized[0]} and not {others[0]}, which are computed together: "
                          "use a checkpoint that treats them alike.")
    return quantization if quantized else None
