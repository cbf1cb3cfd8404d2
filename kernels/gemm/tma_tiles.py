"""Descriptors of matrices for the tensor memory accelerator (TMA) of a Hopper GPU."""

from __future__ import annotations

import torch
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor


def tma_descriptor(matrix: torch.Tensor, rows: int, columns: int) -> TensorDescriptor:
    """Describes tiles of ``matrix`` [R, C], contiguous in its columns; swizzled in shared memory over 128 bytes, or
    over a row where that is less."""
    layout = gl.NVMMASharedLayout(min(128, columns * matrix.itemsize), 8 * matrix.itemsize, 2)
    return TensorDescriptor(matrix, list(matrix.shape), list(matrix.stride()), [rows, columns], layout)
