"""One linear layer of every expert that a rank holds, with the parameters stacked for the grouped kernels."""

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
    """Gives the parameters of one of ``places`` alike modules: the n-th is a slice of the n-th stack."""

    places: int = 0
    place: int = 0
    stacks: list[torch.Tensor] = field(default_factory=list)
    given: Iterator[int] = field(default_factory=count)

    def __call__(self, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        index = next(self.given)
        if index == len(self.stacks):
            self.stacks.append(super().__call__(self.places, *shape, dtype=dtype))
        return self.stacks[index][self.place]


class ExpertLinear:
    """``[S, out, in]`` as ``weight``, with ``scales`` where it is in float8: for each place a linear layer in the form
    that the model is quantized in, made of ``shards_of(expert)``. ``bias`` [S, out] in the engine's type; all zeros
    without ``adds_bias``."""

    def __init__(self, places: int, width: int, shards_of: Callable[[int], list[Shard]], allocate: Allocate, *,
                 bias: bool = False, adds_bias: bool = True):
        self.shards_of = shards_of
        stacks: list[torch.Tensor] = []
        self.methods = [linear_method(shards_of(place), width, _Slices(
            allocate.own, allocate.device, allocate.scheme, places, place, stacks)) for place in range(places)]
        _check(self.methods[0], shards_of(0)[0].name)
        self._of_weight = stacks
        self.bias = allocate(places, sum(shard.size for shard in shards_of(0))) if bias else None
        self._adds_bias = adds_bias
        if self.bias is not None and not adds_bias:
            self.bias.zero_()

    @property
    def weight(self) -> torch.Tensor:
        return self._of_weight[0]

    @property
    def scale(self) -> torch.Tensor | None:
        return self._of_weight[1] if len(self._of_weight) > 1 else None

    @property
    def stacks(self) -> list[torch.Tensor]:
        """All that belongs to an expert, [S, ...] each."""
        return self._of_weight if self.bias is None else [*self._of_weight, self.bias]

    @property
    def by(self) -> By:
        return "block" if isinstance(self.methods[0], Fp8Block) else "row"

    def slots(self, residents: list[int], num_experts: int) -> Iterator[Slot]:
        """Of all experts, for place p holds expert ``residents[p]``; those of experts held elsewhere take nothing."""
        here = {expert: place for place, expert in enumerate(residents)}
        for expert in range(num_experts):
            place = here.get(expert, 0)
            names = {made.name: wanted.name for made, wanted in zip(self.shards_of(place), self.shards_of(expert))}
            for slot in self.methods[place].slots():
                shard, _, kind = slot.name.rpartition(".")
                slot = replace(slot, name=f"{names[shard]}.{kind}")
                yield slot if expert in here else replace(slot, target=slot.target[:0], take=None)
            if self.bias is not None:
                yield from self._bias_slots(expert, self.bias[place] if expert in here else self.bias[0, :0])

    def _bias_slots(self, expert: int, bias: torch.Tensor) -> Iterator[Slot]:
        for shard in self.shards_of(expert):
            target = shard.rows_of(bias) if self._adds_bias else bias[:0]
            yield Slot(f"{shard.name}.bias", target, shard.shape[:1], 0, shard.start if shard.dim == 0 else 0)


def _check(method: LinearMethod, name: str) -> None:
    """Raises ConfigError for a form that the grouped kernels do not compute."""
    if isinstance(method, Fp8Block) and method.scheme.block != BLOCK:
        tall, wide = method.scheme.block
        raise ConfigError(f"{name} is quantized in blocks of {tall} x {wide}; experts are computed in blocks of "
                          f"{BLOCK[0]} x {BLOCK[1]}: use a checkpoint with those.")
    if isinstance(method, Fp8PerChannel) and method.scheme.activations == "static":
        raise ConfigError(f"{name} is quantized with static scales of activations, which is not supported for experts: "
                          "use a checkpoint with dynamic ones, or one in bfloat16 with --quantization fp8.")
    assert isinstance(method, (Unquantized, Fp8Block, Fp8PerChannel))
