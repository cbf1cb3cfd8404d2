"""Packed integer weights that are made of a checkpoint's weights while these are loaded."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import torch

from ...kernels.reference import pack_ints
from ..api.errors import ConfigError
from ..weights.slots import Allocate, Slot
from .packed_int_format import BLOCK, PackedIntFormat, StoredInts, StoredTensor
from .packed_int_linear import PackedIntLinear
from .shards import Shard

_NOT_STORED = StoredInts(StoredTensor("weight", True), StoredTensor("", True), StoredTensor("", True), "")


class IntAtLoad(PackedIntLinear):
    """A packed integer weight whose slots take weights that are not quantized."""

    def __init__(self, shards: Sequence[Shard], width: int, bits: int, group: int, allocate: Allocate):
        if width % max(group, BLOCK):
            raise ConfigError(f"{shards[0].name} has {width} inputs on each rank, and its weights are quantized in "
                              f"groups of {max(group, BLOCK)}: choose another --tp-size, or --quantization fp8.")
        # Groups are of the rank's own inputs.
        own = [replace(shard, shape=(shard.shape[0], width)) if shard.dim == 1 else shard for shard in shards]
        super().__init__([replace(shard, start=0) if shard.dim == 1 else shard for shard in own], width,
                         PackedIntFormat(bits, group, group == -1, _NOT_STORED), allocate)
        self._given = shards

    def slots(self) -> Iterator[Slot]:
        for shard in self._given:
            rows = slice(shard.offset, shard.offset + shard.size)
            yield Slot(f"{shard.name}.weight", self._values[rows], shard.shape, shard.dim, shard.start,
                       load=self._quantize_into(rows), size=self.weight.width if shard.dim == 1 else shard.size)

    def _quantize_into(self, rows: slice) -> Callable[[torch.Tensor], None]:
        def load(part: torch.Tensor) -> None:
            bits, group = self.scheme.bits, self.weight.group
            wide = part.to(self._values.device).float().unflatten(1, (-1, group))
            if self._zeros is None:
                zero = wide.new_tensor(1 << (bits - 1))
                scale = wide.abs().amax(-1, keepdim=True).clamp(min=1e-9) / (zero - 1)
            else:
                low, high = wide.amin(-1, keepdim=True).clamp(max=0), wide.amax(-1, keepdim=True).clamp(min=0)
                scale = (high - low).clamp(min=1e-9) / ((1 << bits) - 1)
                zero = (-low / scale).round()
                self._zeros[:, rows].copy_(zero[..., 0].t())
            values = ((wide / scale).round() + zero).clamp(0, (1 << bits) - 1).to(torch.uint8)
            self._scales[:, rows].copy_(scale[..., 0].t())
            self._values[rows].copy_(pack_ints(values.flatten(1), bits))

        return load
