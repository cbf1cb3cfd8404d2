"""Int8 weights and activations (W8A8): checkpoints of compressed-tensors and of ``w8a8_int8``, and weights quantized
while they are loaded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from ..api.errors import ConfigError
from ..config.quantization import COMPRESSED_GROUPS, QUANTIZATIONS, CompressedGroup, names_layer

if TYPE_CHECKING:
    import torch

    from ...kernels.gated_activation import GateActivation
    from ..weights.slots import Allocate
    from .experts import ExpertStack, GroupedExperts
    from .methods import LinearMethod
    from .shards import Shard


@QUANTIZATIONS.register("w8a8_int8")
@dataclass(frozen=True)
class Int8:
    """Weights and activations in int8, sums in int32.

    ``weights`` have one scale for each projection (``tensor``) or each output (``channel``). ``activations`` are scaled
    for each token at run time, or, ``static``, by one scale of the checkpoint; ``asymmetric`` ones have a zero point,
    too. ``stored``: the checkpoint has int8 weights and their scales; else it may have either these or weights in a
    floating-point type, which are quantized as they are loaded. The linear layers that ``ignored`` names stay as they
    are.
    """

    methods: ClassVar = ("w8a8_int8",)
    flags: ClassVar = ("w8a8_int8",)
    weights: Literal["tensor", "channel"] = "channel"
    activations: Literal["dynamic", "static"] = "dynamic"
    asymmetric: bool = False
    stored: bool = False
    ignored: tuple[str, ...] = ()

    @classmethod
    def from_config(cls, stated: Mapping[str, Any]) -> Int8:
        return cls(stored=True, ignored=(*(stated.get("modules_to_not_convert") or ()), *(stated.get("ignore") or ())))

    @classmethod
    def at_load(cls, name: str) -> Int8:
        return cls()

    def for_layer(self, name: str) -> Int8 | None:
        return None if names_layer(self.ignored, name) else self

    def check_device(self, dtype: str, device: torch.device) -> None:
        """Raises ConfigError for a GPU without products that a tensor map feeds."""
        import torch

        if device.type == "cuda" and torch.cuda.get_device_capability(device) < (9, 0):
            raise ConfigError(f"{torch.cuda.get_device_name(device)} does not run the kernels of int8 weights: use a "
                              "GPU of compute capability 9.0 or more, or a checkpoint in bfloat16.")

    def linear(self, shards: Sequence[Shard], width: int, allocate: Allocate) -> LinearMethod:
        from .int8_linear import Int8Linear

        return Int8Linear(shards, width, self, allocate)

    def experts(self, gate_up: ExpertStack, down: ExpertStack, limit: float,
                activate: GateActivation | None = None) -> GroupedExperts:
        from .experts import KernelExperts

        if self.activations == "static" or self.asymmetric:
            raise ConfigError(f"{gate_up.name} is quantized with static scales or zero points of activations, which is "
                              "not supported for experts: use a checkpoint with dynamic, symmetric ones, or one in "
                              "bfloat16 with --quantization w8a8_int8.")
        return KernelExperts(gate_up, down, limit, scales_by="row", activate=activate)


@COMPRESSED_GROUPS.register("int8")
def _compressed(group: CompressedGroup) -> Int8 | None:
    weights, inputs = group.weights, group.inputs
    if inputs is None or any((side.get("type"), side.get("num_bits")) != ("int", 8) for side in (weights, inputs)):
        return None
    strategy = weights.get("strategy")
    if strategy not in ("tensor", "channel") or not weights.get("symmetric", True):
        raise ConfigError("Int8 weights and activations are supported where the weights are symmetric and their "
                          "strategy is 'tensor' or 'channel'.")
    dynamic = bool(inputs.get("dynamic"))
    if inputs.get("strategy") != ("token" if dynamic else "tensor"):
        raise ConfigError("Int8 input_activations are supported where their strategy is 'token', dynamic, or 'tensor', "
                          "static.")
    return Int8(strategy, "dynamic" if dynamic else "static", not inputs.get("symmetric", True), stored=True)
