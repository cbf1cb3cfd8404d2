"""Quantizes weights to float8 and back: matrices, or stacks of them such as a layer's experts."""

from __future__ import annotations

import torch
from torch.nn.functional import pad

from ...kernels.reference import FP8_LARGEST, FP8_LEAST
from ..api.errors import ConfigError
from ..weights.slots import DUMMY_STD, TensorKind

FLOAT8 = torch.float8_e4m3fn

_DUMMY_SCALE = 2.0**-12
"""With this weight scale a deviation of 0.02 takes a fifth of float8's range."""
FLOAT8_VALUES = TensorKind("float8 (e4m3)", "F8_E4M3", dummy_std=DUMMY_STD / _DUMMY_SCALE, dummy_limit=FP8_LARGEST)
"""Values whose scales are tensors of their own. Of billions of dummy ones some lie beyond float8's largest, and would
become NaN."""
WEIGHT_SCALE = TensorKind("weight scale", keeps_ones=False, dummy_value=_DUMMY_SCALE)
INPUT_SCALE = TensorKind("input scale", keeps_ones=False, dummy_value=2.0**-5)
"""Activations of up to 14 fit the dummy scale."""


def quantize_tensor(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantizes ``[..., out, in]`` to float8 and one float32 scale a matrix, ``[...]``."""
    return _scaled(weight.float(), (-2, -1))


def quantize_channels(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantizes ``[..., out, in]`` to float8 and a scale an output, ``[..., out]``."""
    return _scaled(weight.float(), (-1,))


def quantize_blocks(weight: torch.Tensor, block: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantizes ``[..., out, in]`` to float8 and a scale a block, ``[..., ceil(out / block[0]), ceil(in /
    block[1])]``."""
    out, width = weight.shape[-2:]
    tall, wide = -(-out // block[0]), -(-width // block[1])
    padded = pad(weight.float(), (0, wide * block[1] - width, 0, tall * block[0] - out))
    tiles = padded.unflatten(-1, (wide, block[1])).unflatten(-3, (tall, block[0]))  # [..., tall, block, wide, block]
    q, scale = _scaled(tiles, (-3, -1))
    return q.flatten(-2).flatten(-3, -2)[..., :out, :width].contiguous(), scale


def dequantize_blocks(weight: torch.Tensor, scale: torch.Tensor, block: tuple[int, int]) -> torch.Tensor:
    """Dequantizes ``[..., out, in]`` and its scales, as ``quantize_blocks`` returns them, to float32."""
    out, width = weight.shape[-2:]
    spread = scale.float().repeat_interleave(block[0], -2).repeat_interleave(block[1], -1)
    return weight.float() * spread[..., :out, :width]


def _scaled(wide: torch.Tensor, dims: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    scale = wide.abs().amax(dims, keepdim=True).clamp(min=FP8_LEAST) / FP8_LARGEST
    q = (wide / scale).clamp(-FP8_LARGEST, FP8_LARGEST).to(FLOAT8)
    return q, scale.squeeze(dims)


def check_float8(device: torch.device, instead: str) -> None:
    """Raises ConfigError for a GPU without float8 tensor cores; ``instead`` names the alternative."""
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 9):
        raise ConfigError(f"{torch.cuda.get_device_name(device)} does not compute in float8: use a GPU of compute "
                          f"capability 8.9 or more, or {instead}.")
