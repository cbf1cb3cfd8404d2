"""Linear methods: how a linear layer's weight is stored and multiplied, one class a quantization format."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

import torch

from ...kernels.arguments import Float8Format, Float8Rows
from ...kernels.float8.fp8_matmul import GROUP
from ...kernels.gemm.dense_matmul import compile_tiles, dense_matmul, fuses_residual
from ...kernels.rowwise.silu_and_mul import silu_and_mul
from ..api.errors import ConfigError
from ..config.quantization import QuantizationScheme
from ..weights.slots import Allocate, Slot
from .fp8_block import Fp8Block
from .fp8_per_channel import Fp8PerChannel
from .shards import Shard


class LinearMethod(Protocol):
    """The weight of a linear layer, in one quantization format."""

    def activation_format(self, rows: int) -> Float8Format | None:
        """Returns the format in which a norm before it may pass ``rows`` rows; None: the engine's type only."""

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

    def __call__(self, x: torch.Tensor | Float8Rows, bias: torch.Tensor | None = None, *,
                 gated: bool = False) -> torch.Tensor:
        assert isinstance(x, torch.Tensor)
        return dense_matmul(silu_and_mul(x) if gated else x, self.weight, bias)

    def forward_gated(self, x: torch.Tensor | Float8Rows, bias: torch.Tensor | None = None) -> torch.Tensor:
        """Returns ``silu_and_mul`` of the product; the first half of the weight are gates, the second half ups."""
        assert isinstance(x, torch.Tensor)
        return dense_matmul(x, self.weight, bias, gated=True)

    def prefers_residual(self, x: torch.Tensor) -> bool:
        """Returns whether a GEMM that adds to the residual is faster, see kernels/gemm/dense_matmul.py."""
        return fuses_residual(x, self.weight)

    def compile_gated(self) -> None:
        """Compiles ``forward_gated``, so that no request waits for it."""
        if self.weight.is_cuda:
            compile_tiles(self.weight, gated=True)

    def dequantize(self) -> torch.Tensor:
        return self.weight

    def slots(self) -> Iterator[Slot]:
        for shard in self.shards:
            yield shard.slot(self.weight)


def linear_method(shards: Sequence[Shard], width: int, allocate: Allocate) -> LinearMethod:
    """Creates the method of a weight ``[sum of the shards' sizes, width]``; raises ConfigError where
    ``allocate.scheme`` does not allow such shards."""
    scheme = allocate.scheme
    if scheme is None or not _quantizes(scheme, shards):
        return Unquantized(shards, width, allocate)
    if scheme.weights == "block":
        return Fp8Block(shards, width, scheme, allocate)
    return Fp8PerChannel(shards, width, scheme, allocate)


def check_device(scheme: QuantizationScheme | None, dtype: str, device: torch.device) -> None:
    """Raises ConfigError where a GPU cannot compute with ``scheme`` in ``dtype``. A CPU emulates every scheme."""
    if scheme is None or device.type != "cuda":
        return
    check_float8(device, "a checkpoint in bfloat16")
    if dtype != "bfloat16":
        raise ConfigError(f"Float8 weights are served with --dtype bfloat16 on a GPU, not {dtype}.")
    if scheme.weights == "block" and scheme.block[1] != GROUP:
        raise ConfigError(f"Blocks of {scheme.block[0]} x {scheme.block[1]} are not supported on a GPU: use a "
                          f"checkpoint whose weight_block_size is [{GROUP}, {GROUP}].")


def check_float8(device: torch.device, instead: str) -> None:
    """Raises ConfigError for a GPU without float8 tensor cores; ``instead`` names the alternative."""
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 9):
        raise ConfigError(f"{torch.cuda.get_device_name(device)} does not compute in float8: use a GPU of compute "
                          f"capability 8.9 or more, or {instead}.")


def _quantizes(scheme: QuantizationScheme, shards: Sequence[Shard]) -> bool:
    quantized = [shard.name for shard in shards if scheme.quantizes(shard.name)]
    if quantized and len(quantized) < len(shards):
        others = [shard.name for shard in shards if shard.name not in quantized]
        raise ConfigError(f"The checkpoint quantizes {quantized[0]} and not {others[0]}, which are computed together: "
                          "use a checkpoint that treats them alike.")
    return bool(quantized)
