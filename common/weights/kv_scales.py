"""Scales of a float8 KV cache: from a file, or from the checkpoint. Too small a scale clips larger values."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from ..api.errors import ConfigError
from ..config.server import CacheArgs
from .source import WeightSource

KV_DTYPES = {"fp8_e4m3": "float8_e4m3fn", "fp8_e5m2": "float8_e5m2"}
"""torch's dtype names by ``--kv-cache-dtype``."""

Scales = tuple[tuple[float, float], ...]
"""``(key scale, value scale)`` of each layer; empty where all are 1."""

_NAME = re.compile(r"(?:model\.)?layers\.(\d+)\.self_attn\.(?:(?:(?:[kv]_proj\.|qkv_proj\.|attn\.)?(k|v|kv)_scale)"
                   r"|(?:([kv])_proj\.output_scale))")
"""Names by AutoFP8, compressed-tensors, modelopt and those who took them over."""


def is_kv_scale(name: str) -> bool:
    """Returns whether a checkpoint's tensor is a scale of its KV cache, which belongs to no parameter."""
    return _NAME.fullmatch(name) is not None


def read_kv_scales(args: CacheArgs, source: WeightSource, num_layers: int) -> Scales:
    """Reads the scales of a float8 cache from the file that ``args`` names, else from the weights' ``source``;
    those that it lacks are 1.

    Raises ConfigError for a file that does not have them, and a checkpoint that cannot be read.
    """
    if args.quantization_param_path is not None:
        return _read_file(Path(args.quantization_param_path).expanduser(), num_layers)
    return _read_source(source, num_layers)


def _read_file(path: Path, num_layers: int) -> Scales:
    """Reads the format of SGLang and vLLM: a factor for each tensor-parallel rank and layer. Here all ranks share one
    scale, the largest, which covers all heads."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"Cannot read --quantization-param-path {path}: {error}.") from None
    ranks = _member(_member(content, "kv_cache"), "scaling_factor")
    scales = []
    for layer in range(num_layers):
        factors = [_member(rank, str(layer)) for rank in ranks.values()] if isinstance(ranks, dict) else []
        if not factors or not all(isinstance(factor, (int, float)) and factor > 0 for factor in factors):
            raise ConfigError(f"--quantization-param-path {path} must hold a positive number for layer {layer} in each "
                              'rank of {"kv_cache": {"scaling_factor": {RANK: {LAYER: FACTOR}}}}.')
        scales.append((float(max(factors)), float(max(factors))))
    return tuple(scales)


def _member(content: Any, key: str) -> Any:
    return content.get(key) if isinstance(content, dict) else None


def _read_source(source: WeightSource, num_layers: int) -> Scales:
    factors: dict[tuple[int, str], float] = {}
    for name, tensor, _ in source.tensors(()):
        if match := _NAME.fullmatch(name):
            value = float(tensor[...].float().max())
            for kind in match[2] or match[3]:
                # Placeholders of scales that were never measured are -1 or 0.
                factors[int(match[1]), kind] = value if value > 0 else 1.0
    scales = tuple((factors.get((layer, "k"), 1.0), factors.get((layer, "v"), 1.0)) for layer in range(num_layers))
    return scales if any(pair != (1.0, 1.0) for pair in scales) else ()
