"""Where a checkpoint's tensors go: layers declare slots, loaders fill them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch

from ..config.quantization import QuantizationScheme


@dataclass(frozen=True)
class Slot:
    """``target``, a part of a parameter, takes the slice ``[start : start + target.shape[dim]]`` along ``dim`` of
    the checkpoint tensor ``name``, whose whole shape is ``shape`` (``()``: one value, for all of ``target``). An empty
    ``target`` takes nothing: the checkpoint holds the tensor, and another rank needs it.

    ``holds`` says what the checkpoint's values are. ``take``, where given, is handed the slice in place of a copy.
    """

    name: str
    target: torch.Tensor
    shape: tuple[int, ...]
    dim: int = 0
    start: int = 0
    holds: Literal["values", "float8", "weight scale", "input scale"] = "values"
    take: Callable[[torch.Tensor], object] | None = None

    def fill(self, source: Any) -> None:
        """Take the slot's slice of ``source``, of any device."""
        if not self.target.numel():
            return
        if self.take is None:
            self.target.copy_(self.part_of(source))
        else:
            self.take(self.part_of(source))

    def part_of(self, source: Any) -> torch.Tensor:
        """The slot's slice of ``source``, a tensor or safetensors' lazy slice."""
        if not self.shape:
            whole: torch.Tensor = source[...]
            return whole
        stop = self.start + self.target.shape[self.dim]
        result: torch.Tensor = source[self.start:stop] if self.dim == 0 else source[:, self.start:stop]
        return result


@dataclass(frozen=True)
class Allocate:
    """Makes uninitialised parameters on ``device``, of type ``own`` or of ``dtype``; linear layers are made by
    ``scheme`` where one is given."""

    own: torch.dtype
    device: torch.device
    scheme: QuantizationScheme | None = None

    def __call__(self, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        return torch.empty(*shape, dtype=dtype or self.own, device=self.device)


def allocator(dtype: torch.dtype, device: torch.device, scheme: QuantizationScheme | None = None) -> Allocate:
    return Allocate(dtype, device, scheme)
