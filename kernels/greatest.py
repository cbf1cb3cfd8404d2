"""The greatest value of each row, and where it is: argmax over rows so long that one needs many programs.

torch's reduction gives a row to one program: a vocabulary's logits then take 28 us on an H200, where 5 do. Logits of 16
bits are made float32 by the kernel that looks at them: so they are read once.
"""

from __future__ import annotations

import torch

from . import reference
from ._triton import pdl, runs_triton, start_next, tl, triton, wait_for_last

_CHUNK = 4096


@triton.jit
def _place(values, columns, width):
    """The greatest of ``values`` [n] and the first of ``columns`` that has it; NaN is greater than all, as in torch."""
    nan = values != values
    any_nan = tl.max(nan.to(tl.int32), 0) > 0
    most = tl.max(tl.where(nan, float("-inf"), values), 0)
    first = tl.min(tl.where(tl.where(any_nan, nan, values == most), columns, width), 0)
    return tl.where(any_nan, float("nan"), most), first


@triton.jit
def _greatest_of_chunks_kernel(x_ptr, stride_row, wide_ptr, most_ptr, first_ptr, width, WIDENS: tl.constexpr,
                               BLOCK: tl.constexpr, PDL: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    start_next(PDL)
    wait_for_last(PDL)
    columns = chunk * BLOCK + tl.arange(0, BLOCK)
    # Columns beyond the last equal a row of nothing but minus infinity, and come after all of it.
    x = tl.load(x_ptr + row * stride_row + columns, columns < width, other=float("-inf")).to(tl.float32)
    if WIDENS:
        tl.store(wide_ptr + row * width + columns, x, columns < width)
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


def greatest(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """``(values [R], columns [R] int64)`` of ``x`` [R, width] float32, contiguous in its rows: what ``x.max(-1)``
    gives, and of equal values the first column."""
    if not runs_triton(x):
        return reference.greatest(x)
    columns = torch.empty(len(x), dtype=torch.int64, device=x.device)
    return _launch(x, x, columns, columns), columns


def widened_and_greatest(x: torch.Tensor, again: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """``(x in float32 [R, width], columns [R] int64 of greatest)`` of ``x`` [R, width], contiguous in its rows; itself
    where it is float32. The columns are written to ``again`` [R] int64, too: so the step behind finds its tokens
    without a copy."""
    if not runs_triton(x):
        again.copy_(reference.greatest(x.float())[1])
        return x.float(), again.clone()
    wide = x if x.dtype == torch.float32 else torch.empty(x.shape, dtype=torch.float32, device=x.device)
    columns = torch.empty_like(again)
    _launch(x, wide, columns, again)
    return wide, columns


def _launch(x: torch.Tensor, wide: torch.Tensor, columns: torch.Tensor, again: torch.Tensor) -> torch.Tensor:
    """The greatest values of ``x``, which becomes ``wide`` where that is another tensor; their columns are written."""
    rows, width = x.shape
    values = torch.empty(rows, dtype=torch.float32, device=x.device)
    chunks = triton.cdiv(width, _CHUNK)
    most = torch.empty((rows, chunks), dtype=torch.float32, device=x.device)
    first = torch.empty((rows, chunks), dtype=torch.int32, device=x.device)
    if rows:
        _greatest_of_chunks_kernel[(rows, chunks)](x, x.stride(0), wide, most, first, width, WIDENS=wide is not x,
                                                   BLOCK=_CHUNK, num_warps=8, **pdl(x))
        _greatest_kernel[(rows,)](most, first, values, columns, again, chunks, width,
                                  BLOCK=triton.next_power_of_2(chunks), num_warps=1, **pdl(x))
    return values
