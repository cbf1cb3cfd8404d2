"""Multiplies with weights that stay in a GGUF file's quantized blocks, which are dequantized in registers; many rows
with a copy of them in the rows' type, which lives as long as the product."""

from __future__ import annotations

import torch

from .. import reference
from .._triton import runs_triton, tl, triton
from ..gemm.dense_matmul import dense_matmul
from ..gguf_blocks import BLOCKS
from ..tuning.policy import policy_of

MAX_PACKED_ROWS = 64
"""More rows are multiplied with a dequantized copy: each program would dequantize the weights once for 16 rows."""
_ROWS = 16
_COLUMNS = 32
_DEPTH = 256


@triton.jit
def _bits(byte_ptr, at, shift, mask, inside):
    return (tl.load(byte_ptr + at, inside, other=0).to(tl.int32) >> shift) & mask


@triton.jit
def _whole_values(byte_ptr, at, j, inside, TYPE: tl.constexpr):
    """The integers of values ``j`` of the blocks that begin ``at`` bytes; see reference/gguf.py."""
    if TYPE == 8:
        q = tl.load(byte_ptr + at + 2 + j, inside, other=0).to(tl.int8, bitcast=True).to(tl.int32)
    elif TYPE <= 7:
        START: tl.constexpr = 2 if TYPE == 2 else (4 if TYPE == 3 else (6 if TYPE == 6 else 8))
        q = _bits(byte_ptr, at + START + j % 16, j // 16 * 4, 15, inside)
        if TYPE >= 6:
            q += _bits(byte_ptr, at + START - 4 + j // 8, j % 8, 1, inside) << 4
    elif TYPE <= 11:
        PAIRS: tl.constexpr = 16 if TYPE == 10 else 32
        q = _bits(byte_ptr, at + PAIRS + j // 128 * 32 + j % 32, j % 128 // 32 * 2, 3, inside)
        if TYPE == 11:
            q += _bits(byte_ptr, at + j % 32, j // 32, 1, inside) << 2
    elif TYPE <= 13:
        NIBBLES: tl.constexpr = 16 if TYPE == 12 else 48
        q = _bits(byte_ptr, at + NIBBLES + j // 64 * 32 + j % 32, j // 32 % 2 * 4, 15, inside)
        if TYPE == 13:
            q += _bits(byte_ptr, at + 16 + j % 32, j // 32, 1, inside) << 4
    else:
        q = _bits(byte_ptr, at + j // 128 * 64 + j % 64, j // 64 % 2 * 4, 15, inside)
        q += _bits(byte_ptr, at + 128 + j // 128 * 32 + j % 32, j % 128 // 32 * 2, 3, inside) << 4
    OFFSET: tl.constexpr = 8 if TYPE == 2 else (16 if TYPE == 6 else (4 if TYPE == 11 else (32 if TYPE == 14 else 0)))
    return (q - OFFSET).to(tl.float32)


@triton.jit
def _group_scales(byte_ptr, half_ptr, at, g, inside, TYPE: tl.constexpr):
    """The scale of the groups ``g`` of blocks, and what is subtracted from their values."""
    D: tl.constexpr = 208 if TYPE == 14 else (80 if TYPE == 10 else (108 if TYPE == 11 else 0))
    d = tl.load(half_ptr + (at + D) // 2, inside, other=0.0).to(tl.float32)
    if TYPE == 3 or TYPE == 7:
        scale = d
        minimum = -tl.load(half_ptr + at // 2 + 1, inside, other=0.0).to(tl.float32)
    elif TYPE == 12 or TYPE == 13:
        first = tl.load(byte_ptr + at + 4 + g % 4, inside, other=0).to(tl.int32)
        second = tl.load(byte_ptr + at + 8 + g % 4, inside, other=0).to(tl.int32)
        rest = tl.load(byte_ptr + at + 12 + g % 4, inside, other=0).to(tl.int32)
        whole = tl.where(g < 4, first & 63, (rest & 15) | ((first >> 6) << 4))
        below = tl.where(g < 4, second & 63, (rest >> 4) | ((second >> 6) << 4))
        scale = d * whole.to(tl.float32)
        minimum = tl.load(half_ptr + at // 2 + 1, inside, other=0.0).to(tl.float32) * below.to(tl.float32)
    elif TYPE == 14:
        scale = d * tl.load(byte_ptr + at + 192 + g, inside, other=0).to(tl.int8, bitcast=True).to(tl.float32)
        minimum = tl.zeros_like(scale)
    elif TYPE == 10:
        both = tl.load(byte_ptr + at + g, inside, other=0).to(tl.int32)
        scale = d * (both & 15).to(tl.float32)
        minimum = tl.load(half_ptr + at // 2 + 41, inside, other=0.0).to(tl.float32) * (both >> 4).to(tl.float32)
    elif TYPE == 11:
        low = _bits(byte_ptr, at + 96 + g % 8, g // 8 * 4, 15, inside)
        high = _bits(byte_ptr, at + 104 + g % 4, g // 4 * 2, 3, inside)
        scale = d * (low + (high << 4) - 32).to(tl.float32)
        minimum = tl.zeros_like(scale)
    else:
        scale = d
        minimum = tl.zeros_like(scale)
    return scale, minimum


@triton.jit
def _weights(byte_ptr, half_ptr, row, first, width, inside_row, TYPE: tl.constexpr, VALUES: tl.constexpr,
             BYTES: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, DEPTH: tl.constexpr):
    """``[ROWS, DEPTH]`` float32: the values from ``first`` on of the weights' rows ``row``, 0 beyond ``width``."""
    row_at = row.to(tl.int64)[:, None] * (width // VALUES * BYTES)
    k = (first + tl.arange(0, DEPTH))[None, :]
    q = _whole_values(byte_ptr, row_at + k // VALUES * BYTES, k % VALUES, inside_row[:, None] & (k < width), TYPE)
    GROUPS: tl.constexpr = DEPTH // GROUP
    group = (first + tl.arange(0, GROUPS) * GROUP)[None, :]
    scale, minimum = _group_scales(byte_ptr, half_ptr, row_at + group // VALUES * BYTES, group % VALUES // GROUP,
                                   inside_row[:, None] & (group < width), TYPE)
    scale = tl.reshape(tl.broadcast_to(scale[:, :, None], (ROWS, GROUPS, GROUP)), (ROWS, DEPTH))
    minimum = tl.reshape(tl.broadcast_to(minimum[:, :, None], (ROWS, GROUPS, GROUP)), (ROWS, DEPTH))
    return q * scale - minimum


# ``rows`` changes with every step: specialized on 1 and on multiples of 16 it would compile while requests wait.
@triton.jit(do_not_specialize=["rows"])
def _packed_matmul_kernel(x_ptr, byte_ptr, half_ptr, y_ptr, rows, out, width, x_row, y_row, TYPE: tl.constexpr,
                          VALUES: tl.constexpr, BYTES: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr,
                          COLUMNS: tl.constexpr, DEPTH: tl.constexpr):
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    acc = tl.zeros((ROWS, COLUMNS), tl.float32)
    for first in range(0, width, DEPTH):
        k = first + tl.arange(0, DEPTH)
        x = tl.load(x_ptr + row.to(tl.int64)[:, None] * x_row + k[None, :],
                    (row < rows)[:, None] & (k < width)[None, :], other=0.0)
        w = _weights(byte_ptr, half_ptr, column, first, width, column < out, TYPE, VALUES, BYTES, GROUP, COLUMNS,
                     DEPTH)
        acc = tl.dot(x, tl.trans(w.to(x.dtype)), acc)
    tl.store(y_ptr + row.to(tl.int64)[:, None] * y_row + column[None, :], acc.to(y_ptr.dtype.element_ty),
             (row < rows)[:, None] & (column < out)[None, :])


@triton.jit
def _dequantize_kernel(byte_ptr, half_ptr, y_ptr, out, width, TYPE: tl.constexpr, VALUES: tl.constexpr,
                       BYTES: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, DEPTH: tl.constexpr):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    first = tl.program_id(1) * DEPTH
    k = first + tl.arange(0, DEPTH)
    w = _weights(byte_ptr, half_ptr, row, first, width, row < out, TYPE, VALUES, BYTES, GROUP, ROWS, DEPTH)
    tl.store(y_ptr + row.to(tl.int64)[:, None] * width + k[None, :], w.to(y_ptr.dtype.element_ty),
             (row < out)[:, None] & (k < width)[None, :])


def dequantize(packed: torch.Tensor, kind: str, dtype: torch.dtype) -> torch.Tensor:
    """Returns ``[out, in]`` in ``dtype`` of contiguous ``packed`` [out, bytes] uint8, blocks of the type ``kind``."""
    if not runs_triton(packed):
        return reference.dequantize_gguf(packed, kind).to(dtype)
    number, values, num_bytes, group = BLOCKS[kind]
    out, width = len(packed), packed.shape[1] // num_bytes * values
    y = torch.empty((out, width), dtype=dtype, device=packed.device)
    if out:
        _dequantize_kernel[(triton.cdiv(out, _ROWS), triton.cdiv(width, _DEPTH))](
            packed, packed.view(torch.float16), y, out, width, TYPE=number, VALUES=values, BYTES=num_bytes, GROUP=group,
            ROWS=_ROWS, DEPTH=_DEPTH, num_warps=4)
    return y


def packed_matmul(x: torch.Tensor, packed: torch.Tensor, kind: str, y: torch.Tensor) -> torch.Tensor:
    """Writes ``x`` [T, in] times the transposed weights ``packed`` [out, bytes] into ``y`` [T, out], of any row
    stride, and returns it."""
    rows = len(x)
    if not runs_triton(packed) or rows > MAX_PACKED_ROWS or policy_of(x.device).gemm.batch_invariant:
        return y.copy_(dense_matmul(x, dequantize(packed, kind, x.dtype)))
    number, values, num_bytes, group = BLOCKS[kind]
    out, width = len(packed), packed.shape[1] // num_bytes * values
    x = x if x.stride(-1) == 1 else x.contiguous()
    if rows:
        _packed_matmul_kernel[(triton.cdiv(out, _COLUMNS), triton.cdiv(rows, _ROWS))](
            x, packed, packed.view(torch.float16), y, rows, out, width, x.stride(0), y.stride(0), TYPE=number,
            VALUES=values, BYTES=num_bytes, GROUP=group, ROWS=_ROWS, COLUMNS=_COLUMNS, DEPTH=_DEPTH, num_warps=4,
            num_stages=3)
    return y
