"""Multiplies two float8 matrices whose weights have a scale a block and whose rows one for each 128 values.

Many rows are multiplied by cuBLASLt (``torch.nn.functional.scaled_mm``, on a Hopper GPU with CUDA 12.9 or later): 1,260
TFLOP/s on an H200, where our kernel reaches 1,000. Other sizes, and fewer rows, are our kernel's.
"""

from __future__ import annotations

from functools import cache, lru_cache

import torch
from torch.nn import functional

from .. import reference
from .._triton import runs_triton
from ..device import is_hopper
from ..tuning.policy import policy_of
from .fp8_matmul import GROUP, fp8_matmul

_LIBRARY_ROWS_MULTIPLE = 4


def block_matmul(x: torch.Tensor, x_scale: torch.Tensor, weight: torch.Tensor, weight_scale: torch.Tensor,
                 block: tuple[int, int], dtype: torch.dtype) -> torch.Tensor:
    """``[T, out]`` in ``dtype`` of ``x`` [T, in] float8 with ``x_scale`` [T, ceil(in / block[1])] and ``weight``
    [out, in] float8 with ``weight_scale`` [ceil(out / block[0]), ceil(in / block[1])]; scales float32, all contiguous
    but ``x_scale``.

    The kernels take blocks that are 128 wide, and ``in`` that is a multiple of 16.
    """
    if not runs_triton(x):
        return reference.block_matmul(x, x_scale, weight, weight_scale, block, dtype)
    assert block[1] == GROUP
    max_rows = policy_of(x.device).float8.max_rows
    if len(x) > max_rows and block[0] == GROUP and dtype == torch.bfloat16 and _library_supports(weight, weight_scale):
        return _by_library(x, x_scale, weight, weight_scale)
    return fp8_matmul(x, x_scale, weight, weight_scale, "block", dtype, tall=block[0])


def _library_supports(weight: torch.Tensor, weight_scale: torch.Tensor) -> bool:
    """Checks sizes: the library needs rows of scales that begin at multiples of 16 bytes."""
    return _has_library(weight.device) and weight.shape[0] % 16 == 0 and weight_scale.shape[1] % 4 == 0


@cache
def _has_library(device: torch.device) -> bool:
    if not is_hopper(device) or not hasattr(functional, "scaled_mm"):
        return False
    assert torch.version.cuda is not None
    return tuple(map(int, torch.version.cuda.split(".")[:2])) >= (12, 9)


def _by_library(x: torch.Tensor, x_scale: torch.Tensor, weight: torch.Tensor,
                weight_scale: torch.Tensor) -> torch.Tensor:
    rows = len(x)
    x, x_scale = _with_padded_rows(x, x_scale)
    by = functional.ScalingType
    y = functional.scaled_mm(x, weight.t(), x_scale, by.BlockWise1x128, weight_scale.t(), by.BlockWise128x128,
                             output_dtype=torch.bfloat16)
    return y[:rows]


def _with_padded_rows(x: torch.Tensor, x_scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Pad to a number of rows that the library takes; the added rows hold arbitrary values. ``quantize`` has allocated
    them, and rows from elsewhere are copied. The scales of one group are contiguous."""
    rows, whole = len(x), -(-len(x) // _LIBRARY_ROWS_MULTIPLE) * _LIBRARY_ROWS_MULTIPLE
    if x_scale.stride() != (1, whole):
        padded = torch.ones((x_scale.shape[1], whole), device=x.device)
        padded[:, :rows] = x_scale.t()
        x_scale = padded.t()[:rows]
    if whole > rows:
        if x.untyped_storage().nbytes() < x.storage_offset() + whole * x.shape[1]:
            x = functional.pad(x.view(torch.uint8), (0, 0, 0, whole - rows)).view(x.dtype)
        x = x.as_strided((whole, x.shape[1]), (x.shape[1], 1))
        x_scale = x_scale.as_strided((whole, x_scale.shape[1]), (1, whole))
    return x, x_scale


@lru_cache
def compile_tiles(out: int, width: int, block_out: int, dtype: torch.dtype, device: torch.device) -> None:
    """Compile the kernels of all numbers of rows for such a weight, so that no request waits for the compiler."""
    weight = torch.zeros((out, width), dtype=torch.float8_e4m3fn, device=device)
    groups = -(-width // GROUP)
    scale = torch.zeros((-(-out // block_out), groups), dtype=torch.float32, device=device)
    for rows in (1, 65, policy_of(device).float8.numbers.max_rows + 1):
        x = torch.zeros((rows, width), dtype=weight.dtype, device=device)
        x_scale = torch.zeros((rows, groups), dtype=torch.float32, device=device)
        block_matmul(x, x_scale, weight, scale, (block_out, GROUP), dtype)
