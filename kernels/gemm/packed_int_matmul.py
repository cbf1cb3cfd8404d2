"""Multiplies rows with a weight of packed 4-bit or 8-bit integers, which are dequantized in registers.

The bytes of a step hold two operands: the lower halves are 16 of each 32 inputs, the upper ones the other 16, so that
no value changes its place between two registers. Rows are loaded to match. Where a step stays within a group, the
integers are multiplied and the sums scaled; else the weights are, rounded to the rows' type.
"""

from __future__ import annotations

from functools import cache

import torch

from .. import reference
from .._triton import pdl, runs_triton, start_next, tl, triton, wait_for_last
from ..arguments import PackedInts
from ..tuning.policy import policy_of
from ..tuning.split_tile import SplitTile
from .dense_matmul import dense_matmul
from .split_k_reduce import last_split_sum, split_counters


@triton.jit
def _without_zero(raw, zero, BITS: tl.constexpr, DTYPE: tl.constexpr):
    """``raw - zero`` in DTYPE, exactly. 4 bits below the exponent of 128 (bfloat16), or 8 below that of 1,024
    (float16), are 128 or 1,024 and the value: that takes no conversion."""
    if DTYPE == tl.float16:  # noqa: SIM300
        made = (raw.to(tl.uint16) | 0x6400).to(tl.float16, bitcast=True) - (zero + 1024).to(tl.float16)
    elif DTYPE == tl.bfloat16 and BITS == 4:  # noqa: SIM300
        made = (raw.to(tl.uint16) | 0x4300).to(tl.bfloat16, bitcast=True) - (zero + 128).to(tl.bfloat16)
    else:
        made = (raw.to(tl.float32) - zero).to(DTYPE)
    return made


@triton.jit
def _zero(offset, zero_ptr, BITS: tl.constexpr):
    """The zeros at some offsets in float32."""
    if zero_ptr is None:
        zero = tl.full(offset.shape, 1 << (BITS - 1), tl.float32)
    else:
        zero = tl.load(zero_ptr + offset).to(tl.float32)
    return zero


@triton.jit
def _operand(raw, position, scale_ptr, zero_ptr, order_ptr, safe, out, width, group, BITS: tl.constexpr,
             INDEXED: tl.constexpr, DTYPE: tl.constexpr):
    """Dequantized ``raw`` [COLUMNS, positions], with the scale of each position's group."""
    if INDEXED:
        groups = tl.load(order_ptr + width + position, position < width, other=0)
    else:
        groups = tl.minimum(position, width - 1) // group
    at = groups[None, :] * out + safe[:, None]
    wide = _without_zero(raw, _zero(at, zero_ptr, BITS), BITS, DTYPE).to(tl.float32)
    return (wide * tl.load(scale_ptr + at)).to(DTYPE)


@triton.jit
def _rows_at(x_at, row_in, position, order_ptr, width, WHOLE: tl.constexpr):
    """``[positions, ROWS]``: the rows' inputs at these positions of the weight."""
    if order_ptr is None:
        inputs = position
    else:
        inputs = tl.load(order_ptr + position, position < width, other=0)
    if WHOLE:
        x = tl.load(x_at[:, None] + inputs[None, :], row_in[:, None], other=0.0)
    else:
        x = tl.load(x_at[:, None] + inputs[None, :], row_in[:, None] & (position < width)[None, :], other=0.0)
    return tl.trans(x)


@triton.jit
def packed_sums(x_at, row_in, q_ptr, scale_ptr, zero_ptr, order_ptr, safe, out, width, group, first, last,
                BITS: tl.constexpr, SCALES_SUMS: tl.constexpr, INDEXED: tl.constexpr, WHOLE: tl.constexpr,
                ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, STAGES: tl.constexpr,
                DTYPE: tl.constexpr):
    """``[COLUMNS, ROWS]`` float32: the columns ``safe`` of one weight times the rows at ``x_at`` [ROWS], over the steps
    from ``first`` to ``last``. Weights come first: they fill the tensor cores' tall side."""
    BYTES: tl.constexpr = DEPTH * BITS // 8
    byte = tl.arange(0, BYTES)
    row_bytes = width * BITS // 8
    q_at = q_ptr + safe.to(tl.int64)[:, None] * row_bytes + byte[None, :]
    sums = tl.zeros((COLUMNS, ROWS), tl.float32)
    for step in tl.range(first, last, num_stages=STAGES):
        if WHOLE:
            q = tl.load(q_at + step * BYTES)
        else:
            q = tl.load(q_at + step * BYTES, (step * BYTES + byte < row_bytes)[None, :], other=0)
        if BITS == 4:
            position = step * DEPTH + byte // 16 * 32 + byte % 16
        else:
            position = step * DEPTH + byte
        x = _rows_at(x_at, row_in, position, order_ptr, width, WHOLE)
        if SCALES_SUMS:
            at = step * DEPTH // group * out + safe
            zero = _zero(at, zero_ptr, BITS)[:, None]
            if BITS == 4:
                part = tl.dot(_without_zero(q & 15, zero, BITS, DTYPE), x, input_precision="ieee")
                upper = _rows_at(x_at, row_in, position + 16, order_ptr, width, WHOLE)
                part = tl.dot(_without_zero(q >> 4, zero, BITS, DTYPE), upper, part, input_precision="ieee")
            else:
                part = tl.dot(_without_zero(q, zero, BITS, DTYPE), x, input_precision="ieee")
            sums += part * tl.load(scale_ptr + at)[:, None]
        elif BITS == 4:
            w = _operand(q & 15, position, scale_ptr, zero_ptr, order_ptr, safe, out, width, group, BITS, INDEXED,
                         DTYPE)
            sums = tl.dot(w, x, sums, input_precision="ieee")
            upper = _rows_at(x_at, row_in, position + 16, order_ptr, width, WHOLE)
            w = _operand(q >> 4, position + 16, scale_ptr, zero_ptr, order_ptr, safe, out, width, group, BITS, INDEXED,
                         DTYPE)
            sums = tl.dot(w, upper, sums, input_precision="ieee")
        else:
            w = _operand(q, position, scale_ptr, zero_ptr, order_ptr, safe, out, width, group, BITS, INDEXED, DTYPE)
            sums = tl.dot(w, x, sums, input_precision="ieee")
    return sums


