"""Simulated acceptance, for measurements with dummy weights: how many drafts a step accepts is drawn by a given curve.

The tokens are then those that were drafted, not the model's own: all outputs of such a server are marked as simulated.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import numpy as np

from ..api.drafts import Drafts

_MIX_1, _MIX_2, _STEP = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB), np.uint64(0x9E3779B97F4A7C15)


class SimulatedAcceptance:
    """Draws the number of accepted drafts from a hash of the seed, the request and its position: all ranks draw the
    same, and a run can be repeated."""

    def __init__(self, survival: Sequence[float], seed: int):
        """``survival``: the share of steps in which a draft and those before it are accepted, by position."""
        self._survival = np.array(survival, np.float64)
        self._seed = np.uint64(seed & 0xFFFFFFFFFFFFFFFF)

    def count(self, rids: Sequence[str], positions: np.ndarray, num_drafts: np.ndarray) -> np.ndarray:
        """Returns how many of its ``num_drafts`` [n] each request, whose newest token is at ``positions`` [n], accepts:
        an array [n] int64."""
        keys = np.array([zlib.crc32(rid.encode()) for rid in rids], np.uint64)
        with np.errstate(over="ignore"):
            mixed = _mix(_mix(self._seed + _STEP * (keys + np.uint64(1))) + _STEP * positions.astype(np.uint64))
        uniform = (mixed >> np.uint64(11)).astype(np.float64) / 2.0**53
        counts: np.ndarray = np.minimum((uniform[:, None] < self._survival).sum(1), num_drafts)
        return counts


def _mix(values: np.ndarray) -> np.ndarray:
    """The finalizer of splitmix64 (Steele, Lea and Flood, 2014)."""
    values = (values ^ (values >> np.uint64(30))) * _MIX_1
    values = (values ^ (values >> np.uint64(27))) * _MIX_2
    mixed: np.ndarray = values ^ (values >> np.uint64(31))
    return mixed


def first_path(drafts: Drafts, count: int) -> list[int]:
    """The indices of the first ``count`` drafts of a chain; of a tree those that always follow the first child, as far
    as they go."""
    if drafts.parents is None:
        return list(range(min(count, len(drafts.tokens))))
    path: list[int] = []
    parent = -1
    for index, of in enumerate(drafts.parents):
        if len(path) == count:
            break
        if of == parent:
            path.append(index)
            parent = index
    return path
