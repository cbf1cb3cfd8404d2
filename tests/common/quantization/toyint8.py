"""Int8 weights with a scale an output, in plain torch: a quantization format in one file, as users write it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch.nn.functional import linear

import baton
from baton.common.config.quantization import names_layer
from baton.common.quantization.experts import ExpertByExpert, ExpertStack
from baton.common.quantization.shards import Shard
from baton.common.weights.slots import Allocate, Slot, TensorKind
from baton.kernels.gated_activation import GateActivation
from baton.kernels.rowwise.silu_and_mul import silu_and_mul

INT8 = TensorKind("int8", "I8", dummy_std=40.0, dummy_limit=127.0)
SCALE = TensorKind("weight scale", dummy_value=0.02 / 40)


def quantize(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    scale = weight.float().abs().amax(-1).clamp(min=1e-12) / 127
    return (weight.float() / scale[:, None]).round().to(torch.int8), scale


@baton.register_quantization("toyint8")
@dataclass(frozen=True)
class ToyInt8:
    methods: ClassVar = ("toyint8",)
    stored: bool = False
    ignored: tuple[str, ...] = ()

    @classmethod
    def from_config(cls, stated: Mapping[str, Any]) -> ToyInt8:
        return cls(True, tuple(stated.get("ignore") or ()))

    @classmethod
    def at_load(cls, name: str) -> ToyInt8:
        return cls()

    def for_layer(self, name: str) -> ToyInt8 | None:
        return None if names_layer(self.ignored, name) else self

    def check_device(self, dtype: str, device: torch.device) -> None:
        """Plain torch runs everywhere."""

    def linear(self, shards: Sequence[Shard], width: int, allocate: Allocate) -> Int8Linear:
        return Int8Linear(shards, width, self.stored, allocate)

    def experts(self, gate_up: ExpertStack, down: ExpertStack, limit: float,
                activate: GateActivation | None = None) -> ExpertByExpert:
        return ExpertByExpert(gate_up, down, limit, activate)


class Int8Linear:
    def __init__(self, shards: Sequence[Shard], width: int, stored: bool, allocate: Allocate):
        self.shards, self.stored, self._dtype = shards, stored, allocate.dtype
        out = sum(shard.size for shard in shards)
        self.weight = allocate(out, width, dtype=torch.int8)
        self.scale = allocate(out, dtype=torch.float32)

    def activation_format(self, rows: int) -> None: ...

    def fused_activation(self) -> None: ...

    def deferred(self, x: torch.Tensor) -> None: ...

    def __call__(self, x: torch.Tensor, bias: torch.Tensor | None = None, *, gated: bool = False) -> torch.Tensor:
        y = linear(silu_and_mul(x) if gated else x, self.weight.to(x.dtype)) * self.scale.to(x.dtype)
        return y if bias is None else y + bias

    def dequantize(self) -> torch.Tensor:
        return (self.weight.float() * self.scale[:, None]).to(self._dtype)

    def slots(self) -> Iterator[Slot]:
        for shard in self.shards:
            weight, scale = shard.rows_of(self.weight), shard.rows_of(self.scale)
            name, start = f"{shard.name}.weight", shard.start if shard.dim == 0 else 0
            if self.stored:
                yield Slot(name, weight, shard.shape, shard.dim, shard.start, INT8)
                yield Slot(f"{shard.name}.weight_scale", scale, shard.shape[:1], 0, start, SCALE)
            else:
                yield Slot(name, weight, shard.shape, shard.dim, shard.start, load=_quantize_into(weight, scale))


def _quantize_into(weight: torch.Tensor, scale: torch.Tensor) -> Callable[[torch.Tensor], None]:
    def load(part: torch.Tensor) -> None:
        for target, value in zip((weight, scale), quantize(part)):
            target.copy_(value)

    return load
