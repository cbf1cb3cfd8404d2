"""A projection's dense weight, for code that multiplies by parts of it where a linear layer multiplies by the whole."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from ..quantization.methods import linear_method
from ..quantization.shards import Shard
from ..weights.slots import Allocate, Slot, finish_loading
from .linear import Columns


class DenseWeight:
    """This rank's outputs ``weight`` [out, in] in the engine's type, at a fixed address. A quantized weight is also
    stored in the checkpoint's format, and dequantized once it is loaded."""

    def __init__(self, part: Columns, in_features: int, allocate: Allocate):
        shard = Shard(part.name, 0, part.size, (part.full, in_features), 0, part.start)
        self._method = linear_method([shard], in_features, allocate)
        stored = [slot.target for slot in self._method.slots()]
        self._quantized = allocate.quantization is not None and len(stored) > 0 and stored[0].dtype != allocate.dtype
        self.weight = allocate(part.size, in_features) if self._quantized else self._method.dequantize()

    def slots(self) -> Iterator[Slot]:
        for slot in self._method.slots():
            yield dataclasses.replace(slot, finish=self._finish) if self._quantized else slot

    def _finish(self) -> None:
        finish_loading(self._method.slots())
        self.weight.copy_(self._method.dequantize())
