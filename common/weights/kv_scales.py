"""Scales of a KV cache in float8: from a file, or from the checkpoint. A scale too small cuts off what is beyond."""

from __future__ import annotations

import json
import re
from itertools import chain
from pathlib import Path
from typing import Any

from ..api.errors import ConfigError
from ..config.server import CacheArgs
from .files import checkpoint_files, tensors_of

KV_DTYPES = {"fp8_e4m3": "float8_e4m3fn", "fp8_e5m2": "float8_e5m2"}
"""torch's names by ``--kv-cache-dtype``."""

Scales = tuple[tuple[float, float], ...]
"""``(keys', values')`` of each layer; empty where all are 1."""

_NAME = re.compile(r"(?:model\.)?layers\.(\d+)\.self_attn\.(?:[kv]_proj\.)?(k|v|kv)_scale")


def is_kv_scale(name: str) -> bool:
    """Whether a checkpoint's tensor is a scale of its KV cache, which no parameter takes."""
    return _NAME.fullmatch(name) is not None


def read_kv_scales(args: CacheArgs, folder: Path | None, num_layers: int) -> Scales:
    """For a cache in float8: of the file that ``args`` names, else of the checkpoint in ``folder``; without one (dummy
    weights) they are 1.

    Raises ConfigError for a file that does not have them, and a checkpoint that cannot be read.
    """
    if args.quantization_param_path is not None:
        return _of_file(Path(args.quantization_param_path).expanduser(), num_layers)
    return _of_checkpoint(folder, num_layers) if folder is not None else ()


def _of_file(path: Path, num_layers: int) -> Scales:
    """The form of SGLang's and vLLM's files: a factor a tensor-parallel rank and layer. Ranks that hold other heads
    share one scale here, the greatest, which covers them all."""
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


def _of_checkpoint(folder: Path, num_layers: int) -> Scales:
    found: dict[tuple[int, str], float] = {}
    for name, source in chain.from_iterable(map(tensors_of, checkpoint_files(folder))):
        if match := _NAME.fullmatch(name):
            value = float(source[...].float().max())
            for side in match[2]:
                # Placeholders of scales that were never measured are -1 or 0.
                found[int(match[1]), side] = value if value > 0 else 1.0
    scales = tuple((found.get((layer, "k"), 1.0), found.get((layer, "v"), 1.0)) for layer in range(num_layers))
    return scales if any(pair != (1.0, 1.0) for pair in scales) else ()
