"""A projection's dense weight, for code that multiplies by parts of it where a linear layer multiplies by the whole."""

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
    """This rank's outputs ``weight`` [out, in] in the engine's type, at a fixed address. A quantized weight is also
    stored in the checkpoint's format, and dequantized again whenever a part of it is loaded."""

    def __init__(self, part: Columns, in_features: int, allocate: Allocate):
        shard = Shard(part.name, 0, part.size, (part.full, in_features), 0, part.start)
        self._method = linear_method([shard], in_features, allocate)
        stored = [slot.target for slot in self._method.slots()]
        self._quantized = allocate.quantization is not None and len(stored) > 0 and stored[0].dtype != allocate.dtype
        self.weight = allocate(part.size, in_features) if self._quantized else self._method.dequantize()

    def slots(self) -> Iterator[Slot]:
        for slot in self._method.slots():
            yield dataclasses.replace(slot, load=self._refreshing(slot)) if self._quantized else slot

    def _refreshing(self, slot: Slot) -> Callable[[torch.Tensor], None]:
        def load(part: Any) -> None:
            if slot.load is None:
                slot.target.copy_(part)
            else:
                slot.load(part)
            self.weight.copy_(self._method.dequantize())

        return load