# ``rows`` changes with every step: specialized on 1 and on multiples of 16 it would compile while requests wait.
@triton.jit(do_not_specialize=["rows", "splits", "biased", "group"])
def _packed_int_matmul_kernel(x_ptr, q_ptr, scale_ptr, zero_ptr, order_ptr, bias_ptr, y_ptr, partial_ptr, counter_ptr,
                              rows, out, width, x_stride, group, splits, biased, BITS: tl.constexpr,
                              SCALES_SUMS: tl.constexpr, INDEXED: tl.constexpr, WHOLE: tl.constexpr,
                              ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, REDUCES: tl.constexpr,
                              STAGES: tl.constexpr, PDL: tl.constexpr):
    program = tl.program_id(0)
    split = tl.program_id(1)
    row_blocks = tl.cdiv(rows, ROWS)  # all blocks of rows before the next columns: the weight is read once
    row = program % row_blocks * ROWS + tl.arange(0, ROWS)
    column = program // row_blocks * COLUMNS + tl.arange(0, COLUMNS)
    row_in, column_in = row < rows, column < out
    safe = tl.where(column_in, column, 0)
    steps = tl.cdiv(width, DEPTH)
    each = tl.cdiv(steps, splits)
    first = split * each
    start_next(PDL)
    wait_for_last(PDL)
    x_at = x_ptr + tl.where(row_in, row, 0).to(tl.int64) * x_stride
    sums = packed_sums(x_at, row_in, q_ptr, scale_ptr, zero_ptr, order_ptr, safe, out, width, group, first,
                       tl.minimum(first + each, steps), BITS, SCALES_SUMS, INDEXED, WHOLE, ROWS, COLUMNS, DEPTH, STAGES,
                       x_ptr.dtype.element_ty)
    acc = tl.trans(sums)
    stored = row_in[:, None] & column_in[None, :]
    offset = row[:, None].to(tl.int64) * out + column[None, :]
    is_last = True
    if REDUCES:
        is_last, acc = last_split_sum(acc, partial_ptr, counter_ptr, program, split, splits,
                                      tl.cast(rows, tl.int64) * out, offset, stored)
    if is_last:
        acc += tl.load(bias_ptr + safe, column_in & (biased != 0), other=0.0).to(tl.float32)[None, :]
        tl.store(y_ptr + offset, acc.to(y_ptr.dtype.element_ty), stored)


