"""The greatest value of each row, and where it is: argmax over rows so long that one needs many programs.

torch's reduction gives a row to one program: a vocabulary's logits then take 28 us on an H200, where 5 do.
"""

from __future__ import annotations

import torch

from .. import reference
from .._triton import pdl, runs_triton, start_next, tl, triton, wait_for_last

_CHUNK_BYTES = 16384


@triton.jit
def _place(values, columns, width):
    """The greatest of ``values`` [n] and the first of ``columns`` that has it; NaN is greater than all, as in torch."""
    nan = values != values
    any_nan = tl.max(nan.to(tl.int32), 0) > 0
    most = tl.max(tl.where(nan, float("-inf"), values), 0)
    first = tl.min(tl.where(tl.where(any_nan, nan, values == most), columns, width), 0)
    return tl.where(any_nan, float("nan"), most), first


@triton.jit
def _greatest_of_chunks_kernel(x_ptr, stride_row, most_ptr, first_ptr, width, BLOCK: tl.constexpr,
                               PDL: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    start_next(PDL)
    wait_for_last(PDL)
    columns = chunk * BLOCK + tl.arange(0, BLOCK)
    # Columns beyond the last equal a row of nothing but minus infinity, and come after all of it.
    x = tl.load(x_ptr + row * stride_row + columns, columns < width, other=float("-inf")).to(tl.float32)
    most, first = _place(x, columns, width)
    place = row * tl.num_programs(1) + chunk
    tl.store(most_ptr + place, most)
    tl.store(first_ptr + place, first)


@triton.jit
def _greatest_kernel(most_ptr, first_ptr, value_ptr, column_ptr, again_ptr, chunks, width, BLOCK: tl.constexpr,
                     PDL: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    start_next(PDL)
    wait_for_last(PDL)
    chunk = tl.arange(0, BLOCK)
    most = tl.load(most_ptr + row * chunks + chunk, chunk < chunks, other=float("-inf"))
    first = tl.load(first_ptr + row * chunks + chunk, chunk < chunks, other=width)
    value, column = _place(most, first, width)
    tl.store(value_ptr + row, value)
    tl.store(column_ptr + row, column.to(tl.int64))
    tl.store(again_ptr + row, column.to(tl.int64))


def greatest(x: torch.Tensor, again: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """``(values [R] float32, columns [R] int64)`` of ``x`` [R, width] of 16 or 32 bits, contiguous in its rows: what
    ``x.max(-1)`` gives, and of equal values the first column. The columns are written to ``again`` [R] int64, too: so
    the step behind finds its tokens without a copy."""
    if not runs_triton(x):
        values, columns = reference.greatest(x)
        if again is not None:
            again.copy_(columns)
        return values, columns
    rows, width = x.shape
    columns = torch.empty(rows, dtype=torch.int64, device=x.device)
    values = torch.empty(rows, dtype=torch.float32, device=x.device)
    block = _CHUNK_BYTES // x.element_size()
    chunks = triton.cdiv(width, block)
    most = torch.empty((rows, chunks), dtype=torch.float32, device=x.device)
    first = torch.empty((rows, chunks), dtype=torch.int32, device=x.device)
    if rows:
        _greatest_of_chunks_kernel[(rows, chunks)](x, x.stride(0), most, first, width, BLOCK=block, num_warps=8,
                                                   **pdl(x))
        _greatest_kernel[(rows,)](most, first, values, columns, columns if again is None else again, chunks, width,
                                  BLOCK=triton.next_power_of_2(chunks), num_warps=1, **pdl(x))
    return values, columns
