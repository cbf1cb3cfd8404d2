"""Quantization of a model's linear layers: by the checkpoint's ``quantization_config``, or while they are loaded.

It imports no torch, since it is part of the ModelSpec.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from ..api.errors import ConfigError

BLOCK = (128, 128)


@dataclass(frozen=True)
class QuantizationScheme:
    """Weights and activations in float8 (e4m3), sums in float32.

    ``weights`` have one scale for each projection (``tensor``), each output (``channel``), or each ``block`` of outputs
    x inputs. ``activations`` are scaled for each token (with blocks: each group of ``block[1]`` values of a token) at
    run time, or, ``static``, by one scale of the checkpoint. ``stored``: the checkpoint has float8 weights and scales
    named ``<projection>.<weight_scale>``; else weights are quantized as they are loaded. The linear layers that
    ``ignored`` names stay as they are; the embedding and the output head always do.
    """

    weights: Literal["tensor", "channel", "block"]
    activations: Literal["dynamic", "static"] = "dynamic"
    stored: bool = False
    block: tuple[int, int] = BLOCK
    weight_scale: str = "weight_scale"
    input_scale: str = "input_scale"
    ignored: tuple[str, ...] = ()

    def quantizes(self, name: str) -> bool:
        """Returns whether the linear layer with this name in the checkpoint is quantized."""
        return not any(_names(pattern, name) for pattern in self.ignored)


AS_LOADED = {"fp8": QuantizationScheme("channel"), "fp8_per_tensor": QuantizationScheme("tensor"),
             "fp8_per_block": QuantizationScheme("block")}
"""Schemes that are applied while weights are loaded, by the values of ``--quantization``."""


def scheme_of(config: Mapping[str, Any], flag: str | None) -> QuantizationScheme | None:
    """Reads the scheme from config.json and ``--quantization``; None for weights that are not quantized.

    Raises ConfigError for an unsupported format, which it names.
    """
    stated = config.get("quantization_config") or config.get("compression_config")
    method = (stated or {}).get("quant_method")
    if stated is None or method == "mxfp4":  # of the experts alone, which weights/interleaved_experts.py dequantizes
        return AS_LOADED[flag] if flag else None
    if method == "fp8":
        scheme = _fp8(stated)
    elif method == "compressed-tensors":
        scheme = _compressed_tensors(stated)
    else:
        raise ConfigError(f"Checkpoints quantized by {method!r} are not supported: use one in bfloat16, float16 or "
                          "float32, or one quantized to float8 by 'fp8' or 'compressed-tensors'.")
    if flag not in (None, "fp8"):
        raise ConfigError(f"--quantization {flag} is for checkpoints that are not quantized, and this one is: leave "
                          "the flag out.")
    return scheme


def _fp8(stated: Mapping[str, Any]) -> QuantizationScheme:
    """Reads transformers' finegrained float8 (which has ``weight_block_size``, possibly null), or AutoFP8's format."""
    activations = stated.get("activation_scheme", "dynamic")
    if activations not in ("dynamic", "static"):
        raise ConfigError(f"activation_scheme {activations!r} is not supported: it is 'dynamic' or 'static'.")
    ignored = (*(stated.get("modules_to_not_convert") or ()), *(stated.get("ignored_layers") or ()))
    if stated.get("weight_block_size"):
        if activations == "static":
            raise ConfigError("Block-wise float8 weights with a static activation_scheme are not supported: use a "
                              "checkpoint whose activation_scheme is 'dynamic'.")
        return QuantizationScheme("block", stored=True, block=_block(stated["weight_block_size"]),
                                  weight_scale="weight_scale_inv",
                                  ignored=ignored)
    if "weight_block_size" in stated:
        return QuantizationScheme("tensor", activations, True, BLOCK, "weight_scale_inv", "activation_scale", ignored)
    return QuantizationScheme("tensor", activations, stored=True, ignored=ignored)


def _compressed_tensors(stated: Mapping[str, Any]) -> QuantizationScheme:
    groups = list((stated.get("config_groups") or {}).values())
    if len(groups) != 1 or groups[0].get("targets") != ["Linear"]:
        raise ConfigError("Checkpoints of compressed-tensors are supported where config_groups has one group, with the "
                          "target 'Linear'.")
    weights, inputs = groups[0].get("weights") or {}, groups[0].get("input_activations")
    for name, side in (("weights", weights), ("input_activations", inputs)):
        if not side or side.get("type") != "float" or side.get("num_bits") != 8:
            raise ConfigError(f"Checkpoints of compressed-tensors are supported where weights and "
                              f"input_activations are 8-bit floats; {name} are {_describe(side)}.")
    assert inputs is not None
    strategy = weights.get("strategy")
    if strategy not in ("tensor", "channel", "block"):
        raise ConfigError(f"Weights quantized by {strategy!r} are not supported: by 'tensor', 'channel' or 'block'.")
    dynamic = bool(inputs.get("dynamic"))
    if not dynamic and (strategy == "block" or inputs.get("strategy") != "tensor"):
        raise ConfigError("Static input_activations are supported where their strategy and the weights' is 'tensor' "
                          "or 'channel'.")
    block = _block(weights.get("block_structure") or BLOCK) if strategy == "block" else BLOCK
    return QuantizationScheme(strategy, "dynamic" if dynamic else "static", stored=True, block=block,
                              ignored=tuple(stated.get("ignore") or ()))


def _block(size: Any) -> tuple[int, int]:
    if not (isinstance(size, (list, tuple)) and len(size) == 2 and all(isinstance(n, int) and n > 0 for n in size)):
        raise ConfigError(f"Weight blocks of size {size!r} are not supported: a block is [outputs, inputs].")
    return size[0], size[1]


def _describe(side: Mapping[str, Any] | None) -> str:
    return f"{side.get('num_bits')}-bit {side.get('type')}" if side else "not quantized"


def _names(pattern: str, name: str) -> bool:
    """Matches a name by a regular expression after ``re:``, else by some of its dotted parts: ``lm_head``,
    ``model.layers.0``."""
    if pattern.startswith("re:"):
        return re.match(pattern[3:], name) is not None
    return f".{pattern}." in f".{name}."
