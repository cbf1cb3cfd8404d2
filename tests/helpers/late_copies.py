"""Copies of pages that are made when a test says so, or when somebody waits for them, as a busy device's are."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

from baton.common.kvcache.tiers.base import TierContext
from baton.common.kvcache.tiers.page_copies import Copy, present
from baton.common.kvcache.tiers.slot_memory import SlotMemory


class LateCopy:
    """A copy, layer group by layer group. ``waits`` has what was waited for on the device."""

    seconds = 0.0

    def __init__(self, copy_group: Callable[[int], None], num_groups: int, num_bytes: int, after: Sequence[Copy]):
        self.num_groups = num_groups
        self.num_bytes = num_bytes
        self.num_complete = 0
        self.waits: list[int | None] = []
        self._copy_group, self._after = copy_group, after

    @property
    def complete(self) -> bool:
        return self.num_complete == self.num_groups

    def run_group(self) -> None:
        for earlier in self._after:
            earlier.synchronize()
        self._copy_group(self.num_complete)
        self.num_complete += 1

    def synchronize(self) -> None:
        while not self.complete:
            self.run_group()

    def wait_on_device(self, group: int | None = None) -> None:
        self.waits.append(group)
        while self.num_complete < (self.num_groups if group is None else group + 1):
            self.run_group()


class LateCopies:
    """Copies of a context's pools in both directions; each is in order, and neither waits for the other but as it is
    told."""

    def __init__(self, context: TierContext, memory: SlotMemory):
        self._pages = [group.view(len(group), -1).view(torch.uint8).numpy() for group in context.groups]
        self._cache_groups = context.cache_groups
        self._slots = memory.arrays
        self._lines: list[list[LateCopy]] = [[], []]

    @property
    def launched(self) -> list[LateCopy]:
        """The copies that have not ended, loads first."""
        return [copy for line in self._lines for copy in line if not copy.complete]

    def load(self, slots: np.ndarray, page_ids: np.ndarray, after: Sequence[Copy]) -> LateCopy:
        def copy_group(group: int) -> None:
            there, ids = present(slots, page_ids[self._cache_groups[group]])
            self._pages[group][ids] = self._slots[group][there]

        return self._launch(0, copy_group, after, len(slots))

    def store(self, slots: np.ndarray, page_ids: np.ndarray, after: Sequence[Copy]) -> LateCopy:
        def copy_group(group: int) -> None:
            self._slots[group][slots] = self._pages[group][page_ids[self._cache_groups[group]]]

        return self._launch(1, copy_group, after, len(slots))

    def _launch(self, line: int, copy_group: Callable[[int], None], after: Sequence[Copy], num_pages: int) -> LateCopy:
        self._lines[line] = [copy for copy in self._lines[line] if not copy.complete]
        copy = LateCopy(copy_group, len(self._pages), num_pages * sum(array.shape[1] for array in self._slots),
                        [*self._lines[line][-1:], *after])
        self._lines[line].append(copy)
        return copy

    def run_group(self) -> None:
        """The next layer group of the oldest load, else of the oldest store."""
        self.launched[0].run_group()

    def run_some(self, rng: np.random.Generator) -> None:
        for copy in self.launched:
            if rng.integers(3) == 0:
                break
            copy.synchronize()

    def run(self) -> None:
        for copy in self.launched:
            copy.synchronize()
