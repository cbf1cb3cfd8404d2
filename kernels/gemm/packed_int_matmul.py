"""Multiplies rows with a weight of packed 4-bit or 8-bit integers, which are dequantized in registers.

Of 4 bits, the words of a step hold four operands, each of a quarter of its inputs, so that no value changes its place
between two registers. Rows are loaded to match. Where a step stays within a group, the integers are multiplied and the
sums scaled; else the weights are, rounded to the rows' type.
"""

from __future__ import annotations

from functools import cache

import torch

from .. import reference
from .._triton import INTERPRETED, pdl, runs_triton, start_next, tl, triton, wait_for_last
from ..arguments import PackedInts
from ..tuning.policy import policy_of
from ..tuning.split_tile import SplitTile
from .dense_matmul import dense_matmul
from .split_k_reduce import last_split_sum, split_counters

_PTX = tl.constexpr(not INTERPRETED)
"""The interpreter knows no PTX."""
TABLE_INDEX = {"": 0, **{name: 1 + i for i, name in enumerate(reference.TABLES)}}


def _lookup(table: str, dtype: torch.dtype) -> str:
    """PTX that makes of the nibbles of two 16-bit words in $4 their values in a table: $0 to $3, two each.

    A permutation of bytes looks four nibbles up at once, in 8 bytes: two of them, and a third that chooses between both
    by the nibbles' highest bits, for each of a value's two bytes."""
    bits = [value & 0xFFFF for value in torch.tensor(reference.TABLES[table]).to(dtype).view(torch.int16).tolist()]
    asm = "{ .reg .b32 w, s, t, x, y, low, high, a0, a1, b0, b1; mov.b32 w, $4; "
    for lane in (0, 1):
        asm += "and.b32 s, w, 0x7777; shr.u32 t, w, 1; lop3.b32 t, t, 0x4444, 0x3210, 0xEA; "
        for name, shift in (("low", 0), ("high", 8)):
            words = [sum((bits[4 * i + j] >> shift & 255) << 8 * j for j in range(4)) for i in range(4)]
            asm += (f"prmt.b32 x, {words[0]:#x}, {words[1]:#x}, s; prmt.b32 y, {words[2]:#x}, {words[3]:#x}, s; "
                    f"prmt.b32 {name}, x, y, t; ")
        asm += f"prmt.b32 a{lane}, low, high, 0x5140; prmt.b32 b{lane}, low, high, 0x7362; shr.u32 w, w, 16; "
    return asm + ("prmt.b32 $0, a0, a1, 0x5410; prmt.b32 $1, a0, a1, 0x7632; prmt.b32 $2, b0, b1, 0x5410; "
                  "prmt.b32 $3, b0, b1, 0x7632; }")


_NF4_BFLOAT16 = tl.constexpr(_lookup("nf4", torch.bfloat16))
_NF4_FLOAT16 = tl.constexpr(_lookup("nf4", torch.float16))
_FP4_BFLOAT16 = tl.constexpr(_lookup("fp4", torch.bfloat16))
_FP4_FLOAT16 = tl.constexpr(_lookup("fp4", torch.float16))


