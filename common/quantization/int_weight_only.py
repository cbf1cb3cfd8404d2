"""Weights of integers in 4 or 8 bits, quantized while they are loaded; activations are not quantized. Names are
torchao's: ``int8wo`` has a symmetric scale for each output, ``int4wo-G`` a scale and a zero for G inputs of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from ..config.quantization import QUANTIZATIONS

if TYPE_CHECKING:
    import torch

    from ...kernels.gated_activation import GateActivation
    from ..weights.slots import Allocate
    from .experts import ExpertStack, GroupedExperts
    from .methods import LinearMethod
    from .shards import Shard


@QUANTIZATIONS.register("int8wo", "int4wo-32", "int4wo-64", "int4wo-128", "int4wo-256")
@dataclass(frozen=True)
class IntWeightOnly:
    """``group`` inputs of an output share a scale (-1: all)."""

    methods: ClassVar = ()
    bits: int
    group: int

    @classmethod
    def from_config(cls, stated: Mapping[str, Any]) -> None:
        """Returns None: no checkpoint is in this format."""

    @classmethod
    def at_load(cls, name: str) -> IntWeightOnly:
        return cls(8, -1) if name == "int8wo" else cls(4, int(name.partition("-")[2]))

    def for_layer(self, name: str) -> IntWeightOnly:
        return self

    def check_device(self, dtype: str, device: torch.device) -> None:
        """Every device computes with integers, in any type."""

    def linear(self, shards: Sequence[Shard], width: int, allocate: Allocate) -> LinearMethod:
        from .int_at_load import int_linear_at_load

        return int_linear_at_load(shards, width, self.bits, self.group, allocate)

    def experts(self, gate_up: ExpertStack, down: ExpertStack, limit: float,
                activate: GateActivation | None = None) -> GroupedExperts:
        from .packed_int_linear import PackedIntExperts

        return PackedIntExperts(gate_up, down, limit, activate)
