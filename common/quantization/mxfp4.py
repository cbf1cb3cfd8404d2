"""MXFP4 (OCP Microscaling Formats, 1.0), the format of gpt-oss's experts: kept, 4.25 bits a value, or converted while
it is loaded."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from ..config.quantization import QUANTIZATIONS, Packed, QuantFormat, not_at_load

if TYPE_CHECKING:
    import torch

    from ...kernels.gated_activation import GateActivation
    from ..weights.lazy import LazyTensor
    from ..weights.slots import Allocate
    from .experts import ExpertStack, GroupedExperts
    from .methods import LinearMethod
    from .shards import Shard


@QUANTIZATIONS.register("mxfp4")
@dataclass(frozen=True)
class Mxfp4:
    """Checkpoints whose experts, and nothing else, are in MXFP4. Activations are not quantized."""

    methods: ClassVar = ("mxfp4",)

    @classmethod
    def from_config(cls, stated: Mapping[str, Any]) -> Packed:
        return Packed(_unpack, cls(), _split)

    @classmethod
    def at_load(cls, name: str) -> QuantFormat:
        raise not_at_load(name, "in MXFP4", instead="fp8")

    def for_layer(self, name: str) -> Mxfp4 | None:
        return self if ".experts." in name else None

    def check_device(self, dtype: str, device: torch.device) -> None:
        """Every device converts the values to its type."""

    def linear(self, shards: Sequence[Shard], width: int, allocate: Allocate) -> LinearMethod:
        from .mxfp4_packed import Mxfp4Linear

        return Mxfp4Linear(shards, width, allocate)

    def experts(self, gate_up: ExpertStack, down: ExpertStack, limit: float,
                activate: GateActivation | None = None) -> GroupedExperts:
        from .mxfp4_packed import Mxfp4Experts

        return Mxfp4Experts(gate_up, down, limit, activate)


def _unpack(name: str, tensor: LazyTensor,
            find: Callable[[str], LazyTensor]) -> Iterator[tuple[str, LazyTensor]]:
    from .mxfp4_experts import unpack

    return unpack(name, tensor, find)


def _split(name: str, tensor: LazyTensor,
           find: Callable[[str], LazyTensor]) -> Iterator[tuple[str, LazyTensor]]:
    from .mxfp4_experts import split

    return split(name, tensor, find)
