"""Rotary position embeddings: one table of cosines and sines by position, for every kind of scaling.

A key in the prefix cache is reused by any later prompt, so its rotation may depend on its position only. All kinds here
do so by nature, except dynamic NTK, whose base grows with the sequence; see ``_dynamic_angles``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from ..api.errors import ConfigError
from ..config.rope import RotarySpec


def rotary_table(rope: RotarySpec, dim: int, context_length: int, device: torch.device | str) -> torch.Tensor:
    """Returns the table ``[context_length, dim]`` float32 for heads of which ``dim`` values are rotated: cosines in the
    first half of a row, sines in the second."""
    positions = torch.arange(context_length, dtype=torch.float32)[:, None]
    scaling = rope.rope_scaling or {"rope_type": "default"}
    kind = scaling["rope_type"]
    magnitude = 1.0
    if kind == "dynamic":
        angles = _dynamic_angles(rope, dim, scaling, positions)
    else:
        frequencies = _frequencies(rope.rope_theta, dim)
        if kind == "linear":
            frequencies = frequencies / scaling["factor"]
        elif kind == "llama3":
            frequencies = _llama3(frequencies, scaling)
        elif kind == "yarn":
            frequencies, magnitude = _yarn(rope, dim, scaling)
        elif kind == "longrope":
            frequencies, magnitude = _longrope(frequencies, scaling, context_length)
        angles = positions * frequencies
    return torch.cat((angles.cos() * magnitude, angles.sin() * magnitude), dim=-1).to(device)


def _frequencies(base: float, dim: int) -> torch.Tensor:
    return 1.0 / base ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)


def _dynamic_angles(rope: RotarySpec, dim: int, scaling: Mapping[str, Any], positions: torch.Tensor) -> torch.Tensor:
    """Computes the angles of dynamic NTK: beyond the trained length, each position uses the base of a sequence that
    ends with it.

    That is what transformers computes when it generates token by token with a KV cache, and it does not change
    with the split into chunks. (A single long forward pass there uses the base of the whole sequence.)
    """
    factor, trained = scaling["factor"], rope.max_position_embeddings
    length = (positions.double() + 1).clamp(min=trained)
    base = rope.rope_theta * (factor * length / trained - (factor - 1)) ** (dim / (dim - 2))
    exponents = torch.arange(0, dim, 2, dtype=torch.float64) / dim
    result: torch.Tensor = positions * (1.0 / base ** exponents).float()
    return result


def _llama3(frequencies: torch.Tensor, scaling: Mapping[str, Any]) -> torch.Tensor:
    """Scales as Llama 3.1: long wavelengths are stretched by the factor, short ones unchanged, those between
    blended."""
    factor, low, high = (scaling[key] for key in ("factor", "low_freq_factor", "high_freq_factor"))
    rotations = scaling["original_max_position_embeddings"] * frequencies / (2 * math.pi)
    unscaled = ((rotations - low) / (high - low)).clamp(0, 1)
    result: torch.Tensor = (1 - unscaled) * frequencies / factor + unscaled * frequencies
    return result


def _longrope(frequencies: torch.Tensor, scaling: Mapping[str, Any], context_length: int) -> tuple[torch.Tensor, float]:
    """Scales by LongRoPE (arXiv:2402.13753); returns the attention's magnitude, too."""
    original, factor = scaling["original_max_position_embeddings"], scaling["factor"]
    length = "long" if context_length > original else "short"
    factors = torch.tensor(scaling[f"{length}_factor"], dtype=torch.float32)
    if len(factors) != len(frequencies):
        raise ConfigError(f"config.json has {len(factors)} values of {length}_factor for longrope, but heads of "
                          f"{2 * len(frequencies)} rotated values: it must have half as many.")
    magnitude = scaling.get(f"{length}_mscale") or scaling.get("attention_factor")  # the first is Phi-3.5-MoE's
    if magnitude is None:
        magnitude = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    return frequencies / factors, magnitude


def _yarn(rope: RotarySpec, dim: int, scaling: Mapping[str, Any]) -> tuple[torch.Tensor, float]:
    """Scales by YaRN (arXiv:2309.00071): blends by the number of rotations within the trained length, and returns the
    attention's magnitude, too."""
    factor = scaling["factor"]
    original = scaling["original_max_position_embeddings"]

    def dim_of(rotations: float) -> float:
        return dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(rope.rope_theta))

    low, high = dim_of(scaling.get("beta_fast") or 32), dim_of(scaling.get("beta_slow") or 1)
    if scaling.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    ramp = (torch.arange(dim // 2, dtype=torch.float32) - low) / ((high - low) or 0.001)
    stretched = ramp.clamp(0, 1)
    frequencies = _frequencies(rope.rope_theta, dim)
    return frequencies / factor * stretched + frequencies * (1 - stretched), _yarn_magnitude(scaling)


def _yarn_magnitude(scaling: Mapping[str, Any]) -> float:
    def of(mscale: float) -> float:
        return 0.1 * mscale * math.log(scaling["factor"]) + 1.0 if scaling["factor"] > 1 else 1.0

    if scaling.get("attention_factor") is not None:
        return float(scaling["attention_factor"])
    if scaling.get("mscale") and scaling.get("mscale_all_dim"):
        return of(scaling["mscale"]) / of(scaling["mscale_all_dim"])
    return of(1.0)
