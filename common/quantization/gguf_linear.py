"""The linear method of GGUF's quantized blocks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from ...kernels.arguments import Float8Rows
from ...kernels.gguf.packed_matmul import dequantize, packed_matmul
from ...kernels.gguf_blocks import BLOCKS
from ...kernels.rowwise.silu_and_mul import silu_and_mul
from ..weights.gguf_source import PACKED
from ..weights.slots import Allocate, Slot, TensorKind
from .methods import SeparateProduct
from .shards import Shard


class GgufLinear(SeparateProduct):
    """Weights ``packed`` [out, bytes] uint8: rows of blocks of one type, as the file has them."""

    def __init__(self, shards: Sequence[Shard], width: int, kind: str, allocate: Allocate):
        self.shards, self.kind, self._dtype = shards, kind, allocate.dtype
        self._block = BLOCKS[kind]
        self.packed = allocate(sum(shard.size for shard in shards), self._block.row_bytes(width), dtype=torch.uint8)

    def __call__(self, x: torch.Tensor | Float8Rows, bias: torch.Tensor | None = None, *,
                 gated: bool = False) -> torch.Tensor:
        assert isinstance(x, torch.Tensor)
        x = silu_and_mul(x) if gated else x
        y = packed_matmul(x, self.packed, self.kind, x.new_empty(len(x), len(self.packed)))
        return y if bias is None else y.add_(bias)

    def dequantize(self) -> torch.Tensor:
        return dequantize(self.packed, self.kind, self._dtype)

    def slots(self) -> Iterator[Slot]:
        # Blocks of zeros, which dummy weights are, have scales of zero.
        kind = TensorKind(f"in GGUF's blocks of {self.kind}", "U8", dummy_value=0.0)
        for shard in self.shards:
            rows, width = shard.shape
            start = shard.start if shard.dim == 0 else self._block.row_bytes(shard.start)
            yield Slot(f"{shard.name}.{PACKED}", shard.rows_of(self.packed), (rows, self._block.row_bytes(width)),
                       shard.dim, start, kind)
