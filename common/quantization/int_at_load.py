"""Packed integer weights that are made of a checkpoint's weights while these are loaded."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch

from ...kernels.arguments import PackedInts
from ...kernels.reference import pack_ints, scale_words
from ..api.errors import ConfigError
from ..weights.slots import Allocate, Slot
from .packed_int_linear import PackedIntLinear, allocate_ints
from .shards import Shard


def int_linear_at_load(shards: Sequence[Shard], width: int, bits: int, group: int,
                       allocate: Allocate) -> PackedIntLinear:
    """Returns the linear method of a packed weight whose slots take weights that are not quantized. ``group`` inputs of
    the rank's own share a scale and a zero; with -1 all share a scale. Raises ConfigError for inputs that do not fill
    whole groups."""
    if group != -1 and width % group:
        raise ConfigError(f"{shards[0].name} has {width} inputs on each rank, and its weights are quantized in groups "
                          f"of {group}: choose another --tp-size, or --quantization fp8.")
    weight = allocate_ints(shards, width, bits, width if group == -1 else group, allocate)

    def slots() -> Iterator[Slot]:
        for shard in shards:
            yield Slot(f"{shard.name}.weight", shard.rows_of(weight.values), shard.shape, shard.dim, shard.start,
                       load=_quantize_into(weight, shard, group == -1), size=width if shard.dim == 1 else shard.size)

    return PackedIntLinear(weight, allocate.dtype, slots)


def _quantize_into(weight: PackedInts, shard: Shard, symmetric: bool) -> Callable[[torch.Tensor], None]:
    rows, largest = slice(shard.offset, shard.offset + shard.size), (1 << weight.bits) - 1

    def load(part: torch.Tensor) -> None:
        wide = part.to(weight.values.device).float().unflatten(1, (-1, weight.group))
        if symmetric:
            zero = wide.new_tensor(1 << (weight.bits - 1))
            scale = wide.abs().amax(-1, keepdim=True).clamp(min=1e-9) / (zero - 1)
        else:
            low, high = wide.amin(-1, keepdim=True).clamp(max=0), wide.amax(-1, keepdim=True).clamp(min=0)
            scale = (high - low).clamp(min=1e-9) / largest
            zero = (-low / scale).round()
        values = ((wide / scale).round() + zero).clamp(0, largest).to(torch.uint8)
        weight.scales[:, rows].copy_(scale_words(scale[..., 0].t(), zero.expand_as(scale)[..., 0].t()))
        weight.values[rows].copy_(pack_ints(values.flatten(1), weight.bits, weight.group))

    return load
