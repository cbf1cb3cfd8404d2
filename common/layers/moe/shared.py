"""The shared expert, which computes every token."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from ....kernels.elementwise import by_element
from ....kernels.gemm.dense_matmul import library_matmul
from ...config.moe import MoESpec
from ...distributed.tp import TPGroup
from ...weights.slots import Allocate, Slot
from ..mlp import MLP


class SharedExpert:
    """An MLP split over the ranks of ``tp``; Qwen2-MoE scales its result for each token by a sigmoid gate."""

    def __init__(self, name: str, spec: MoESpec, hidden_size: int, tp: TPGroup, allocate: Allocate):
        self.name = name
        self.mlp = MLP(name, hidden_size, spec.shared_size, False, tp, allocate)
        self.gate = allocate(1, hidden_size) if spec.shared_gate else None

    def partial(self, x: torch.Tensor) -> torch.Tensor:
        """Returns this rank's summand of ``[T, hidden]``."""
        y = self.mlp.partial(x)
        return y if self.gate is None else by_element(torch.sigmoid, library_matmul(x, self.gate)) * y

    def slots(self) -> Iterator[Slot]:
        yield from self.mlp.slots()
        if self.gate is not None:
            yield Slot(f"{self.name}_gate.weight", self.gate, tuple(self.gate.shape))
