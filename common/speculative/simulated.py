"""Simulated acceptance, for measurements with dummy weights: how many drafts a step accepts is drawn by a given curve.

The tokens are then those that were drafted, not the model's own: all outputs of such a server are marked as simulated.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import numpy as np
import torch

from ...kernels.arguments import SimulatedCounts
from ..api.drafts import Drafts
from ..forward.host_copies import upload_joined

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
        with np.errstate(over="ignore"):
            mixed = _mix(self.keys(rids) + _STEP * positions.astype(np.uint64))
        uniform = (mixed >> np.uint64(11)).astype(np.float64) / 2.0**53
        counts: np.ndarray = np.minimum((uniform[:, None] < self._survival).sum(1), num_drafts)
        return counts

    def keys(self, rids: Sequence[str]) -> np.ndarray:
        """Returns the hashes [n] uint64 of the seed and the requests: with that of a position they are the draw."""
        hashes = np.array([zlib.crc32(rid.encode()) for rid in rids], np.uint64)
        with np.errstate(over="ignore"):
            return _mix(self._seed + _STEP * (hashes + np.uint64(1)))

    def on_device(self, max_requests: int, device: torch.device) -> SimulatedCounts:
        """Returns what draws the same numbers on a device, of up to ``max_requests`` requests, whose keys are to be
        written there."""
        thresholds = np.ceil(self._survival * 2.0**53).astype(np.int64)
        return SimulatedCounts(torch.zeros(max_requests, dtype=torch.int64, device=device),
                               torch.from_numpy(thresholds).to(device))


class SimulatedChains:
    """The draws of chain steps of up to ``max_requests`` requests, whose keys stay where they are on the device."""

    def __init__(self, acceptance: SimulatedAcceptance, max_requests: int, device: torch.device):
        self._acceptance = acceptance
        self._rids: list[str] = []
        self.counts = acceptance.on_device(max_requests, device)

    @torch.inference_mode()
    def update(self, rids: Sequence[str]) -> None:
        """Takes the requests of a step, without waiting for the device."""
        if rids != self._rids:
            keys = self._acceptance.keys(rids).view(np.int64)
            self.counts.keys[:len(rids)] = upload_joined([keys], torch.int64, self.counts.keys.device)
            self._rids = list(rids)


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
