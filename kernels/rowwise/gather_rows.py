"""Gathers rows of a table by their numbers: an embedding.

torch's kernel for few rows takes 8 us for eight rows of 8 KiB on an H200, where a step's first product waits for it.
"""

from __future__ import annotations

import torch

from .._triton import runs_triton, tl, triton

_CHUNK = 1024


@triton.jit
def _gather_rows_kernel(table_ptr, row_ptr, y_ptr, width, CHUNK: tl.constexpr):
    index = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    row = tl.load(row_ptr + index)
    inside = column < width
    tl.store(y_ptr + index * width + column, tl.load(table_ptr + row * width + column, inside), inside)


def gather_rows(table: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """``table[rows]`` [T, width], of a contiguous ``table`` [R, width] and ``rows`` [T] int64, all within the table."""
    if not runs_triton(table):
        return torch.nn.functional.embedding(rows, table)
    width = table.shape[1]
    y = torch.empty((len(rows), width), dtype=table.dtype, device=table.device)
    if len(rows):
        _gather_rows_kernel[(len(rows), triton.cdiv(width, _CHUNK))](table, rows, y, width, CHUNK=_CHUNK)
    return y
