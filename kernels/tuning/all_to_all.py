"""Chooses how many programs move tokens between GPUs, and by which tiles."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from ..device import DeviceFacts


class CopyLaunch(NamedTuple):
    """``programs`` at most, which go through tiles of ``tile_values``."""

    programs: int
    tile_values: int
    num_warps: int


@dataclass(frozen=True)
class AllToAllPolicy:
    """Measured between two H200s with 8,192 rows of 2,048 values, for which their link takes 88 us. ``dispatch`` takes
    102 us; 64 programs take 105 us, and tiles of half the size 116 us. ``float8_dispatch`` takes 60 us and computes
    more for a byte; 132 programs of 16 warps take 64 us. ``combine`` takes 110 us, of which reading four choices of
    each row takes 64; half the programs take 151 us.

    No number depends on the batch: rows are copied, and a token's choices are added in their order."""

    dispatch: CopyLaunch
    float8_dispatch: CopyLaunch
    combine: CopyLaunch

    @classmethod
    def derived(cls, facts: DeviceFacts) -> AllToAllPolicy:
        """The rule for a GPU without measured numbers."""
        sms = facts.num_sms
        return cls(CopyLaunch(sms, 16384, 16), CopyLaunch(4 * sms, 4096, 8), CopyLaunch(8 * sms, 2048, 4))
