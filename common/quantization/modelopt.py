"""Float8 checkpoints of NVIDIA's Model Optimizer: a scale for each projection's weight and one for its inputs."""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import translate
from typing import Any, ClassVar

from ..api.errors import ConfigError
from ..config.quantization import COMPRESSED_GROUPS, QUANTIZATIONS, CompressedGroup, not_at_load
from .fp8 import Fp8


@QUANTIZATIONS.register("modelopt", "modelopt_fp8")
class ModelOpt:
    """Reads ``quantization`` of hf_quant_config.json, or what config.json says in its place."""

    methods: ClassVar = ("modelopt", "modelopt_fp8")

    @classmethod
    def from_config(cls, stated: Mapping[str, Any]) -> Fp8:
        facts = stated.get("quantization") or stated
        algorithm = facts.get("quant_algo")
        if algorithm != "FP8":
            raise ConfigError(f"Checkpoints of modelopt are supported in FP8, and this one is in {algorithm}: NVFP4 "
                              "needs GPUs newer than Hopper; use its checkpoint in FP8, or one of AWQ in 4 bits.")
        excluded = facts.get("exclude_modules") or facts.get("ignore") or ()
        return Fp8("tensor", "static", stored=True, ignored=tuple(
            f"re:{translate(pattern)}" if "*" in pattern else pattern for pattern in excluded))

    @classmethod
    def at_load(cls, name: str) -> Fp8:
        raise not_at_load(name, "of modelopt", instead="fp8")


@COMPRESSED_GROUPS.register("nvfp4")
def _compressed(group: CompressedGroup) -> None:
    """Raises ConfigError for NVFP4, which no GPU that Baton runs on multiplies."""
    if (group.weights.get("type"), group.weights.get("num_bits")) == ("float", 4):
        raise ConfigError("Weights in NVFP4 or MXFP4 of compressed-tensors are not supported: they need GPUs newer "
                          "than Hopper; use a checkpoint in float8, or with integers in 4 bits.")
