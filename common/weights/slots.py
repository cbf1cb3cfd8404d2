"""Where a checkpoint's tensors go: layers declare slots, loaders fill them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch


@dataclass(frozen=True)
class Slot:
    """``target``, a part of a parameter, takes the slice ``[start : start + target.shape[dim]]`` along ``dim`` of
    the checkpoint tensor ``name``, whose whole shape is ``shape``. An empty ``target`` takes nothing: the checkpoint
    holds the tensor, and another rank needs it."""

    name: str
    target: torch.Tensor
    shape: tuple[int, ...]
    dim: int = 0
    start: int = 0

    def part_of(self, source: Any) -> torch.Tensor:
        """The slot's slice of ``source``, a tensor or safetensors' lazy slice."""
        stop = self.start + self.target.shape[self.dim]
        return source[self.start:stop] if self.dim == 0 else source[:, self.start:stop]


class Allocate(Protocol):
    """Makes an uninitialised parameter on the engine's device, of the engine's type or of ``dtype``."""

    def __call__(self, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor: ...


def allocator(dtype: torch.dtype, device: torch.device) -> Allocate:
    own = dtype

    def allocate(*shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        return torch.empty(*shape, dtype=dtype or own, device=device)
    return allocate
