"""Weights of bitsandbytes: NF4 and FP4 (arXiv:2305.14314) in blocks of 64 values, also with quantized scales, and int8
with a scale for each output (arXiv:2208.07339). Activations are not quantized."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from ..api.errors import ConfigError
from ..config.quantization import QUANTIZATIONS, Packed, names_layer

if TYPE_CHECKING:
    import torch

    from ...kernels.gated_activation import GateActivation
    from ..weights.lazy import LazyTensor
    from ..weights.slots import Allocate
    from .experts import ExpertStack, GroupedExperts
    from .methods import LinearMethod
    from .shards import Shard

Kind = Literal["nf4", "fp4", "int8"]
BLOCK = 64
"""Values of NF4 and FP4 that share a scale."""


@QUANTIZATIONS.register("bitsandbytes")
@dataclass(frozen=True)
class BitsAndBytes:
    """``stored``: the checkpoint has packed weights; else weights are quantized as they are loaded. The linear layers
    that ``ignored`` names stay as they are."""

    methods: ClassVar = ("bitsandbytes",)
    flags: ClassVar = ("bitsandbytes",)
    kind: Kind = "nf4"
    stored: bool = False
    ignored: tuple[str, ...] = ()

    @classmethod
    def from_config(cls, stated: Mapping[str, Any]) -> BitsAndBytes | Packed:
        ignored = tuple(stated.get("llm_int8_skip_modules") or ())
        if stated.get("load_in_8bit") or stated.get("_load_in_8bit"):
            return cls("int8", True, ignored)
        kind = stated.get("bnb_4bit_quant_type", "fp4")
        if kind not in ("nf4", "fp4"):
            raise ConfigError(f"Weights of bitsandbytes of the type {kind!r} are not supported: use nf4, fp4 or int8.")
        return Packed(_unpack, cls(kind, True, ignored), _split)

    @classmethod
    def at_load(cls, name: str) -> BitsAndBytes:
        return cls()

    def for_layer(self, name: str) -> BitsAndBytes | None:
        return None if names_layer(self.ignored, name) else self

    def check_device(self, dtype: str, device: torch.device) -> None:
        """Every device converts the values to its type."""

    def linear(self, shards: Sequence[Shard], width: int, allocate: Allocate) -> LinearMethod:
        from .bitsandbytes_linear import bnb_int8_linear, bnb_linear

        if self.kind == "int8":
            return bnb_int8_linear(shards, width, allocate)
        return bnb_linear(shards, width, self.kind, self.stored, allocate)

    def experts(self, gate_up: ExpertStack, down: ExpertStack, limit: float,
                activate: GateActivation | None = None) -> GroupedExperts:
        from .packed_int_linear import PackedIntExperts

        return PackedIntExperts(gate_up, down, limit, activate)


def _unpack(name: str, tensor: LazyTensor, find: Callable[[str], LazyTensor]) -> Iterator[tuple[str, LazyTensor]]:
    from .bitsandbytes_tensors import unpack

    return unpack(name, tensor, find)


def _split(name: str, tensor: LazyTensor, find: Callable[[str], LazyTensor]) -> Iterator[tuple[str, LazyTensor]]:
    from .bitsandbytes_tensors import split

    return split(name, tensor, find)
