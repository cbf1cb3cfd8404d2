"""Layout of the symmetric memory of all-to-all dispatch and combine; all_to_all.py has the kernels."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch

from ..arguments import Float8Rows

GROUP = 128
"""The number of a row's values that share a float8 scale."""
_SIGNALS = 256
"""Bytes of two counters for each of at most 32 ranks."""


@dataclass(frozen=True)
class DispatchLayout:
    """Offsets in every rank's buffer, in bytes: counters; for each slot the local expert ids and weights of its token's
    choices, scales, and the row of ``width`` values of ``dtype``, sent in ``float8`` if set; and the rows of each
    rank's part of a sum. ``rows`` are the maximum of a rank."""

    ranks: int
    rows: int
    width: int
    choices: int
    float8: bool = False
    dtype: torch.dtype = torch.bfloat16

    @property
    def slots(self) -> int:
        return self.ranks * self.rows

    @cached_property
    def expert_ids(self) -> int:
        return _SIGNALS

    @cached_property
    def weights(self) -> int:
        return _whole(self.expert_ids + self.slots * self.choices * 8)

    @cached_property
    def scales(self) -> int:
        return _whole(self.weights + self.slots * self.choices * 4)

    @cached_property
    def tokens(self) -> int:
        return _whole(self.scales + self.slots * -(-self.width // GROUP) * 4 * self.float8)

    @cached_property
    def parts(self) -> int:
        return _whole(self.tokens + self.slots * self.width * (1 if self.float8 else self.dtype.itemsize))

    @property
    def nbytes(self) -> int:
        return _whole(self.parts + self.slots * self.width * self.dtype.itemsize)


def _whole(size: int) -> int:
    return -(-size // 256) * 256


@dataclass(frozen=True)
class DispatchMemory:
    """The ranks' symmetric memory. ``own`` [areas.nbytes] uint8 is this rank's buffer, initially zeros; ``bases``
    [ranks] int64, on the device, are the addresses of all ranks' buffers in this rank's address space."""

    rank: int
    layout: DispatchLayout
    own: torch.Tensor
    bases: torch.Tensor

    @property
    def dtype(self) -> torch.dtype:
        return self.layout.dtype

    def view(self, begin: int, *shape: int, dtype: torch.dtype) -> torch.Tensor:
        """Views a part of this rank's buffer."""
        size = dtype.itemsize
        for length in shape:
            size *= length
        return self.own[begin:begin + size].view(dtype).view(shape)

    def choices(self, most: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Local expert ids [ranks * most, K] int64 and weights, float32, of the tokens that were received."""
        shape = (self.layout.ranks * most, self.layout.choices)
        return (self.view(self.layout.expert_ids, *shape, dtype=torch.int64),
                self.view(self.layout.weights, *shape, dtype=torch.float32))

    def tokens(self, most: int) -> torch.Tensor | Float8Rows:
        """The rows [ranks * most, width] that were received; those without a choice are arbitrary."""
        shape = (self.layout.ranks * most, self.layout.width)
        if not self.layout.float8:
            return self.view(self.layout.tokens, *shape, dtype=self.dtype)
        groups = -(-self.layout.width // GROUP)
        return Float8Rows(self.view(self.layout.tokens, *shape, dtype=torch.float8_e4m3fn),
                          self.view(self.layout.scales, shape[0], groups, dtype=torch.float32), self.dtype)
