"""Float8 (e4m3) weights and activations: the checkpoints of the ``fp8`` and ``compressed-tensors`` methods, and weights
quantized while they are loaded."""

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

BLOCK = (128, 128)
Granularity = Literal["tensor", "channel", "block"]


@QUANTIZATIONS.register("fp8", "fp8_per_tensor", "fp8_per_block", "w8a8_fp8")
@dataclass(frozen=True)
class Fp8:
    """Weights and activations in float8 (e4m3), sums in float32.

    ``weights`` have one scale for each projection (``tensor``), each output (``channel``), or each ``block`` of outputs
    x inputs. ``activations`` are scaled for each token (with blocks: each group of ``block[1]`` values of a token) at
    run time, or, ``static``, by one scale of the checkpoint. ``stored``: the checkpoint has float8 weights and scales
    named ``<projection>.<weight_scale>``; else weights are quantized as they are loaded. The linear layers that
    ``ignored`` names stay as they are; the embedding and the output head always do.
    """

    methods: ClassVar = ("fp8",)
    flags: ClassVar = ("fp8", "w8a8_fp8")
    weights: Granularity
    activations: Literal["dynamic", "static"] = "dynamic"
    stored: bool = False
    block: tuple[int, int] = BLOCK
    weight_scale: str = "weight_scale"
    input_scale: str = "input_scale"
    ignored: tuple[str, ...] = ()

    @classmethod
    def from_config(cls, stated: Mapping[str, Any]) -> Fp8:
        return _fp8(stated)

    @classmethod
    def at_load(cls, name: str) -> Fp8:
        return AS_LOADED[name]

    def for_layer(self, name: str) -> Fp8 | None:
        return None if names_layer(self.ignored, name) else self

    def check_device(self, dtype: str, device: torch.device) -> None:
        """A CPU emulates every scheme in any type."""
        from ...kernels.float8.fp8_matmul import GROUP
        from .float8 import check_float8

        if device.type != "cuda":
            return
        check_float8(device, "a checkpoint in bfloat16")
        if dtype != "bfloat16":
            raise ConfigError(f"Float8 weights are served with --dtype bfloat16 on a GPU, not {dtype}.")
        if self.weights == "block" and self.block[1] != GROUP:
            raise ConfigError(f"Blocks of {self.block[0]} x {self.block[1]} are not supported on a GPU: use a "
                              f"checkpoint whose weight_block_size is [{GROUP}, {GROUP}].")

    def linear(self, shards: Sequence[Shard], width: int, allocate: Allocate) -> LinearMethod:
        from .fp8_block import Fp8Block
        from .fp8_per_channel import Fp8PerChannel

        return (Fp8Block if self.weights == "block" else Fp8PerChannel)(shards, width, self, allocate)

    def experts(self, gate_up: ExpertStack, down: ExpertStack, limit: float,
                activate: GateActivation | None = None) -> GroupedExperts:
        from .experts import KernelExperts

        if self.weights == "block" and self.block != BLOCK:
            raise ConfigError(f"{gate_up.name} is quantized in blocks of {self.block[0]} x {self.block[1]}; experts "
                              f"are computed in blocks of {BLOCK[0]} x {BLOCK[1]}: use a checkpoint with those.")
        if self.activations == "static":
            raise ConfigError(f"{gate_up.name} is quantized with static scales of activations, which is not supported "
                              "for experts: use a checkpoint with dynamic ones, or one in bfloat16 with --quantization "
                              "fp8.")
        return KernelExperts(gate_up, down, limit, scales_by="block" if self.weights == "block" else "row",
                             activate=activate)


AS_LOADED = {"fp8": Fp8("channel"), "fp8_per_tensor": Fp8("tensor"), "fp8_per_block": Fp8("block"),
             "w8a8_fp8": Fp8("channel")}
"""Formats that are applied while weights are loaded, by the values of ``--quantization``."""


def _fp8(stated: Mapping[str, Any]) -> Fp8:
    """Reads transformers' finegrained float8 (which has ``weight_block_size``, possibly null), or AutoFP8's format."""
    activations = stated.get("activation_scheme", "dynamic")
    if activations not in ("dynamic", "static"):
        raise ConfigError(f"activation_scheme {activations!r} is not supported: it is 'dynamic' or 'static'.")
    ignored = (*(stated.get("modules_to_not_convert") or ()), *(stated.get("ignored_layers") or ()))
    if stated.get("weight_block_size"):
        if activations == "static":
            raise ConfigError("Block-wise float8 weights with a static activation_scheme are not supported: use a "
                              "checkpoint whose activation_scheme is 'dynamic'.")
        return Fp8("block", stored=True, block=_block(stated["weight_block_size"]),
                   weight_scale="weight_scale_inv", ignored=ignored)
    if "weight_block_size" in stated:
        return Fp8("tensor", activations, True, BLOCK, "weight_scale_inv", "activation_scale", ignored)
    return Fp8("tensor", activations, stored=True, ignored=ignored)


@COMPRESSED_GROUPS.register("float8")
def _compressed(group: CompressedGroup) -> Fp8 | None:
    weights, inputs = group.weights, group.inputs
    if inputs is None or any((side.get("type"), side.get("num_bits")) != ("float", 8) for side in (weights, inputs)):
        return None
    strategy = weights.get("strategy")
    if strategy not in ("tensor", "channel", "block"):
        raise ConfigError(f"Weights quantized by {strategy!r} are not supported: by 'tensor', 'channel' or 'block'.")
    dynamic = bool(inputs.get("dynamic"))
    if not dynamic and (strategy == "block" or inputs.get("strategy") != "tensor"):
        raise ConfigError("Static input_activations are supported where their strategy and the weights' is 'tensor' "
                          "or 'channel'.")
    block = _block(weights.get("block_structure") or BLOCK) if strategy == "block" else BLOCK
    return Fp8(strategy, "dynamic" if dynamic else "static", stored=True, block=block)


def _block(size: Any) -> tuple[int, int]:
    if not (isinstance(size, (list, tuple)) and len(size) == 2 and all(isinstance(n, int) and n > 0 for n in size)):
        raise ConfigError(f"Weight blocks of size {size!r} are not supported: a block is [outputs, inputs].")
    return size[0], size[1]