@triton.jit
def _nibbles(words, zero, table_ptr, TABLE: tl.constexpr, DTYPE: tl.constexpr):
    """``value - zero`` (int32) of the four values of each int16 of ``words``, in DTYPE and exactly, or each value's
    entry of the table.

    4 bits below the exponent of 128 (bfloat16) or of 1,024 (float16) are 128 or 1,024 and the value: values of two
    neighbours take one instruction for that, and one for the zero."""
    HALF: tl.constexpr = DTYPE == tl.float16  # noqa: SIM300
    if _PTX and DTYPE != tl.float32:  # noqa: SIM300
        if TABLE:
            NF4: tl.constexpr = _NF4_FLOAT16 if HALF else _NF4_BFLOAT16
            FP4: tl.constexpr = _FP4_FLOAT16 if HALF else _FP4_BFLOAT16
            a, b, c, d = tl.inline_asm_elementwise(
                NF4 if TABLE == 1 else FP4, "=r,=r,=r,=r,r", [words], dtype=(tl.int16, tl.int16, tl.int16, tl.int16),
                is_pure=True, pack=2)
        else:
            MADE: tl.constexpr = "0x000f000f, 0x64006400, 0xea; " if HALF else "0x000f000f, 0x43004300, 0xea; "
            LESS: tl.constexpr = "sub.rn.f16x2 " if HALF else "sub.rn.bf16x2 "
            a, b, c, d = tl.inline_asm_elementwise(
                "{ .reg .b32 a, b, c, d; shr.u32 b, $4, 4; shr.u32 c, $4, 8; shr.u32 d, $4, 12; lop3.b32 a, $4, " + MADE
                + "lop3.b32 b, b, " + MADE + "lop3.b32 c, c, " + MADE + "lop3.b32 d, d, " + MADE + LESS + "$0, a, $5; "
                + LESS + "$1, b, $5; " + LESS + "$2, c, $5; " + LESS + "$3, d, $5; }", "=r,=r,=r,=r,r,r",
                [words, (zero + (0x6400 if HALF else 0x4300)).to(tl.int16)],
                dtype=(tl.int16, tl.int16, tl.int16, tl.int16), is_pure=True, pack=2)
        a, b = a.to(DTYPE, bitcast=True), b.to(DTYPE, bitcast=True)
        c, d = c.to(DTYPE, bitcast=True), d.to(DTYPE, bitcast=True)
    else:
        a = _nibble(words, 0, zero, table_ptr, TABLE).to(DTYPE)
        b = _nibble(words, 1, zero, table_ptr, TABLE).to(DTYPE)
        c = _nibble(words, 2, zero, table_ptr, TABLE).to(DTYPE)
        d = _nibble(words, 3, zero, table_ptr, TABLE).to(DTYPE)
    return a, b, c, d


@triton.jit
def _nibble(words, INDEX: tl.constexpr, zero, table_ptr, TABLE: tl.constexpr):
    """One value of each word, as ``_nibbles``, in float32."""
    value = words >> (4 * INDEX) & 15
    if TABLE:
        made = tl.load(table_ptr + value)
    else:
        made = (value - zero).to(tl.float32)
    return made


@triton.jit
def _bytes(raw, zero, DTYPE: tl.constexpr):
    """``raw - zero`` (int32) in DTYPE, exactly. A byte below the exponent of 1,024 (float16) or 2^23 (float32, which
    becomes bfloat16 two at a time) is that and the value."""
    if _PTX and DTYPE == tl.float16:  # noqa: SIM300
        made = tl.inline_asm_elementwise(
            "{ .reg .b32 a, b; prmt.b32 a, $2, 0x64646464, 0x4140; prmt.b32 b, $2, 0x64646464, 0x4342; "
            "sub.rn.f16x2 $0, a, $3; sub.rn.f16x2 $1, b, $4; }", "=r,=r,r,r,r", [raw, (zero + 0x6400).to(tl.int16)],
            dtype=tl.float16, is_pure=True, pack=4)
    elif _PTX and DTYPE == tl.bfloat16:  # noqa: SIM300
        made = tl.inline_asm_elementwise(
            "{ .reg .b32 a, b, c, d; prmt.b32 a, $2, 0x4b000000, 0x7440; prmt.b32 b, $2, 0x4b000000, 0x7441; "
            "prmt.b32 c, $2, 0x4b000000, 0x7442; prmt.b32 d, $2, 0x4b000000, 0x7443; sub.f32 a, a, $3; "
            "sub.f32 b, b, $4; sub.f32 c, c, $5; sub.f32 d, d, $6; cvt.rn.bf16x2.f32 $0, b, a; "
            "cvt.rn.bf16x2.f32 $1, d, c; }", "=r,=r,r,r,r,r,r", [raw, zero + 0x4B000000], dtype=tl.bfloat16,
            is_pure=True, pack=4)
    else:
        made = (raw.to(tl.int32) - zero).to(tl.float32).to(DTYPE)
    return made


@triton.jit
def _zero_and_scale(word):
    """The two of a word of ``PackedInts.scales``: int32 and float32."""
    return word & 511, (word & -512).to(tl.float32, bitcast=True)


