"""MXFP4 (OCP Microscaling Formats, 1.0), the format of gpt-oss's experts: converted to bfloat16 while it is loaded."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from ..api.errors import ConfigError
from ..config.quantization import QUANTIZATIONS, Packed, QuantFormat

if TYPE_CHECKING:
    from ..weights.lazy import LazyTensor


@QUANTIZATIONS.register("mxfp4")
class Mxfp4:
    """Checkpoints whose experts, and nothing else, are in MXFP4."""

    methods: ClassVar = ("mxfp4",)

    @classmethod
    def from_config(cls, stated: Mapping[str, Any]) -> Packed:
        return Packed(_unpack)

    @classmethod
    def at_load(cls, name: str) -> QuantFormat:
        raise ConfigError("--quantization mxfp4 is for checkpoints in MXFP4, and this one is not: leave the flag out, "
                          "or use fp8.")


def _unpack(name: str, tensor: LazyTensor,
            find: Callable[[str], LazyTensor]) -> Iterator[tuple[str, LazyTensor]]:
    from .mxfp4_experts import unpack

    return unpack(name, tensor, find)
