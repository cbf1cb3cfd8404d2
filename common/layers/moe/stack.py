"""One linear layer of every expert of a rank, with parameters stacked for the grouped kernels."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import count

import torch

from ...quantization.methods import format_of, linear_method
from ...quantization.shards import Shard
from ...weights.slots import Allocate, Slot


@dataclass(frozen=True)
class _Slices(Allocate):
    """Allocates the parameters of module ``index`` of ``num_modules`` alike ones: the n-th is a slice of the n-th
    stack.
    """

    num_modules: int = 0
    index: int = 0
    stacks: list[torch.Tensor] = field(default_factory=list)
    allocated: Iterator[int] = field(default_factory=count)

    def __call__(self, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        number = next(self.allocated)
        if number == len(self.stacks):
            self.stacks.append(super().__call__(self.num_modules, *shape, dtype=dtype))
        return self.stacks[number][self.index]


class ExpertLinear:
    """Linear layers of S experts, an ``ExpertStack`` in the quantization format ``quantization``. Each is a linear
    method, made of ``shards_of(expert)``. ``bias`` [S, out] is in the engine's type; all zeros without
    ``adds_bias``."""

    def __init__(self, num_experts: int, width: int, shards_of: Callable[[int], list[Shard]], allocate: Allocate, *,
                 bias: bool = False, adds_bias: bool = True):
        self.shards_of = shards_of
        self.name = shards_of(0)[0].name
        self.quantization = format_of([shard for index in range(num_experts) for shard in shards_of(index)], allocate)
        self.parameters: list[torch.Tensor] = []
        self.methods = [linear_method(shards_of(index), width, _Slices(
            allocate.dtype, allocate.device, allocate.quantization, allocate.memory, num_experts, index,
            self.parameters)) for index in range(num_experts)]
        self.bias = allocate(num_experts, sum(shard.size for shard in shards_of(0))) if bias else None
        self._adds_bias = adds_bias
        if self.bias is not None and not adds_bias:
            self.bias.zero_()

    @property
    def stacks(self) -> list[torch.Tensor]:
        """The parameters and the bias, [S, ...] each."""
        return self.parameters if self.bias is None else [*self.parameters, self.bias]

    def slots(self, physical_to_logical: list[int], num_experts: int) -> Iterator[Slot]:
        """Yields the slots of all logical experts; those of experts on other ranks have empty targets."""
        local_index = {expert: index for index, expert in enumerate(physical_to_logical)}
        for expert in range(num_experts):
            is_local, index = expert in local_index, local_index.get(expert, 0)
            names = {built.name: loaded.name for built, loaded in zip(self.shards_of(index), self.shards_of(expert))}
            for slot in self.methods[index].slots():
                shard, _, kind = slot.name.rpartition(".")
                slot = replace(slot, name=f"{names[shard]}.{kind}")
                yield slot if is_local else replace(slot, target=slot.target[:0], load=None, finish=None)
            if self.bias is not None:
                yield from self._bias_slots(expert, self.bias[index] if is_local else self.bias[0, :0])

    def _bias_slots(self, expert: int, bias: torch.Tensor) -> Iterator[Slot]:
        for shard in self.shards_of(expert):
            target = shard.rows_of(bias) if self._adds_bias else bias[:0]
            yield Slot(f"{shard.name}.bias", target, shard.shape[:1], 0, shard.start if shard.dim == 0 else 0)
