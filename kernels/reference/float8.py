"""Twins of kernels that quantize rows."""

from __future__ import annotations

import torch

FP8_LARGEST = 448.0
"""The largest value of e4m3."""
FP8_LEAST = 1e-12
"""The smallest magnitude that a scale is made for: a group of zeros has a scale too."""


def quantize_groups(x: torch.Tensor, group: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Twin of ``rowwise.fp8_quantize.quantize_groups``."""
    rows, width = x.shape
    groups = -(-width // group)
    padded = torch.nn.functional.pad(x.float(), (0, groups * group - width)).view(rows, groups, group)
    scale = padded.abs().amax(-1).clamp(min=FP8_LEAST) / FP8_LARGEST
    q = (padded / scale[..., None]).clamp(-FP8_LARGEST, FP8_LARGEST).to(torch.float8_e4m3fn)
    return q.view(rows, -1)[:, :width].contiguous(), scale


def quantize_by(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Twin of ``rowwise.fp8_quantize.quantize_by``."""
    return (x.float() / scale).clamp(-FP8_LARGEST, FP8_LARGEST).to(torch.float8_e4m3fn)
