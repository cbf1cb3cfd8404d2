"""Twins of kernels over rows, and over bytes."""

from __future__ import annotations

import ctypes

import torch

from ..arguments import NormWeight
from ..elementwise import by_element


def rmsnorm(x: torch.Tensor, weight: torch.Tensor, eps: float,
            residual: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Twin of ``rowwise.rmsnorm.rmsnorm``."""
    if residual is not None:
        x = x + residual
    wide = x.float()
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return ((wide * scale).to(weight.dtype) * weight).to(x.dtype), x


def gather_rows(table: torch.Tensor, rows: torch.Tensor, start: int | None = None) -> torch.Tensor:
    """Twin of ``rowwise.gather_rows.gather_rows``."""
    if start is None:
        return torch.nn.functional.embedding(rows, table)
    local = rows - start
    elsewhere = (local < 0) | (local >= len(table))
    return torch.nn.functional.embedding(local.masked_fill(elsewhere, 0), table).masked_fill_(elsewhere[:, None], 0)


def joined_norms(first: torch.Tensor, second: torch.Tensor, first_norm: NormWeight | None,
                 second_norm: NormWeight | None, rows: torch.Tensor | None = None) -> torch.Tensor:
    """Twin of ``rowwise.joined_norms.joined_norms``."""
    parts = first if rows is None else first[rows], second
    return torch.cat([part if norm is None else rmsnorm(part, *norm)[0]
                      for part, norm in zip(parts, (first_norm, second_norm))], -1)


def copy_blocks(src_address: int, dst_address: int, ids: torch.Tensor, block_bytes: int) -> None:
    """Twin of ``comm.copy_blocks.copy_blocks`` for host memory."""
    for source, target in ids.T.tolist():
        ctypes.memmove(dst_address + target * block_bytes, src_address + source * block_bytes, block_bytes)


def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    """Twin of ``rowwise.silu_and_mul.silu_and_mul``."""
    gate, up = x.float().chunk(2, dim=-1)
    return (torch.nn.functional.silu(gate) * up).to(x.dtype)


def gelu_and_mul(x: torch.Tensor, tanh: bool) -> torch.Tensor:
    """Twin of ``rowwise.gelu_and_mul.gelu_and_mul``."""
    gate, up = x.float().chunk(2, dim=-1)
    gelu = torch.nn.functional.gelu
    return (by_element(lambda part: gelu(part, approximate="tanh" if tanh else "none"), gate) * up).to(x.dtype)


def argmax(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Twin of ``sampling.argmax.argmax``."""
    columns = x.argmax(-1)
    return x.gather(-1, columns[:, None])[:, 0].float(), columns
