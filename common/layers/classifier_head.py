"""The classification head."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from ...kernels.gemm.dense_matmul import library_matmul
from ..weights.slots import Allocate, Slot


class ClassifierHead:
    """Classification head ``[R, hidden] -> [R, labels]``, replicated on every rank: a few rows of weights."""

    def __init__(self, name: str, num_labels: int, hidden_size: int, allocate: Allocate):
        self.name = name
        self.weight = allocate(num_labels, hidden_size)

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """Returns float32 scores of hidden states of any float type."""
        return library_matmul(hidden.to(self.weight.dtype), self.weight).float()

    def slots(self) -> Iterator[Slot]:
        yield Slot(f"{self.name}.weight", self.weight, tuple(self.weight.shape))
