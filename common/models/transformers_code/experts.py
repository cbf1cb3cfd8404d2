"""Experts of transformers' mixtures: their stacks, split over ranks, computed by the grouped kernels where they can."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn
from transformers.integrations.moe import _default_apply_gate

from ....kernels.moe.moe_experts import moe_experts
from ...api.errors import ConfigError
from ...distributed.tp import TPGroup
from ...weights.slots import Allocate, Slot


def is_experts(module: nn.Module) -> bool:
    """Returns whether a module is a stack of experts."""
    return isinstance(getattr(module, "gate_up_proj", None), nn.Parameter) and isinstance(
        getattr(module, "down_proj", None), nn.Parameter)


def _is_plain(module: Any) -> bool:
    """Returns whether experts are gated by silu, without biases, in matrices of outputs by inputs."""
    return (type(getattr(module, "act_fn", None)).__name__ in ("SiLU", "SiLUActivation")
            and getattr(type(module), "_apply_gate", None) is _default_apply_gate
            and module.has_gate and module.is_concatenated and not module.has_bias and not module.is_transposed)


class ExpertsOf:
    """Replaces the computation of ``module``, experts of transformers, by this rank's slice of each of them, summed
    over the ranks; ``names`` are the checkpoint's of gates and ups, and of the down projections, as CheckpointNames
    returns them. ``is_plain``: it is one of ours, which CUDA graphs capture."""

    def __init__(self, module: Any, names: tuple[Sequence[str], Sequence[str]], tp: TPGroup, allocate: Allocate):
        self.is_plain = _is_plain(module)
        self._tp, self._names = tp, names
        count, self._hidden, self._size = module.down_proj.shape
        stored_singly = all("*" in part for part in names[0])
        if tp.size > 1 and not (self.is_plain and stored_singly and self._size % tp.size == 0):
            raise ConfigError("--model-impl transformers splits experts of gates by silu that are stored one by one, "
                              f"in sizes that --tp-size divides: leave --tp-size out for {type(module).__name__}.")
        local = self._size // tp.size
        if not self.is_plain:
            for name, parameter in module._parameters.items():
                module._parameters[name] = nn.Parameter(allocate(*parameter.shape), requires_grad=False)
            self.gate_up, self.down = module.gate_up_proj, module.down_proj
            return
        self.gate_up, self.down = allocate(count, 2 * local, self._hidden), allocate(count, self._hidden, local)
        module.gate_up_proj = nn.Parameter(self.gate_up, requires_grad=False)
        module.down_proj = nn.Parameter(self.down, requires_grad=False)
        module.forward = self._compute

    def _compute(self, hidden_states: torch.Tensor, top_k_index: torch.Tensor,
                 top_k_weights: torch.Tensor) -> torch.Tensor:
        y = moe_experts(hidden_states, self.gate_up, self.down, top_k_index, top_k_weights.float())
        return y if self._tp.size == 1 else self._tp.all_reduce(y)

    def slots(self) -> Iterator[Slot]:
        """Yields the slots of the two stacks; experts' other parameters are not among them."""
        gate_up, down = self._names
        if not any("*" in name for name in (*gate_up, *down)):
            yield Slot(gate_up[0], self.gate_up, tuple(self.gate_up.shape))
            yield Slot(down[0], self.down, tuple(self.down.shape))
            return
        local = self._size // self._tp.size
        first = self._tp.rank * local
        for expert in range(len(self.down)):
            for index, name in enumerate(gate_up):
                yield Slot(name.replace("*", str(expert)), self.gate_up[expert, index * local:(index + 1) * local],
                           (self._size, self._hidden), 0, first)
            yield Slot(down[0].replace("*", str(expert)), self.down[expert], (self._hidden, self._size), 1, first)