@triton.jit
def _groups(position, order_ptr, width, group, INDEXED: tl.constexpr):
    if INDEXED:
        groups = tl.load(order_ptr + width + position, position < width, other=0)
    else:
        groups = tl.minimum(position, width - 1) // group
    return groups


@triton.jit
def _operand(raw, position, scale_ptr, order_ptr, safe, out, width, group, INDEXED: tl.constexpr, DTYPE: tl.constexpr):
    """Dequantized ``raw`` [COLUMNS, positions], with the scale of each position's group; of integers alone."""
    at = _groups(position, order_ptr, width, group, INDEXED)[None, :] * out + safe[:, None]
    zero, scale = _zero_and_scale(tl.load(scale_ptr + at))
    return ((raw.to(tl.int32) - zero).to(tl.float32) * scale).to(DTYPE)


@triton.jit
def _operands(words, position, scale_ptr, table_ptr, order_ptr, safe, out, width, group, QUARTER: tl.constexpr,
              TABLE: tl.constexpr, INDEXED: tl.constexpr, DTYPE: tl.constexpr):
    """The four dequantized values of each int16 of ``words`` [COLUMNS, positions]; they are those of ``position``, and
    of QUARTER, twice and three times that behind it. But for indexed weights all four are in one group."""
    if INDEXED:
        a = _operand(words & 15, position, scale_ptr, order_ptr, safe, out, width, group, INDEXED, DTYPE)
        b = _operand(words >> 4 & 15, position + QUARTER, scale_ptr, order_ptr, safe, out, width, group, INDEXED, DTYPE)
        c = _operand(words >> 8 & 15, position + 2 * QUARTER, scale_ptr, order_ptr, safe, out, width, group, INDEXED,
                     DTYPE)
        d = _operand(words >> 12 & 15, position + 3 * QUARTER, scale_ptr, order_ptr, safe, out, width, group, INDEXED,
                     DTYPE)
    else:
        at = _groups(position, order_ptr, width, group, INDEXED)[None, :] * out + safe[:, None]
        zero, scale = _zero_and_scale(tl.load(scale_ptr + at))
        a, b, c, d = _nibbles(words, zero, table_ptr, TABLE, DTYPE)
        a, b = (a.to(tl.float32) * scale).to(DTYPE), (b.to(tl.float32) * scale).to(DTYPE)
        c, d = (c.to(tl.float32) * scale).to(DTYPE), (d.to(tl.float32) * scale).to(DTYPE)
    return a, b, c, d


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
def _four_products(a, b, c, d, x_at, row_in, position, order_ptr, width, sums, QUARTER: tl.constexpr,
                   WHOLE: tl.constexpr):
    sums = tl.dot(a, _rows_at(x_at, row_in, position, order_ptr, width, WHOLE), sums, input_precision="ieee")
    sums = tl.dot(b, _rows_at(x_at, row_in, position + QUARTER, order_ptr, width, WHOLE), sums, input_precision="ieee")
    sums = tl.dot(c, _rows_at(x_at, row_in, position + 2 * QUARTER, order_ptr, width, WHOLE), sums,
                  input_precision="ieee")
    return tl.dot(d, _rows_at(x_at, row_in, position + 3 * QUARTER, order_ptr, width, WHOLE), sums,
                  input_precision="ieee")


