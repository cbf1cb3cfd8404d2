"""A projection's weight for code that multiplies by parts of it, where a linear layer multiplies by the whole."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch

from ..quantization.methods import linear_method
from ..quantization.shards import Shard
from ..weights.slots import Allocate, Slot
from .linear import Columns


class DenseWeight:
    """``weight`` [out, in], this rank's outputs, in the engine's type at one address. A quantized one is kept beside
    it as the checkpoint has it, and made dense again whenever a part of that is loaded."""

    def __init__(self, part: Columns, in_features: int, allocate: Allocate):
        shard = Shard(part.name, 0, part.size, (part.full, in_features), 0, part.start)
        self._method = linear_method([shard], in_features, allocate)
        held = [slot.target for slot in self._method.slots()]
        self._quantized = allocate.scheme is not None and len(held) > 0 and held[0].dtype != allocate.own
        self.weight = allocate(part.size, in_features) if self._quantized else self._method.dense()

    def slots(self) -> Iterator[Slot]:
        for slot in self._method.slots():
            yield dataclasses.replace(slot, take=self._refreshing(slot)) if self._quantized else slot

    def _refreshing(self, slot: Slot) -> Callable[[torch.Tensor], None]:
        def take(part: Any) -> None:
            if slot.take is None:
                slot.target.copy_(part)
            else:
                slot.take(part)
            self.weight.copy_(self._method.dense())

        return take
