"""Buffers in which attention is planned and computed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

T = TypeVar("T")


class AttentionWorkspace:
    """The buffers of one stream's attention. A runner owns one and passes it to every plan; backends keep none.

    Steps that are planned in one workspace follow each other on one stream, and of each backend's plans the last one
    may run (and those that graphs have captured). Steps that are planned before others have run have a workspace each.
    """

    def __init__(self, device: torch.device):
        self.device = device
        self._scratch = _Scratch(device)
        self._of_backend: dict[Any, Any] = {}

    def fork(self) -> AttentionWorkspace:
        """Creates a workspace for plans of their own, which run on the same stream: it shares the scratch memory."""
        other = AttentionWorkspace(self.device)
        other._scratch = self._scratch
        return other

    def scratch(self, nbytes: int) -> torch.Tensor:
        """Returns ``nbytes`` of memory that holds nothing between two kernels of the stream: all backends share it."""
        return self._scratch.bytes(nbytes)

    def of(self, backend: Any, make: Callable[[], T]) -> T:
        """Returns the buffers that ``backend`` has in this workspace; ``make`` makes them at its first plan."""
        found: T | None = self._of_backend.get(backend)
        if found is None:
            found = self._of_backend[backend] = make()
        return found


class _Scratch:
    """Memory of a device, allocated at its first use."""

    def __init__(self, device: torch.device):
        self._device = device
        self._memory = torch.empty(0, dtype=torch.uint8, device=device)

    def bytes(self, count: int) -> torch.Tensor:
        if self._memory.numel() < count:
            # It grows by more than is needed, as contexts grow by a page at a time.
            size = count * 5 // 4 if self._memory.numel() else count
            self._memory = torch.empty(size, dtype=torch.uint8, device=self._device)
        return self._memory[:count]
