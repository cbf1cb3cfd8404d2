"""Float8 weights with a scale a block of outputs x inputs (DeepSeek-V3's form), activations with one a group."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch

from ...kernels.arguments import Float8Format, Float8Rows
from ...kernels.float8.fp8_block_matmul import block_matmul, compile_tiles
from ...kernels.rowwise.fp8_quantize import quantize
from ..api.errors import ConfigError
from ..config.quantization import QuantizationScheme
from ..weights.slots import Allocate, Slot
from .float8 import FLOAT8, dequantize_blocks, quantize_blocks
from .shards import Shard


class Fp8Block:
    """``scale`` is ``[ceil(out / block), ceil(in / block)]``; every shard begins with a block of its own."""

    def __init__(self, shards: Sequence[Shard], width: int, scheme: QuantizationScheme, allocate: Allocate):
        self.shards = shards
        self.scheme = scheme
        self._dtype = allocate.own
        self._form = Float8Format(scheme.block[1])
        out = sum(shard.size for shard in shards)
        for shard in shards:
            check_cut(shard, width, scheme.block, last=shard is shards[-1])
        if allocate.device.type == "cuda":
            if width % 16:
                raise ConfigError(f"{shards[0].name} has {width} inputs on each rank, and products of float8 blocks "
                                  "take multiples of 16: choose another --tp-size.")
            compile_tiles(out, width, scheme.block[0], allocate.own, allocate.device)
        self.weight = allocate(out, width, dtype=FLOAT8)
        self.scale = allocate(_blocks(out, scheme.block[0]), _blocks(width, scheme.block[1]), dtype=torch.float32)

    def form(self, rows: int) -> Float8Format | None:
        return self._form

    def __call__(self, x: torch.Tensor | Float8Rows, bias: torch.Tensor | None = None, *,
                 gated: bool = False) -> torch.Tensor:
        given = x if isinstance(x, Float8Rows) else quantize(x, self._form, gated=gated)
        y = block_matmul(given.values, given.scale, self.weight, self.scale, self.scheme.block, given.dtype)
        return y if bias is None else y.add_(bias)

    def dense(self) -> torch.Tensor:
        return dequantize_blocks(self.weight, self.scale, self.scheme.block).to(self._dtype)

    def slots(self) -> Iterator[Slot]:
        tall, wide = self.scheme.block
        for shard in self.shards:
            slot = shard.slot(self.weight)
            first = shard.first // tall
            scale = self.scale[first:first + _blocks(shard.size, tall)]
            if not self.scheme.stored:
                yield Slot(slot.name, slot.target, slot.shape, slot.dim, slot.start,
                           take=self._quantizing(slot.target, scale))
                continue
            yield Slot(slot.name, slot.target, slot.shape, slot.dim, slot.start, "float8")
            yield Slot(f"{shard.name}.{self.scheme.weight_scale}", scale, scale_shape(shard.shape, self.scheme.block),
                       shard.dim, shard.start // self.scheme.block[shard.dim], "weight scale")

    def _quantizing(self, target: torch.Tensor, scale: torch.Tensor) -> Callable[[torch.Tensor], None]:
        def take(part: torch.Tensor) -> None:
            q, found = quantize_blocks(part.to(target.device), self.scheme.block)
            target.copy_(q)
            scale.copy_(found)

        return take


def scale_shape(shape: tuple[int, int], block: tuple[int, int]) -> tuple[int, int]:
    """Of the scales of a whole projection."""
    return _blocks(shape[0], block[0]), _blocks(shape[1], block[1])


def check_cut(shard: Shard, width: int, block: tuple[int, int], *, last: bool) -> None:
    """Raises ConfigError where a rank's part of a projection, or the next one fused with it, cuts a block in two."""
    size, name = (shard.size, "outputs") if shard.dim == 0 else (width, "inputs")
    full, step = shard.shape[shard.dim], block[shard.dim]
    ends_within = size % step and shard.start + size != full
    if shard.start % step or ends_within:
        raise ConfigError(f"{shard.name} is quantized in blocks of {block[0]} x {block[1]}, which a rank's share of "
                          f"{size} of its {full} {name} does not fill: choose another --tp-size, by which each rank's "
                          f"share is a multiple of {step}.")
    if shard.size % block[0] and not last:
        raise ConfigError(f"{shard.name} is quantized in blocks of {block[0]} x {block[1]}, and its {shard.size} "
                          f"outputs are no multiple of {block[0]}: use --quantization fp8 with a checkpoint that is "
                          "not quantized, which needs no blocks.")


def _blocks(size: int, block: int) -> int:
    return -(-size // block)
