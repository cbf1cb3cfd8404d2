"""Twins of kernels over rows, and over bytes."""

from __future__ import annotations

import ctypes

import torch


def rmsnorm(x: torch.Tensor, weight: torch.Tensor, eps: float,
            residual: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Twin of ``rowwise.rmsnorm.rmsnorm``."""
    if residual is not None:
        x = x + residual
    wide = x.float()
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (wide * scale).to(x.dtype) * weight, x


def copy_blocks(src_address: int, dst_address: int, ids: torch.Tensor, block_bytes: int) -> None:
    """Twin of ``comm.copy_blocks.copy_blocks`` for host memory."""
    for source, target in ids.T.tolist():
        ctypes.memmove(dst_address + target * block_bytes, src_address + source * block_bytes, block_bytes)


def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    """Twin of ``rowwise.silu_and_mul.silu_and_mul``."""
    gate, up = x.float().chunk(2, dim=-1)
    return (torch.nn.functional.silu(gate) * up).to(x.dtype)


def argmax(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Twin of ``sampling.argmax.argmax``."""
    columns = x.argmax(-1)
    return x.gather(-1, columns[:, None])[:, 0].float(), columns
