"""Computes the gated MLPs of a mixture of experts whose weights stay in MXFP4: 4 bits a value, in registers alone more.

MXFP4 (OCP Microscaling Formats, 1.0) has values of four bits (E2M1: 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives) and
a power of two for each 32. The weights are the first operand of the tensor cores' products: a warp group takes 64 of
their outputs and as few as 16 tokens, so that a step of few tokens computes no more than it needs, and the values go
from the registers in which they are converted into the product.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from .. import reference
from .._triton import INTERPRETED, pdl, runs_triton, start_next, tl, triton, wait_for_last
from ..arguments import ExpertBiases, Mxfp4Weights
from ..gated_activation import gate_times
from ..tuning.policy import policy_of
from .moe_align import Alignment, moe_align
from .moe_sum import moe_sum


class Mxfp4Tile(NamedTuple):
    """One program's part of a product: ``rows`` tokens x ``columns`` outputs by steps of ``bytes`` packed bytes."""

    rows: int
    columns: int
    bytes: int
    band: int
    warps: int
    stages: int


@triton.jit
def _unpack(packed, words, dtype: tl.constexpr, PTX: tl.constexpr):
    """Two ``[columns, bytes]`` in ``dtype``: the values of the lower and of the upper four bits of ``packed``
    [columns, bytes], times the scales of ``words`` [groups / 4, columns], four exponents each. With ``PTX`` they are
    smaller than the weights by 2**-32.

    The three lower bits of a value, as the exponent's last two and the mantissa's first bit of a bfloat16 or a float32,
    are the value times 2**-126, subnormal ones included. ``scale`` has that factor in it.
    """
    COLUMNS: tl.constexpr = packed.shape[0]
    BYTES: tl.constexpr = packed.shape[1]
    GROUPS: tl.constexpr = words.shape[0] * 4
    scale = (tl.trans(words)[:, :, None] >> (tl.arange(0, 4) * 8)[None, None, :]) & 255
    scale = tl.reshape(scale, COLUMNS, GROUPS)
    if PTX:
        factor = (scale << 7).to(tl.int16).to(tl.bfloat16, bitcast=True)
    else:
        factor = (scale << 23).to(tl.float32, bitcast=True)
    factor = tl.reshape(tl.broadcast_to(factor[:, :, None], COLUMNS, GROUPS, BYTES // GROUPS), COLUMNS, BYTES)
    if PTX:
        low, high = tl.inline_asm_elementwise(
            "{ .reg .b32 a, b, t, u, s; mov.b32 s, 0;"
            "prmt.b32 a, $4, s, 0x1404; prmt.b32 b, $4, s, 0x3424;"  # each byte to the upper one of 16 bits
            "shl.b32 t, a, 4; and.b32 t, t, 0x80008000; shr.u32 u, a, 2; and.b32 u, u, 0x01C001C0; or.b32 t, t, u;"
            "mul.rn.bf16x2 $0, t, $5;"
            "shl.b32 t, b, 4; and.b32 t, t, 0x80008000; shr.u32 u, b, 2; and.b32 u, u, 0x01C001C0; or.b32 t, t, u;"
            "mul.rn.bf16x2 $1, t, $6;"
            "and.b32 t, a, 0x80008000; shr.u32 u, a, 6; and.b32 u, u, 0x01C001C0; or.b32 t, t, u;"
            "mul.rn.bf16x2 $2, t, $5;"
            "and.b32 t, b, 0x80008000; shr.u32 u, b, 6; and.b32 u, u, 0x01C001C0; or.b32 t, t, u;"
            "mul.rn.bf16x2 $3, t, $6; }",
            "=r,=r,=r,=r,r,r,r", [packed, factor], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=4)
    else:
        bits = packed.to(tl.int32)
        low = ((bits & 8) << 28 | (bits & 7) << 22).to(tl.float32, bitcast=True) * factor
        high = ((bits & 128) << 24 | (bits & 112) << 18).to(tl.float32, bitcast=True) * factor
        low = (low * 4294967296.0).to(dtype)
        high = (high * 4294967296.0).to(dtype)
    return low, high


@triton.jit(do_not_specialize=["total", "num_blocks", "choices"])
def _mxfp4_gemm_kernel(x_ptr, w_ptr, scale_ptr, bias_ptr, out_ptr, rows_ptr, expert_of_block_ptr, total, num_blocks,
                       columns, depth, x_stride, choices, GATED: tl.constexpr, LIMIT: tl.constexpr, WHOLE: tl.constexpr,
                       GROUP: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, BYTES: tl.constexpr,
                       BAND: tl.constexpr, PTX: tl.constexpr, PDL: tl.constexpr):
    start_next(PDL)
    wait_for_last(PDL)
    # Programs go through a band of row blocks before the next columns, so that an expert's matrix stays in the cache.
    program = tl.program_id(0)
    column_blocks = tl.cdiv(columns, COLUMNS)
    first = program // (BAND * column_blocks) * BAND
    height = tl.minimum(num_blocks - first, BAND)
    within = program % (BAND * column_blocks)
    block = first + within % height
    expert = tl.load(expert_of_block_ptr + block).to(tl.int64)
    if expert < 0:
        return
    choice = tl.load(rows_ptr + block * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    present = choice < total
    row = tl.where(present, choice, 0) // choices
    column = within // height * COLUMNS + tl.arange(0, COLUMNS)
    column_in = column < columns
    safe = tl.where(column_in, column, 0)
    HALF: tl.constexpr = GROUP // 2
    WORDS: tl.constexpr = BYTES // HALF // 4  # of four groups' scales
    PARTS: tl.constexpr = 2 if GATED else 1
    byte = tl.arange(0, BYTES)
    word = tl.arange(0, WORDS)
    num_bytes = depth // 2
    num_words = tl.cdiv(depth, GROUP * 4)
    outputs = columns * PARTS
    # A group's byte i has its values i and i + HALF.
    x_at = x_ptr + row[None, :] * x_stride + (byte // HALF * GROUP + byte % HALF)[:, None]
    w_at = w_ptr + expert * outputs * num_bytes + safe.to(tl.int64)[:, None] * num_bytes + byte[None, :]
    scale_at = (scale_ptr.to(tl.pointer_type(tl.int32)) + expert * num_words * outputs
                + word.to(tl.int64)[:, None] * outputs + safe[None, :])
    acc = tl.zeros((COLUMNS, ROWS), tl.float32)
    up = tl.zeros((COLUMNS, ROWS), tl.float32)
    for start in range(0, num_bytes, BYTES):
        if WHOLE:
            x_low = tl.load(x_at)
            x_high = tl.load(x_at + HALF)
            packed = tl.load(w_at)
            words = tl.load(scale_at)
        else:
            inside = byte < num_bytes - start
            words_in = word < num_words - start // (HALF * 4)
            x_low = tl.load(x_at, inside[:, None], other=0.0)
            x_high = tl.load(x_at + HALF, inside[:, None], other=0.0)
            packed = tl.load(w_at, inside[None, :], other=0)
            words = tl.load(scale_at, words_in[:, None], other=0)
        low, high = _unpack(packed, words, x_ptr.dtype.element_ty, PTX)
        acc = tl.dot(low, x_low, acc, input_precision="ieee")
        acc = tl.dot(high, x_high, acc, input_precision="ieee")
        if GATED:
            if WHOLE:
                packed = tl.load(w_at + columns.to(tl.int64) * num_bytes)
                words = tl.load(scale_at + columns)
            else:
                packed = tl.load(w_at + columns.to(tl.int64) * num_bytes, inside[None, :], other=0)
                words = tl.load(scale_at + columns, words_in[:, None], other=0)
            low, high = _unpack(packed, words, x_ptr.dtype.element_ty, PTX)
            up = tl.dot(low, x_low, up, input_precision="ieee")
            up = tl.dot(high, x_high, up, input_precision="ieee")
        x_at += BYTES * 2
        w_at += BYTES
        scale_at += WORDS * outputs
    if PTX:
        acc *= 4294967296.0
        up *= 4294967296.0
    if bias_ptr is not None:
        bias_at = bias_ptr + expert * outputs + safe
        acc += tl.load(bias_at).to(tl.float32)[:, None]
        if GATED:
            up += tl.load(bias_at + columns).to(tl.float32)[:, None]
    if GATED:
        acc = gate_times(acc, up, LIMIT)
    out_at = out_ptr + choice[None, :] * columns + column[:, None]
    tl.store(out_at, acc.to(out_ptr.dtype.element_ty), column_in[:, None] & present[None, :])


def mxfp4_gemm(x: torch.Tensor, weights: Mxfp4Weights, aligned: Alignment, choices: int, total: int, tile: Mxfp4Tile, *,
               gated: bool = False, bias: torch.Tensor | None = None, limit: float = 0.0) -> torch.Tensor:
    """``[total, N]`` in the type of ``x``: row c is ``x[c // choices]`` times its expert's matrix, transposed; rows
    that ``aligned`` leaves out are not written.

    ``x`` [., depth], contiguous in depth. ``gated``: the weights have 2 * N outputs, and the result is ``silu`` of the
    gates' product times the ups', with a ``limit`` ``gated_activation.clamped_gate``. ``bias``, one for each output of
    an expert, is added before that.
    """
    outputs, depth, group = weights.packed.shape[1], weights.packed.shape[2] * 2, weights.group
    columns = outputs // (2 if gated else 1)
    assert x.stride(-1) == 1 and weights.packed.is_contiguous() and weights.scale.is_contiguous()
    assert aligned.block == tile.rows and x.shape[1] == depth and tile.bytes % (2 * group) == 0
    out = torch.empty((total, columns), dtype=x.dtype, device=x.device)
    num_blocks = aligned.expert_of_block.shape[0]
    if num_blocks:
        _mxfp4_gemm_kernel[(num_blocks * triton.cdiv(columns, tile.columns),)](
            x, weights.packed, weights.scale, bias, out, aligned.sorted_choices, aligned.expert_of_block, total,
            num_blocks, columns, depth, x.stride(0), choices, GATED=gated, LIMIT=limit,
            WHOLE=depth // 2 % tile.bytes == 0, GROUP=group, ROWS=tile.rows, COLUMNS=tile.columns, BYTES=tile.bytes,
            BAND=tile.band, PTX=x.dtype == torch.bfloat16 and not INTERPRETED, num_warps=tile.warps,
            num_stages=tile.stages, **pdl(x))
    return out


def mxfp4_products(x: torch.Tensor, gate_up: Mxfp4Weights, down: Mxfp4Weights, topk_ids: torch.Tensor,
                   biases: ExpertBiases | None = None, limit: float = 0.0,
                   tile: Mxfp4Tile | None = None) -> torch.Tensor:
    """The rows that ``moe_sum`` adds up for ``mxfp4_experts``, in the order of choices. It runs the kernels, and needs
    one token or more."""
    tokens, choices = topk_ids.shape
    num_experts, total = len(gate_up.packed), topk_ids.numel()
    tile = tile or default_tile(32 if policy_of(x.device).batch_invariant else tokens * choices / num_experts)
    aligned = moe_align(topk_ids, num_experts, tile.rows)
    between = mxfp4_gemm(x, gate_up, aligned, choices, total, tile, gated=True,
                         bias=None if biases is None else biases.gate_up, limit=limit)
    return mxfp4_gemm(between, down, aligned, 1, total, tile, bias=None if biases is None else biases.down)


def mxfp4_experts(x: torch.Tensor, gate_up: Mxfp4Weights, down: Mxfp4Weights, topk_ids: torch.Tensor,
                  weights: torch.Tensor, biases: ExpertBiases | None = None, limit: float = 0.0,
                  tile: Mxfp4Tile | None = None) -> torch.Tensor:
    """As ``moe_experts.moe_experts``, with S experts in MXFP4: ``gate_up`` of 2 * I outputs, gates before ups, and
    ``down``. ``x`` [T, H]; ``topk_ids`` [T, K] int64, of which those outside of ``[0, S)`` add nothing; ``weights``
    [T, K] float32."""
    if not runs_triton(x):
        return reference.mxfp4_experts(x, gate_up, down, topk_ids, weights, biases, limit)
    out = torch.empty_like(x)
    if len(x):
        made = mxfp4_products(x, gate_up, down, topk_ids, biases, limit, tile)
        moe_sum(made, topk_ids.contiguous(), len(gate_up.packed), weights.contiguous(), None, out)
    return out


def default_tile(rows_each: float) -> Mxfp4Tile:
    """The tile by the rows that an expert gets on average. All have the same depth, so that a row's sums are in one
    order."""
    if rows_each <= 32:
        return Mxfp4Tile(16 if rows_each <= 8 else 32, 64, 64, 1, 4, 4)
    return Mxfp4Tile(64, 128, 64, 4, 8, 3) if rows_each <= 96 else Mxfp4Tile(128, 128, 64, 4, 8, 3)
