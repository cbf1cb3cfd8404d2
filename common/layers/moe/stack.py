"""One linear layer of every expert of a rank, with parameters stacked for the grouped kernels."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import count

import torch

from ....kernels.arguments import By
from ...api.errors import ConfigError
from ...config.quantization import BLOCK
from ...quantization.fp8_block import Fp8Block
from ...quantization.fp8_per_channel import Fp8PerChannel
from ...quantization.methods import LinearMethod, Unquantized, linear_method
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
    """Linear layers of S experts: ``weight`` [S, out, in], with ``scale`` where it is float8. Each is a linear method
    in the model's quantization format, made of ``shards_of(expert)``. ``bias`` [S, out] is in the engine's type; all
    zeros without ``adds_bias``."""

    def __init__(self, num_experts: int, width: int, shards_of: Callable[[int], list[Shard]], allocate: Allocate, *,
                 bias: bool = False, adds_bias: bool = True):
        self.shards_of = shards_of
        stacks: list[torch.Tensor] = []
        self.methods = [linear_method(shards_of(index), width, _Slices(
            allocate.dtype, allocate.device, allocate.scheme, num_experts, index,
            stacks)) for index in range(num_experts)]
        _check(self.methods[0], shards_of(0)[0].name)
        self._weight_stacks = stacks
        self.bias = allocate(num_experts, sum(shard.size for shard in shards_of(0))) if bias else None
        self._adds_bias = adds_bias
        if self.bias is not None and not adds_bias:
            self.bias.zero_()

    @property
    def weight(self) -> torch.Tensor:
        return self._weight_stacks[0]

    @property
    def scale(self) -> torch.Tensor | None:
        return self._weight_stacks[1] if len(self._weight_stacks) > 1 else None

    @property
    def stacks(self) -> list[torch.Tensor]:
        """All parameters, [S, ...] each."""
        return self._weight_stacks if self.bias is None else [*self._weight_stacks, self.bias]

    @property
    def granularity(self) -> By:
        """The granularity of weight scales, as the grouped kernels name it."""
        return "block" if isinstance(self.methods[0], Fp8Block) else "row"

    def slots(self, physical_to_logical: list[int], num_experts: int) -> Iterator[Slot]:
        """Yields the slots of all logical experts; those of experts on other ranks have empty targets."""
        local_index = {expert: index for index, expert in enumerate(physical_to_logical)}
        for expert in range(num_experts):
            is_local, index = expert in local_index, local_index.get(expert, 0)
            names = {built.name: loaded.name for built, loaded in zip(self.shards_of(index), self.shards_of(expert))}
            for slot in self.methods[index].slots():
                shard, _, kind = slot.name.rpartition(".")
                slot = replace(slot, name=f"{names[shard]}.{kind}")
                yield slot if is_local else replace(slot, target=slot.target[:0], load=None)
            if self.bias is not None:
                yield from self._bias_slots(expert, self.bias[index] if is_local else self.bias[0, :0])

    def _bias_slots(self, expert: int, bias: torch.Tensor) -> Iterator[Slot]:
        for shard in self.shards_of(expert):
            target = shard.rows_of(bias) if self._adds_bias else bias[:0]
            yield Slot(f"{shard.name}.bias", target, shard.shape[:1], 0, shard.start if shard.dim == 0 else 0)


def _check(method: LinearMethod, name: str) -> None:
    """Raises ConfigError for a quantization format that the grouped kernels do not support."""
    if isinstance(method, Fp8Block) and method.scheme.block != BLOCK:
        tall, wide = method.scheme.block
        raise ConfigError(f"{name} is quantized in blocks of {tall} x {wide}; experts are computed in blocks of "
                          f"{BLOCK[0]} x {BLOCK[1]}: use a checkpoint with those.")
    if isinstance(method, Fp8PerChannel) and method.scheme.activations == "static":
        raise ConfigError(f"{name} is quantized with static scales of activations, which is not supported for experts: "
                          "use a checkpoint with dynamic ones, or one in bfloat16 with --quantization fp8.")
    assert isinstance(method, (Unquantized, Fp8Block, Fp8PerChannel))
