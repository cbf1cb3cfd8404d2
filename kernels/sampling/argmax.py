"""Argmax and maximum of rows so long that one needs many programs.

torch's reduction gives a row to one program: a vocabulary's logits then take 28 us on an H200, where 5 do.
"""

from __future__ import annotations

import torch

from .. import reference
from .._triton import pdl, runs_triton, start_next, tl, triton, wait_for_last

_CHUNK_BYTES = 16384


@triton.jit
def argmax_of(values, columns, width):
    """The maximum of ``values`` [n] and the first of ``columns`` that has it; NaN is larger than all, as in torch."""
    nan = values != values
    any_nan = tl.max(nan.to(tl.int32), 0) > 0
    top = tl.max(tl.where(nan, float("-inf"), values), 0)
    index = tl.min(tl.where(tl.where(any_nan, nan, values == top), columns, width), 0)
    return tl.where(any_nan, float("nan"), top), index


@triton.jit
def _argmax_of_chunks_kernel(x_ptr, stride_row, top_ptr, index_ptr, width, BLOCK: tl.constexpr, PDL: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    start_next(PDL)
    wait_for_last(PDL)
    columns = chunk * BLOCK + tl.arange(0, BLOCK)
    # Columns beyond the last equal a row of nothing but minus infinity, and come after all of it.
    x = tl.load(x_ptr + row * stride_row + columns, columns < width, other=float("-inf")).to(tl.float32)
    top, index = argmax_of(x, columns, width)
    offset = row * tl.num_programs(1) + chunk
    tl.store(top_ptr + offset, top)
    tl.store(index_ptr + offset, index)


@triton.jit(do_not_specialize=["copy_stride"], do_not_specialize_on_alignment=["copy_ptr"])
def _argmax_kernel(top_ptr, index_ptr, ids_ptr, value_ptr, column_ptr, copy_ptr, copy_stride, chunks, width,
                   MAPPED: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    start_next(PDL)
    wait_for_last(PDL)
    chunk = tl.arange(0, BLOCK)
    top = tl.load(top_ptr + row * chunks + chunk, chunk < chunks, other=float("-inf"))
    index = tl.load(index_ptr + row * chunks + chunk, chunk < chunks, other=width)
    value, column = argmax_of(top, index, width)
    result = column.to(tl.int64)
    if MAPPED:
        result = tl.load(ids_ptr + result)
    tl.store(value_ptr + row, value)
    tl.store(column_ptr + row, result)
    tl.store(copy_ptr + row * copy_stride, result)


def argmax(x: torch.Tensor, copy: torch.Tensor | None = None,
           token_ids: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """``(values [R] float32, columns [R] int64)`` of ``x`` [R, width] of 16 or 32 bits, contiguous in its rows: what
    ``x.max(-1)`` gives, and of equal values the first column; ``token_ids`` [width] int64 of the columns where given.
    These are also written to ``copy`` [R] int64, of any stride, where the next step reads its tokens."""
    if not runs_triton(x):
        values, columns = reference.argmax(x)
        columns = columns if token_ids is None else token_ids[columns]
        if copy is not None:
            copy.copy_(columns)
        return values, columns
    rows, width = x.shape
    block = _CHUNK_BYTES // x.element_size()
    chunks = triton.cdiv(width, block)
    top = torch.empty((rows, chunks), dtype=torch.float32, device=x.device)
    index = torch.empty((rows, chunks), dtype=torch.int32, device=x.device)
    if rows:
        _argmax_of_chunks_kernel[(rows, chunks)](x, x.stride(0), top, index, width, BLOCK=block, num_warps=8,
                                                   **pdl(x))
    return argmax_of_tops(top, index, width, copy, token_ids)


def argmax_of_tops(top: torch.Tensor, index: torch.Tensor, width: int, copy: torch.Tensor | None = None,
                   token_ids: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """``argmax`` of rows of ``width`` columns, where the maxima ``top`` [R, chunks] float32 of their chunks are known,
    and the first columns ``index`` [R, chunks] int32 that have them. Runs on a GPU or under the interpreter."""
    rows, chunks = top.shape
    columns = torch.empty(rows, dtype=torch.int64, device=top.device)
    values = torch.empty(rows, dtype=torch.float32, device=top.device)
    if rows:
        copied = columns if copy is None else copy
        _argmax_kernel[(rows,)](top, index, columns if token_ids is None else token_ids, values, columns, copied,
                                copied.stride(0), chunks, width, MAPPED=token_ids is not None,
                                BLOCK=triton.next_power_of_2(chunks), num_warps=1, **pdl(top))
    return values, columns
