"""Where in a few GPUs' memory tokens meet their experts, and come back; ``peer_tokens`` has the kernels."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch

from ..arguments import Float8Rows

GROUP = 128
"""Values of a row that share a scale in float8."""
_SIGNALS = 256
"""Bytes: two counters for each of at most 32 ranks."""


@dataclass(frozen=True)
class Areas:
    """What lies where in every rank's buffer, in bytes: counters; of each slot the places and weights of its token's
    choices, scales, and the row of ``width`` values of ``dtype``, in ``float8`` on the way; and of each rank's part of
    a sum the rows. ``rows``: of a rank at most."""

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
    def places(self) -> int:
        return _SIGNALS

    @cached_property
    def weights(self) -> int:
        return _whole(self.places + self.slots * self.choices * 8)

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
class PeerAreas:
    """What the ranks share. ``own`` [areas.nbytes] uint8 is this rank's buffer, at first zeros; ``bases`` [ranks]
    int64, on the device, the addresses of all ranks' as this one sees them."""

    rank: int
    areas: Areas
    own: torch.Tensor
    bases: torch.Tensor

    @property
    def dtype(self) -> torch.dtype:
        return self.areas.dtype

    def view(self, begin: int, *shape: int, dtype: torch.dtype) -> torch.Tensor:
        """Of this rank's buffer."""
        size = dtype.itemsize
        for length in shape:
            size *= length
        return self.own[begin:begin + size].view(dtype).view(shape)

    def choices(self, most: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Places [ranks * most, K] int64 and weights, float32, of the tokens that have come."""
        shape = (self.areas.ranks * most, self.areas.choices)
        return (self.view(self.areas.places, *shape, dtype=torch.int64),
                self.view(self.areas.weights, *shape, dtype=torch.float32))

    def tokens(self, most: int) -> torch.Tensor | Float8Rows:
        """Rows [ranks * most, width] that have come; those without a choice hold anything."""
        shape = (self.areas.ranks * most, self.areas.width)
        if not self.areas.float8:
            return self.view(self.areas.tokens, *shape, dtype=self.dtype)
        groups = -(-self.areas.width // GROUP)
        return Float8Rows(self.view(self.areas.tokens, *shape, dtype=torch.float8_e4m3fn),
                          self.view(self.areas.scales, shape[0], groups, dtype=torch.float32), self.dtype)