@triton.jit
def _position(step, word, WORDS: tl.constexpr, QUARTER: tl.constexpr):
    """The first input of each word of a step; where steps have whole blocks, in a form that shows their alignment."""
    if WORDS % QUARTER == 0:
        position = step * (4 * WORDS) + (word // QUARTER * (4 * QUARTER) + word % QUARTER)
    else:
        position = (step * WORDS + word) // QUARTER * (4 * QUARTER) + (step * WORDS + word) % QUARTER
    return position


@triton.jit
def packed_sums(x_at, row_in, q_ptr, scale_ptr, table_ptr, order_ptr, safe, out, width, group, first, last,
                BITS: tl.constexpr, QUARTER: tl.constexpr, TABLE: tl.constexpr, SCALES_SUMS: tl.constexpr,
                INDEXED: tl.constexpr, WHOLE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
                DEPTH: tl.constexpr, STAGES: tl.constexpr, DTYPE: tl.constexpr):
    """``[COLUMNS, ROWS]`` float32: the columns ``safe`` of one weight times the rows at ``x_at`` [ROWS], over the steps
    from ``first`` to ``last``. Weights come first: they fill the tensor cores' tall side."""
    WORDS: tl.constexpr = DEPTH // 4 if BITS == 4 else DEPTH
    word = tl.arange(0, WORDS)
    words = tl.multiple_of(width // 4 if BITS == 4 else width, 8)  # loads of 16 bytes
    if BITS == 4:
        q_ptr = q_ptr.to(tl.pointer_type(tl.int16))
    q_at = q_ptr + safe.to(tl.int64)[:, None] * words + word[None, :]
    sums = tl.zeros((COLUMNS, ROWS), tl.float32)
    for step in tl.range(first, last, num_stages=STAGES):
        if WHOLE:
            q = tl.load(q_at + step * WORDS)
        else:
            q = tl.load(q_at + step * WORDS, (step * WORDS + word < words)[None, :], other=0)
        position = step * DEPTH + word
        if BITS == 4:
            position = _position(step, word, WORDS, QUARTER)
        if SCALES_SUMS:
            # Zeros are operands of the product, so that the compiler has these words on their way as it has ``q``.
            zero, scale = _zero_and_scale(tl.load(scale_ptr + (step * DEPTH // group * out + safe)))
            zero = tl.broadcast_to(zero[:, None], (COLUMNS, WORDS))
            part = tl.zeros((COLUMNS, ROWS), tl.float32)
            if BITS == 4:
                a, b, c, d = _nibbles(q, zero, table_ptr, TABLE, DTYPE)
                part = _four_products(a, b, c, d, x_at, row_in, position, order_ptr, width, part, QUARTER, WHOLE)
            else:
                w = _bytes(q, zero, DTYPE)
                part = tl.dot(w, _rows_at(x_at, row_in, position, order_ptr, width, WHOLE), part,
                              input_precision="ieee")
            sums += part * scale[:, None]
        elif BITS == 4:
            a, b, c, d = _operands(q, position, scale_ptr, table_ptr, order_ptr, safe, out, width, group, QUARTER,
                                   TABLE, INDEXED, DTYPE)
            sums = _four_products(a, b, c, d, x_at, row_in, position, order_ptr, width, sums, QUARTER, WHOLE)
        else:
            w = _operand(q, position, scale_ptr, order_ptr, safe, out, width, group, INDEXED, DTYPE)
            sums = tl.dot(w, _rows_at(x_at, row_in, position, order_ptr, width, WHOLE), sums, input_precision="ieee")
    return sums


@triton.jit
def fetch_weights(q_ptr, safe, row_bytes, first_byte, last_byte):
    """Prefetches the bytes of a program's columns into the L2 cache: no earlier kernel writes them. All of them are
    then on their way at once, whatever the loop has in flight."""
    row = (q_ptr + safe.to(tl.int64) * row_bytes).to(tl.int64)
    for byte in range(first_byte, tl.minimum(last_byte, row_bytes), 128):
        tl.inline_asm_elementwise("prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [row + byte], dtype=tl.int32,
                                  is_pure=False, pack=1)


# ``rows`` changes with every step: specialized on 1 and on multiples of 16 it would compile while requests wait.
@triton.jit(do_not_specialize=["rows", "splits", "biased", "group"])
def _packed_int_matmul_kernel(x_ptr, q_ptr, scale_ptr, table_ptr, order_ptr, bias_ptr, y_ptr, partial_ptr, counter_ptr,
                              rows, out, width, x_stride, group, splits, biased, BITS: tl.constexpr,
                              QUARTER: tl.constexpr, TABLE: tl.constexpr, SCALES_SUMS: tl.constexpr,
                              INDEXED: tl.constexpr, WHOLE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
                              DEPTH: tl.constexpr, REDUCES: tl.constexpr, STAGES: tl.constexpr, FETCHES: tl.constexpr,
                              PDL: tl.constexpr):
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
    if PDL and FETCHES:
        fetch_weights(q_ptr, safe, width * BITS // 8, first * DEPTH * BITS // 8, (first + each) * DEPTH * BITS // 8)
    wait_for_last(PDL)
    x_at = x_ptr + tl.where(row_in, row, 0).to(tl.int64) * x_stride
    sums = packed_sums(x_at, row_in, q_ptr, scale_ptr, table_ptr, order_ptr, safe, out, width, group, first,
                       tl.minimum(first + each, steps), BITS, QUARTER, TABLE, SCALES_SUMS, INDEXED, WHOLE, ROWS,
                       COLUMNS, DEPTH, STAGES, x_ptr.dtype.element_ty)
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
def _dequantize_kernel(q_ptr, scale_ptr, table_ptr, order_ptr, y_ptr, out, width, group, BITS: tl.constexpr,
                       QUARTER: tl.constexpr, TABLE: tl.constexpr, INDEXED: tl.constexpr, ONE_GROUP: tl.constexpr,
                       COLUMNS: tl.constexpr, DEPTH: tl.constexpr, PDL: tl.constexpr):
    start_next(PDL)
    wait_for_last(PDL)
    WORDS: tl.constexpr = DEPTH // 4 if BITS == 4 else DEPTH
    words = tl.multiple_of(width // 4 if BITS == 4 else width, 8)  # loads of 16 bytes
    if BITS == 4:
        q_ptr = q_ptr.to(tl.pointer_type(tl.int16))
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    column_in = column < out
    safe = tl.where(column_in, column, 0)
    word = tl.program_id(1) * WORDS + tl.arange(0, WORDS)
    q = tl.load(q_ptr + safe.to(tl.int64)[:, None] * words + word[None, :], (word < words)[None, :], other=0)
    DTYPE: tl.constexpr = y_ptr.dtype.element_ty
    if ONE_GROUP:
        zero, scale = _zero_and_scale(tl.load(scale_ptr + (tl.program_id(1) * DEPTH // group * out + safe)))
        zero, scale = tl.broadcast_to(zero[:, None], (COLUMNS, WORDS)), scale[:, None]
    if BITS == 4:
        if ONE_GROUP:
            a, b, c, d = _nibbles(q, zero, table_ptr, TABLE, DTYPE)
            a, b = (a.to(tl.float32) * scale).to(DTYPE), (b.to(tl.float32) * scale).to(DTYPE)
            c, d = (c.to(tl.float32) * scale).to(DTYPE), (d.to(tl.float32) * scale).to(DTYPE)
        else:
            place = word // QUARTER * (4 * QUARTER) + word % QUARTER
            a, b, c, d = _operands(q, place, scale_ptr, table_ptr, order_ptr, safe, out, width, group, QUARTER, TABLE,
                                   INDEXED, DTYPE)
        # [COLUMNS, blocks, QUARTER, 2, 2] -> [COLUMNS, blocks, 2, 2, QUARTER]
        w = tl.reshape(tl.join(tl.join(a, c), tl.join(b, d)), (COLUMNS, DEPTH // (4 * QUARTER), QUARTER, 2, 2))
        w = tl.reshape(tl.permute(w, (0, 1, 3, 4, 2)), (COLUMNS, DEPTH))
    elif ONE_GROUP:
        w = ((q.to(tl.int32) - zero).to(tl.float32) * scale).to(DTYPE)
    else:
        w = _operand(q, word, scale_ptr, order_ptr, safe, out, width, group, INDEXED, DTYPE)
    position = tl.program_id(1) * DEPTH + tl.arange(0, DEPTH)
    tl.store(y_ptr + safe.to(tl.int64)[:, None] * width + position[None, :], w,
             column_in[:, None] & (position < width)[None, :])


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
    tile = tile or policy.tile(rows, out, width, weight.group, x.element_size(), weight.indexed, weight.bits)
    x = x if x.stride(1) == 1 else x.contiguous()
    y = torch.empty((rows, out), dtype=x.dtype, device=x.device)
    partials = torch.empty((tile.splits, rows, out), dtype=torch.float32, device=x.device) if tile.splits > 1 else y
    tiles = triton.cdiv(rows, tile.rows) * triton.cdiv(out, tile.columns)
    _packed_int_matmul_kernel[(tiles, tile.splits)](
        x, weight.values, weight.scales, table_of(weight), weight.order, y if bias is None else bias, y, partials,
        split_counters(x.device), rows, out, width, x.stride(0), weight.group, tile.splits, int(bias is not None),
        **options(weight, tile), ROWS=tile.rows, COLUMNS=tile.columns, REDUCES=tile.splits > 1,
        FETCHES=policy.fetches(tiles * tile.splits * tile.warps, weight.values.numel()), **pdl(x))
    return y


def table_of(weight: PackedInts) -> torch.Tensor | None:
    """Returns the table that a weight's values index, or those of a stack."""
    return _table(weight.table, weight.values.device) if weight.table else None


@cache
def _table(name: str, device: torch.device) -> torch.Tensor:
    return torch.tensor(reference.TABLES[name], device=device)


def options(weight: PackedInts, tile: SplitTile) -> dict[str, int]:
    """The constants of ``packed_sums`` for a weight, or for each of a stack."""
    whole_groups = weight.group == weight.width or weight.group % tile.depth == 0
    return {"BITS": weight.bits, "QUARTER": reference.quarter_of(weight.group, weight.width),
            "TABLE": TABLE_INDEX[weight.table], "SCALES_SUMS": whole_groups and not weight.indexed,
            "INDEXED": weight.indexed, "WHOLE": weight.width % tile.depth == 0, "DEPTH": tile.depth,
            "STAGES": tile.stages, "num_warps": tile.warps, "num_stages": tile.stages}


def dequantize_ints(weight: PackedInts, dtype: torch.dtype, *, sort: bool = True) -> torch.Tensor:
    """Dequantizes to ``[out, in]`` in ``dtype``, with the rows' inputs in their order, or without ``sort`` in that of
    the weight's positions."""
    if not runs_triton(weight.values):
        return reference.dequantize_ints(weight, dtype, sort=sort)
    out, width = weight.values.shape[0], weight.width
    y = torch.empty((out, width), dtype=dtype, device=weight.values.device)
    depth = 128 if weight.group % 128 == 0 or weight.group == width else 64
    one_group = not weight.indexed and (weight.group % depth == 0 or weight.group == width)
    columns, depth = (4096 // depth, depth) if one_group else (16, 256)
    _dequantize_kernel[(triton.cdiv(out, columns), triton.cdiv(width, depth))](
        weight.values, weight.scales, table_of(weight), weight.order, y, out, width, weight.group, BITS=weight.bits,
        QUARTER=reference.quarter_of(weight.group, weight.width), TABLE=TABLE_INDEX[weight.table],
        INDEXED=weight.indexed, ONE_GROUP=one_group, COLUMNS=columns, DEPTH=depth, num_warps=4, **pdl(y))
    if weight.order is None or not sort:
        return y
    result = torch.empty_like(y)
    result[:, weight.order[0].long()] = y
    return result


def compile_tiles(weight: PackedInts, dtype: torch.dtype) -> None:
    """Compile what products with such a weight take, so that no request waits for it; its values do not matter."""
    facts = tuple(weight.values.shape), tuple(weight.scales.shape), weight.bits, weight.group
    _compile_tiles(*facts, weight.order is not None, weight.indexed, weight.table, dtype, weight.values.device)


@cache  # an engine has each shape in many layers, and in hundreds of experts
def _compile_tiles(shape: tuple[int, int], scales: tuple[int, int], bits: int, group: int,
                   ordered: bool, indexed: bool, table: str, dtype: torch.dtype, device: torch.device) -> None:
    def zeros(*size: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(size, dtype=dtype, device=device)

    width = shape[1] * 8 // bits
    weight = PackedInts(zeros(*shape, dtype=torch.uint8), zeros(*scales, dtype=torch.int32),
                        zeros(2, width, dtype=torch.int32) if ordered else None, bits, group, indexed,
                        table)
    for rows in (1, 9, 17, 33, policy_of(device).packed_ints.numbers.dequantize_min_rows):
        packed_int_matmul(zeros(rows, width, dtype=dtype), weight)
