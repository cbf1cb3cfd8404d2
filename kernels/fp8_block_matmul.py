"""Product of two float8 matrices whose weights have a scale a block (128 x 128) and whose rows one a group of 128.

The form of DeepSeek-V3 (arXiv:2412.19437, 3.3.2): each step of 128 along the inner dimension is accumulated by the
tensor cores and then added, scaled, to float32 registers, which also mends their short accumulators.
"""

from __future__ import annotations

from functools import lru_cache

import torch

from . import reference
from ._triton import runs_triton, tl, triton

GROUP = 128


# ``rows`` changes with every step: specialized on 1 and on multiples of 16 it would compile while requests wait.
@triton.jit(do_not_specialize=["rows", "scale_row", "scale_group"])
def _block_matmul_kernel(x_ptr, x_scale_ptr, w_ptr, w_scale_ptr, y_ptr, rows, scale_row, scale_group, out, width,
                         blocks_in, block_out, BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr,
                         GROUP: tl.constexpr, WHOLE: tl.constexpr, BAND: tl.constexpr):
    # Programs go through a band of rows before the next columns, so that weights are read from memory once a band.
    program = tl.program_id(0)
    row_blocks = tl.cdiv(rows, BLOCK_ROWS)
    column_blocks = tl.cdiv(out, BLOCK_COLUMNS)
    band = program // (BAND * column_blocks)
    first = band * BAND
    height = tl.minimum(row_blocks - first, BAND)
    place = program % (BAND * column_blocks)
    row = (first + place % height) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    column = (place // height) * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
    inner = tl.arange(0, GROUP)
    row_in = row < rows
    column_in = column < out
    # Rows and columns beyond the last read the first one's values, which are not stored: loads need no mask.
    safe_row = tl.where(row_in, row, 0).to(tl.int64)
    safe_column = tl.where(column_in, column, 0).to(tl.int64)
    x_at = x_ptr + safe_row[:, None] * width + inner[None, :]
    w_at = w_ptr + safe_column[None, :] * width + inner[:, None]
    x_scale_at = x_scale_ptr + safe_row * scale_row
    w_scale_at = w_scale_ptr + (safe_column // block_out) * blocks_in
    acc = tl.zeros((BLOCK_ROWS, BLOCK_COLUMNS), tl.float32)
    for block in range(blocks_in):
        if WHOLE:
            x = tl.load(x_at)
            w = tl.load(w_at)
        else:
            present = inner < width - block * GROUP
            x = tl.load(x_at, present[None, :], other=0.0)
            w = tl.load(w_at, present[:, None], other=0.0)
        scale = tl.load(x_scale_at)[:, None] * tl.load(w_scale_at + block)[None, :]
        acc += tl.dot(x, w) * scale
        x_at += GROUP
        x_scale_at += scale_group
        w_at += GROUP
    y_at = y_ptr + row.to(tl.int64)[:, None] * out + column[None, :]
    tl.store(y_at, acc.to(y_ptr.dtype.element_ty), row_in[:, None] & column_in[None, :])


def block_matmul(x: torch.Tensor, x_scale: torch.Tensor, weight: torch.Tensor, weight_scale: torch.Tensor,
                 block: tuple[int, int], dtype: torch.dtype) -> torch.Tensor:
    """``[T, out]`` in ``dtype`` of ``x`` [T, in] float8 with ``x_scale`` [T, ceil(in / block[1])] and ``weight``
    [out, in] float8 with ``weight_scale`` [ceil(out / block[0]), ceil(in / block[1])]; scales float32, all contiguous
    but ``x_scale``.

    The kernel takes blocks that are 128 wide.
    """
    if not runs_triton(x):
        return reference.block_matmul(x, x_scale, weight, weight_scale, block, dtype)
    assert block[1] == GROUP
    rows, width = x.shape
    out = weight.shape[0]
    y = torch.empty((rows, out), dtype=dtype, device=x.device)
    if not rows:
        return y
    tile = _tile(rows, out)
    programs = triton.cdiv(rows, tile["BLOCK_ROWS"]) * triton.cdiv(out, tile["BLOCK_COLUMNS"])
    _block_matmul_kernel[(programs,)](
        x, x_scale, weight, weight_scale, y, rows, *x_scale.stride(), out, width, triton.cdiv(width, GROUP), block[0],
        GROUP=GROUP, WHOLE=width % GROUP == 0, BAND=16, **tile)
    return y


@lru_cache
def compile_tiles(out: int, width: int, block_out: int, dtype: torch.dtype, device: torch.device) -> None:
    """Compile what products of any number of rows with such a matrix take, so that no request waits for it."""
    weight = torch.zeros((out, width), dtype=torch.float8_e4m3fn, device=device)
    groups = -(-width // GROUP)
    scale = torch.zeros((-(-out // block_out), groups), dtype=torch.float32, device=device)
    for rows in (1, 17, 65, 513):
        x = torch.zeros((rows, width), dtype=weight.dtype, device=device)
        x_scale = torch.zeros((rows, groups), dtype=torch.float32, device=device)
        block_matmul(x, x_scale, weight, scale, (block_out, GROUP), dtype)


def _tile(rows: int, out: int) -> dict[str, int]:
    """Few rows: narrow columns, so that every multiprocessor reads weights. Many: as much reuse as registers allow."""
    if rows <= 16:
        return {"BLOCK_ROWS": 16, "BLOCK_COLUMNS": 32 if out <= 8192 else 64, "num_warps": 4, "num_stages": 5}
    if rows <= 64:
        return {"BLOCK_ROWS": 64, "BLOCK_COLUMNS": 32 if out <= 8192 else 64, "num_warps": 4, "num_stages": 4}
    if rows <= 512:
        return {"BLOCK_ROWS": 64, "BLOCK_COLUMNS": 128, "num_warps": 4, "num_stages": 4}
    return {"BLOCK_ROWS": 128, "BLOCK_COLUMNS": 128, "num_warps": 8, "num_stages": 3}