@triton.jit(do_not_specialize=["group"])
def _dequantize_kernel(q_ptr, scale_ptr, zero_ptr, order_ptr, y_ptr, out, width, group, BITS: tl.constexpr,
                       INDEXED: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, PDL: tl.constexpr):
    start_next(PDL)
    wait_for_last(PDL)
    BYTES: tl.constexpr = DEPTH * BITS // 8
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    column_in = column < out
    safe = tl.where(column_in, column, 0)
    byte = tl.program_id(1) * BYTES + tl.arange(0, BYTES)
    byte_in = byte < width * BITS // 8
    q = tl.load(q_ptr + safe.to(tl.int64)[:, None] * (width * BITS // 8) + byte[None, :], byte_in[None, :], other=0)
    y_at = y_ptr + safe.to(tl.int64)[:, None] * width
    stored = column_in[:, None] & byte_in[None, :]
    DTYPE: tl.constexpr = y_ptr.dtype.element_ty
    if BITS == 4:
        position = byte // 16 * 32 + byte % 16
        lower = _operand(q & 15, position, scale_ptr, zero_ptr, order_ptr, safe, out, width, group, BITS, INDEXED,
                         DTYPE)
        tl.store(y_at + position[None, :], lower, stored)
        upper = _operand(q >> 4, position + 16, scale_ptr, zero_ptr, order_ptr, safe, out, width, group, BITS, INDEXED,
                         DTYPE)
        tl.store(y_at + position[None, :] + 16, upper, stored)
    else:
        w = _operand(q, byte, scale_ptr, zero_ptr, order_ptr, safe, out, width, group, BITS, INDEXED, DTYPE)
        tl.store(y_at + byte[None, :], w, stored)


def packed_int_matmul(x: torch.Tensor, weight: PackedInts, bias: torch.Tensor | None = None, *,
                      tile: SplitTile | None = None) -> torch.Tensor:
    """``x`` [T, in] ``@ weight.T + bias``: ``[T, out]`` in the type of ``x``, summed in float32. ``bias`` [out].

    Few rows go through our kernel, by ``tile`` or the policy's; many through the library, which multiplies with the
    weight dequantized into a buffer of ``out * in`` values."""
    if not runs_triton(x):
        return reference.packed_int_matmul(x, weight, bias)
    (rows, width), out = x.shape, weight.values.shape[0]
    if not rows:
        return x.new_empty((0, out))
    policy = policy_of(x.device).packed_ints
    if tile is None and policy.dequantizes(rows):
        given = x if weight.order is None else x.index_select(1, weight.order[0])
        return dense_matmul(given, dequantize_ints(weight, x.dtype, sort=False), bias)
    tile = tile or policy.tile(rows, out, width, weight.group, x.element_size(), weight.indexed)
    x = x if x.stride(1) == 1 else x.contiguous()
    y = torch.empty((rows, out), dtype=x.dtype, device=x.device)
    partials = torch.empty((tile.splits, rows, out), dtype=torch.float32, device=x.device) if tile.splits > 1 else y
    tiles = triton.cdiv(rows, tile.rows) * triton.cdiv(out, tile.columns)
    _packed_int_matmul_kernel[(tiles, tile.splits)](
        x, weight.values, weight.scales, weight.zeros, weight.order, y if bias is None else bias, y, partials,
        split_counters(x.device), rows, out, width, x.stride(0), weight.group, tile.splits, int(bias is not None),
        **options(weight, tile), ROWS=tile.rows, COLUMNS=tile.columns, REDUCES=tile.splits > 1, **pdl(x))
    return y


def options(weight: PackedInts, tile: SplitTile) -> dict[str, int]:
    """The constants of ``packed_sums`` for a weight, or for each of a stack."""
    whole_groups = weight.group == weight.width or weight.group % tile.depth == 0
    return {"BITS": weight.bits, "SCALES_SUMS": whole_groups and not weight.indexed, "INDEXED": weight.indexed,
            "WHOLE": weight.width % tile.depth == 0, "DEPTH": tile.depth, "STAGES": tile.stages,
            "num_warps": tile.warps, "num_stages": tile.stages}


def dequantize_ints(weight: PackedInts, dtype: torch.dtype, *, sort: bool = True) -> torch.Tensor:
    """Dequantizes to ``[out, in]`` in ``dtype``, with the rows' inputs in their order, or without ``sort`` in that of
    the weight's positions."""
    if not runs_triton(weight.values):
        return reference.dequantize_ints(weight, dtype, sort=sort)
    out, width = weight.values.shape[0], weight.width
    y = torch.empty((out, width), dtype=dtype, device=weight.values.device)
    _dequantize_kernel[(triton.cdiv(out, 16), triton.cdiv(width, 256))](
        weight.values, weight.scales, weight.zeros, weight.order, y, out, width, weight.group, BITS=weight.bits,
        INDEXED=weight.indexed, COLUMNS=16, DEPTH=256, num_warps=4, **pdl(y))
    if weight.order is None or not sort:
        return y
    result = torch.empty_like(y)
    result[:, weight.order[0].long()] = y
    return result


def compile_tiles(weight: PackedInts, dtype: torch.dtype) -> None:
    """Compile what products with such a weight take, so that no request waits for it; its values do not matter."""
    facts = tuple(weight.values.shape), tuple(weight.scales.shape), weight.bits, weight.group
    _compile_tiles(*facts, weight.zeros is not None, weight.order is not None, weight.indexed, dtype,
                   weight.values.device)


@cache  # an engine has each shape in many layers, and in hundreds of experts
def _compile_tiles(shape: tuple[int, int], scales: tuple[int, int], bits: int, group: int, with_zeros: bool,
                   ordered: bool, indexed: bool, dtype: torch.dtype, device: torch.device) -> None:
    def zeros(*size: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(size, dtype=dtype, device=device)

    width = shape[1] * 8 // bits
    weight = PackedInts(zeros(*shape, dtype=torch.uint8), zeros(*scales, dtype=torch.float32),
                        zeros(*scales, dtype=dtype) if with_zeros else None,
                        zeros(2, width, dtype=torch.int32) if ordered else None, bits, group, indexed)
    for rows in (1, 17, 33, 65, policy_of(device).packed_ints.numbers.dequantize_min_rows):
        packed_int_matmul(zeros(rows, width, dtype=dtype), weight)
