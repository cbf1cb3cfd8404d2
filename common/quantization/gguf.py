"""Weights in a GGUF file's quantized blocks, each layer in the type that the file has for it."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from ...kernels.gguf_blocks import BLOCKS
from ..api.errors import ConfigError
from ..config.quantization import QUANTIZATIONS, not_at_load

if TYPE_CHECKING:
    import torch

    from ...kernels.gated_activation import GateActivation
    from ..weights.slots import Allocate
    from .experts import ExpertStack, GroupedExperts
    from .methods import LinearMethod
    from .shards import Shard


@QUANTIZATIONS.register("gguf")
@dataclass(frozen=True)
class Gguf:
    """``kinds`` has the block type of each linear layer that is quantized, by its name."""

    methods: ClassVar = ("gguf",)
    kinds: tuple[tuple[str, str], ...]

    @classmethod
    def from_config(cls, stated: Mapping[str, Any]) -> Gguf:
        if "kinds" not in stated:
            raise ConfigError("config.json says that the weights are GGUF's: let --model-path name the GGUF file.")
        return cls(tuple(sorted(stated["kinds"].items())))

    @classmethod
    def at_load(cls, name: str) -> Gguf:
        raise not_at_load(name, "in GGUF files", instead="fp8")

    @functools.cached_property
    def _by_name(self) -> dict[str, GgufBlocks]:
        return {name: GgufBlocks(kind) for name, kind in self.kinds}

    def for_layer(self, name: str) -> GgufBlocks | None:
        return self._by_name.get(name)

    def check_device(self, dtype: str, device: torch.device) -> None:
        """A CPU dequantizes by the kernels' twin."""
        from ...kernels._triton import AVAILABLE

        if device.type == "cuda" and not AVAILABLE:
            raise ConfigError("Quantized weights of GGUF files need Triton on a GPU, which is not installed: install "
                              "Baton's extra cuda.")


@dataclass(frozen=True)
class GgufBlocks:
    """Layers in blocks of one type."""

    kind: str

    def check_device(self, dtype: str, device: torch.device) -> None:
        """The file's format has checked it."""

    def linear(self, shards: Sequence[Shard], width: int, allocate: Allocate) -> LinearMethod:
        from .gguf_linear import GgufLinear

        values = BLOCKS[self.kind].values
        for shard in shards:
            if width % values or (shard.dim == 1 and shard.start % values):
                raise ConfigError(f"{shard.name} is in {self.kind}, whose blocks have {values} values, and a rank's "
                                  f"part has {width} inputs: choose a --tp-size that leaves whole blocks to each rank.")
        return GgufLinear(shards, width, self.kind, allocate)

    def experts(self, gate_up: ExpertStack, down: ExpertStack, limit: float,
                activate: GateActivation | None = None) -> GroupedExperts:
        raise ConfigError(f"{gate_up.name} is in {self.kind}, and experts are not computed in GGUF's blocks.")
