"""Slots for a checkpoint's tensors: layers declare them, loaders fill them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch

from ..config.quantization import QuantizationScheme


@dataclass(frozen=True)
class Slot:
    """The destination of a checkpoint tensor, or of a slice of it.

    ``target``, a part of a parameter, is filled with the slice ``[start : start + target.shape[dim]]`` along ``dim`` of
    the tensor ``name``, whose whole shape is ``shape`` (``()``: one value, for all of ``target``). With an empty
    ``target`` the checkpoint must have the tensor, which another rank loads.

    ``kind`` is the kind of the checkpoint's values. ``load``, where given, gets the slice instead of a copy to
    ``target``.
    """

    name: str
    target: torch.Tensor
    shape: tuple[int, ...]
    dim: int = 0
    start: int = 0
    kind: Literal["values", "float8", "weight scale", "input scale"] = "values"
    load: Callable[[torch.Tensor], object] | None = None

    def fill(self, source: Any) -> None:
        """Fills the target with its slice of ``source``, of any device."""
        if not self.target.numel():
            return
        if self.load is None:
            self.target.copy_(self.part_of(source))
        else:
            self.load(self.part_of(source))

    def part_of(self, source: Any) -> torch.Tensor:
        """Returns the slot's slice of ``source``, a tensor or safetensors' lazy slice."""
        if not self.shape:
            whole: torch.Tensor = source[...]
            return whole
        stop = self.start + self.target.shape[self.dim]
        result: torch.Tensor = source[self.start:stop] if self.dim == 0 else source[:, self.start:stop]
        return result


@dataclass(frozen=True)
class Allocate:
    """Allocates uninitialised parameters on ``device``, of type ``dtype`` unless a call names another; linear layers
    quantize by ``scheme`` where there is one."""

    dtype: torch.dtype
    device: torch.device
    scheme: QuantizationScheme | None = None

    def __call__(self, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        return torch.empty(*shape, dtype=dtype or self.dtype, device=self.device)


def allocator(dtype: torch.dtype, device: torch.device, scheme: QuantizationScheme | None = None) -> Allocate:
    return Allocate(dtype, device, scheme)
