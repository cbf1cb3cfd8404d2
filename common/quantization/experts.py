"""Grouped computation of a rank's experts: by kernels over stacks, or by each expert's linear methods."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from ...kernels.arguments import By, ExpertBiases, Float8Rows, Scales
from ...kernels.gated_activation import GateActivation, clamped_gate
from ...kernels.moe.moe_experts import moe_experts, moe_products
from ...kernels.rowwise.silu_and_mul import silu_and_mul
from .methods import LinearMethod


class ExpertStack(Protocol):
    """One linear layer of S experts."""

    @property
    def name(self) -> str:
        """The first expert's name in the checkpoint, for errors."""

    @property
    def methods(self) -> Sequence[LinearMethod]:
        """Each expert's."""

    @property
    def parameters(self) -> Sequence[torch.Tensor]:
        """The methods' tensors, in the order of allocation, stacked: [S, ...] each, the weights [S, out, in] first."""

    @property
    def bias(self) -> torch.Tensor | None:
        """[S, out] in the engine's type."""


class GroupedExperts(Protocol):
    """Computes a rank's S experts. ``local_ids`` [T, K] int64 are experts of this rank; one outside of ``[0, S)``
    belongs to another rank and adds nothing."""

    @property
    def accepts_float8(self) -> bool:
        """True if ``products`` takes tokens in float8, with a scale for each 128 values."""

    def __call__(self, x: torch.Tensor, local_ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Returns this rank's summand of ``[T, hidden]``; ``weights`` [T, K] float32."""

    def products(self, x: torch.Tensor | Float8Rows,
                 local_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Returns the rows that ``moe_sum`` adds up, and the position of each choice's (None: in the order of
        choices)."""


class KernelExperts:
    """Experts that the grouped kernels compute, over stacks of weights and, with ``scales_by``, of their scales."""

    def __init__(self, gate_up: ExpertStack, down: ExpertStack, limit: float, scales_by: By | None = None,
                 activate: GateActivation | None = None):
        self._weights = gate_up.parameters[0], down.parameters[0]
        self._scales = scales_by and Scales(gate_up.parameters[1], down.parameters[1], scales_by)
        self._biases = None if gate_up.bias is None or down.bias is None else ExpertBiases(gate_up.bias, down.bias)
        self._limit, self._activate = limit, activate
        self.accepts_float8 = scales_by == "block"  # experts quantize them so anyway

    def __call__(self, x: torch.Tensor, local_ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return moe_experts(x, *self._weights, local_ids, weights, self._scales, biases=self._biases, limit=self._limit,
                           activate=self._activate)

    def products(self, x: torch.Tensor | Float8Rows,
                 local_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        return moe_products(x, *self._weights, local_ids, self._scales, biases=self._biases, limit=self._limit,
                            activate=self._activate)


class ExpertByExpert:
    """Experts computed one after another by their linear methods, for formats without grouped kernels."""

    accepts_float8 = False

    def __init__(self, gate_up: ExpertStack, down: ExpertStack, limit: float,
                 activate: GateActivation | None = None):
        self._gate_up, self._down, self._limit = gate_up, down, limit
        self._activate = activate or silu_and_mul

    def __call__(self, x: torch.Tensor, local_ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        rows = self.products(x, local_ids)[0].view(*local_ids.shape, x.shape[1])
        return (rows.float() * weights[..., None]).sum(1).to(x.dtype)

    def products(self, x: torch.Tensor | Float8Rows, local_ids: torch.Tensor) -> tuple[torch.Tensor, None]:
        assert isinstance(x, torch.Tensor)
        rows = x.new_zeros((*local_ids.shape, x.shape[1]))
        for expert in range(len(self._gate_up.methods)):
            chosen = local_ids == expert
            if x.is_cuda:  # all rows, whoever chose them: CUDA graphs take fixed shapes
                rows = torch.where(chosen[..., None], self._compute(expert, x)[:, None], rows)
            elif chosen.any():
                tokens, choices = chosen.nonzero(as_tuple=True)
                rows[tokens, choices] = self._compute(expert, x[tokens])
        return rows.flatten(0, 1), None

    def _compute(self, expert: int, x: torch.Tensor) -> torch.Tensor:
        hidden = self._gate_up.methods[expert](x, _row(self._gate_up.bias, expert))
        hidden = clamped_gate(hidden, self._limit) if self._limit else self._activate(hidden)
        return self._down.methods[expert](hidden, _row(self._down.bias, expert))


def _row(bias: torch.Tensor | None, expert: int) -> torch.Tensor | None:
    return None if bias is None else bias[expert]
