"""Linear methods of bitsandbytes' weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch.nn.functional import linear

from ...kernels.arguments import Float8Rows
from ...kernels.nf4.dequantize_nf4 import BLOCK, dequantize_nf4, quantize_nf4
from ...kernels.rowwise.silu_and_mul import silu_and_mul
from ..api.errors import ConfigError
from ..weights.slots import PAIRS, Allocate, Slot, TensorKind
from .bitsandbytes import Kind
from .int8_linear import INT8_LARGEST, INT8_VALUES
from .methods import SeparateProduct
from .packed_int_linear import PackedIntLinear, allocate_ints
from .shards import Shard

ABSMAX = TensorKind("blocks' largest magnitudes", dummy_value=0.05)
SCB = TensorKind("outputs' largest magnitudes", dummy_value=0.06)


class BnbLinear(SeparateProduct):
    """A weight of 4 bits, which each product converts to the engine's type: ``packed`` [out, in / 2] as the checkpoint
    has it, ``absmax`` [out, in / 64] float32."""

    def __init__(self, shards: Sequence[Shard], width: int, kind: Kind, stored: bool, allocate: Allocate):
        self.shards, self._kind, self._stored, self._dtype = shards, kind, stored, allocate.dtype
        if width % BLOCK:
            raise ConfigError(f"{shards[0].name} is quantized in blocks of {BLOCK} values, and a rank's share of "
                              f"{width} of its {shards[0].shape[1]} inputs cuts one: choose another --tp-size.")
        out = sum(shard.size for shard in shards)
        self.packed = allocate(out, width // 2, dtype=torch.uint8)
        self.absmax = allocate(out, width // BLOCK, dtype=torch.float32)

    def __call__(self, x: torch.Tensor | Float8Rows, bias: torch.Tensor | None = None, *,
                 gated: bool = False) -> torch.Tensor:
        assert isinstance(x, torch.Tensor)
        return linear(silu_and_mul(x) if gated else x, dequantize_nf4(self.packed, self.absmax, self._kind, x.dtype),
                      bias)

    def dequantize(self) -> torch.Tensor:
        return dequantize_nf4(self.packed, self.absmax, self._kind, self._dtype)

    def slots(self) -> Iterator[Slot]:
        for shard in self.shards:
            packed, absmax, (out, width) = shard.rows_of(self.packed), shard.rows_of(self.absmax), shard.shape
            if not self._stored:
                yield Slot(f"{shard.name}.weight", packed, shard.shape, shard.dim, shard.start,
                           load=self._quantize_into(packed, absmax),
                           size=2 * packed.shape[1] if shard.dim == 1 else shard.size)
                continue
            for kind, target, per, of in (("weight", packed, 2, PAIRS), ("absmax", absmax, BLOCK, ABSMAX)):
                start = shard.start // per if shard.dim == 1 else shard.start
                yield Slot(f"{shard.name}.{kind}", target, (out, width // per), shard.dim, start, of)

    def _quantize_into(self, packed: torch.Tensor, absmax: torch.Tensor) -> Callable[[torch.Tensor], None]:
        def load(part: torch.Tensor) -> None:
            for target, made in zip((packed, absmax), quantize_nf4(part.to(packed.device))):
                target.copy_(made)

        return load


def bnb_int8_linear(shards: Sequence[Shard], width: int, allocate: Allocate) -> PackedIntLinear:
    """Returns the linear method of a packed integer weight whose slots take int8 weights and ``SCB``, the largest
    magnitude of each output."""
    weight = allocate_ints(shards, width, 8, width, allocate, zeros=False)

    def slots() -> Iterator[Slot]:
        for shard in shards:
            values, scales = shard.rows_of(weight.values), shard.rows_of(weight.scales[0])
            yield Slot(f"{shard.name}.weight", values, shard.shape, shard.dim, shard.start, INT8_VALUES,
                       _shift_into(values))
            yield Slot(f"{shard.name}.SCB", scales, shard.shape[:1], 0, shard.start if shard.dim == 0 else 0, SCB,
                       _scale_into(scales))

    return PackedIntLinear(weight, allocate.dtype, slots)


def _shift_into(target: torch.Tensor) -> Callable[[torch.Tensor], object]:
    return lambda part: target.copy_((part.to(torch.int16) + 128).to(torch.uint8))


def _scale_into(target: torch.Tensor) -> Callable[[torch.Tensor], object]:
    return lambda part: target.copy_(part.float() / INT8_LARGEST)
