"""Block-wise float8 (DeepSeek-V3's format): a weight scale for each block of outputs x inputs, an activation scale for
each token's group of values."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch

from ...kernels.arguments import Float8Format, Float8Rows
from ...kernels.float8.fp8_block_matmul import block_matmul, compile_tiles
from ...kernels.rowwise.fp8_quantize import quantize
from ..api.errors import ConfigError
from ..weights.slots import Allocate, Slot
from .float8 import FLOAT8, FLOAT8_VALUES, WEIGHT_SCALE, dequantize_blocks, quantize_blocks
from .fp8 import Fp8
from .shards import Shard


class Fp8Block:
    """Linear method of block-wise float8. ``scale`` is ``[ceil(out / block), ceil(in / block)]``; every shard begins
    with a block of its own."""

    def __init__(self, shards: Sequence[Shard], width: int, scheme: Fp8, allocate: Allocate):
        self.shards = shards
        self.scheme = scheme
        self._dtype = allocate.dtype
        self._activation_format = Float8Format(scheme.block[1])
        out = sum(shard.size for shard in shards)
        for shard in shards:
            check_blocks(shard, width, scheme.block, last=shard is shards[-1])
        if allocate.device.type == "cuda":
            if width % 16:
                raise ConfigError(f"{shards[0].name} has {width} inputs on each rank, and products of float8 blocks "
                                  "take multiples of 16: choose another --tp-size.")
            compile_tiles(out, width, scheme.block[0], allocate.dtype, allocate.device)
        self.weight = allocate(out, width, dtype=FLOAT8)
        self.scale = allocate(_blocks(out, scheme.block[0]), _blocks(width, scheme.block[1]), dtype=torch.float32)

    def activation_format(self, rows: int) -> Float8Format | None:
        return self._activation_format

    def fused_activation(self) -> None:
        """Returns None: the layer that follows activates, as it quantizes its input anyway."""

    def deferred(self, x: torch.Tensor) -> None:
        """Returns None: no kernel adds the product to the residual."""

    def __call__(self, x: torch.Tensor | Float8Rows, bias: torch.Tensor | None = None, *,
                 gated: bool = False) -> torch.Tensor:
        q = x if isinstance(x, Float8Rows) else quantize(x, self._activation_format, gated=gated)
        y = block_matmul(q.values, q.scale, self.weight, self.scale, self.scheme.block, q.dtype)
        return y if bias is None else y.add_(bias)

    def dequantize(self) -> torch.Tensor:
        return dequantize_blocks(self.weight, self.scale, self.scheme.block).to(self._dtype)

    def slots(self) -> Iterator[Slot]:
        tall, wide = self.scheme.block
        for shard in self.shards:
            slot = shard.slot(self.weight)
            first = shard.offset // tall
            scale = self.scale[first:first + _blocks(shard.size, tall)]
            if not self.scheme.stored:
                yield Slot(slot.name, slot.target, slot.shape, slot.dim, slot.start,
                           load=self._quantize_into(slot.target, scale))
                continue
            yield Slot(slot.name, slot.target, slot.shape, slot.dim, slot.start, FLOAT8_VALUES)
            yield Slot(f"{shard.name}.{self.scheme.weight_scale}", scale, scale_shape(shard.shape, self.scheme.block),
                       shard.dim, shard.start // self.scheme.block[shard.dim], WEIGHT_SCALE)

    def _quantize_into(self, target: torch.Tensor, scale: torch.Tensor) -> Callable[[torch.Tensor], None]:
        def load(part: torch.Tensor) -> None:
            q, block_scales = quantize_blocks(part.to(target.device), self.scheme.block)
            target.copy_(q)
            scale.copy_(block_scales)

        return load


def scale_shape(shape: tuple[int, int], block: tuple[int, int]) -> tuple[int, int]:
    """Returns the shape of the scales of a whole projection."""
    return _blocks(shape[0], block[0]), _blocks(shape[1], block[1])


def check_blocks(shard: Shard, width: int, block: tuple[int, int], *, last: bool) -> None:
    """Raises ConfigError where a rank's part of a projection, or the next one fused with it, splits a block."""
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
