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
from ..gated_activation import GateActivation, gate_times
from ..gemm.split_k_reduce import last_split_sum, split_counters
from ..tuning.policy import policy_of
from .moe_align import Alignment, moe_align
from .moe_sum import moe_sum


class Mxfp4Tile(NamedTuple):
    """One program's part of a product: ``rows`` tokens x ``columns`` outputs, over one of ``splits`` of the inputs.
    ``band``: blocks of rows that programs go through before the next columns."""

    rows: int
    columns: int
    band: int
    warps: int
    stages: int
    splits: int = 1


@triton.jit
def _values(words, factors, DTYPE: tl.constexpr, PTX: tl.constexpr):
    """The four values of each of ``words`` [columns, words] int16, in DTYPE, times the four ``factors``. With ``PTX``
    they are smaller than the weights by 2**-32.

    The three lower bits of a value, as the exponent's last two and the mantissa's first bit of a bfloat16 or a float32,
    are the value times 2**-126, subnormal ones included; the factors have that in them. In a word they are where one
    shift and one mask bring them there, but those of the fourth value."""
    if PTX:
        a, b, c, d = tl.inline_asm_elementwise(
            "{ .reg .b32 a, b, c, d, t; and.b32 a, $4, 0x81C081C0; shl.b32 b, $4, 3; and.b32 b, b, 0x81C081C0; "
            "shl.b32 c, $4, 6; and.b32 c, c, 0x81C081C0; shl.b32 d, $4, 1; and.b32 d, d, 0x80008000; "
            "shr.u32 t, $4, 5; lop3.b32 d, t, 0x01000100, d, 0xEA; shr.u32 t, $4, 4; "
            "lop3.b32 d, t, 0x00C000C0, d, 0xEA; mul.rn.bf16x2 $0, a, $5; mul.rn.bf16x2 $1, b, $6; "
            "mul.rn.bf16x2 $2, c, $7; mul.rn.bf16x2 $3, d, $8; }", "=r,=r,=r,=r,r,r,r,r,r",
            [words, factors[0], factors[1], factors[2], factors[3]],
            dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16), is_pure=True, pack=2)
    else:
        bits = words.to(tl.int32) & 0xFFFF
        d = (bits << 1 & 0x8000) | (bits >> 5 & 0x0100) | (bits >> 4 & 0x00C0)
        a = ((bits & 0x81C0) << 16).to(tl.float32, bitcast=True) * factors[0] * 4294967296.0
        b = ((bits << 3 & 0x81C0) << 16).to(tl.float32, bitcast=True) * factors[1] * 4294967296.0
        c = ((bits << 6 & 0x81C0) << 16).to(tl.float32, bitcast=True) * factors[2] * 4294967296.0
        d = (d << 16).to(tl.float32, bitcast=True) * factors[3] * 4294967296.0
        a, b, c, d = a.to(DTYPE), b.to(DTYPE), c.to(DTYPE), d.to(DTYPE)
    return a, b, c, d


@triton.jit
def _factor(quads, INDEX: tl.constexpr, PTX: tl.constexpr):
    """The power of two of the group INDEX of each of ``quads`` int32, which are four exponents each."""
    scale = quads >> (8 * INDEX) & 255
    if PTX:
        factor = (scale << 7).to(tl.int16).to(tl.bfloat16, bitcast=True)
    else:
        factor = (scale << 23).to(tl.float32, bitcast=True)
    return factor


@triton.jit
def _add_products(acc, x, w_at, scale_at, PTX: tl.constexpr):
    """Adds the products of the four groups ``x`` of each row with the words at ``w_at`` [COLUMNS, WORDS]; their scales
    are at ``scale_at`` [COLUMNS, WORDS] or [COLUMNS, 1]."""
    words, quads = tl.load(w_at), tl.load(scale_at)
    factors = (_factor(quads, 0, PTX), _factor(quads, 1, PTX), _factor(quads, 2, PTX), _factor(quads, 3, PTX))
    factors = (tl.broadcast_to(factors[0], words.shape), tl.broadcast_to(factors[1], words.shape),
               tl.broadcast_to(factors[2], words.shape), tl.broadcast_to(factors[3], words.shape))
    a, b, c, d = _values(words, factors, x[0].dtype, PTX)
    acc = tl.dot(a, x[0], acc, input_precision="ieee")
    acc = tl.dot(b, x[1], acc, input_precision="ieee")
    acc = tl.dot(c, x[2], acc, input_precision="ieee")
    return tl.dot(d, x[3], acc, input_precision="ieee")


@triton.jit
def _load_group(x_at, position, depth):
    return tl.trans(tl.load(x_at, (position < depth)[None, :], other=0.0))


@triton.jit(do_not_specialize=["total", "num_blocks", "choices", "splits"])
def _mxfp4_gemm_kernel(x_ptr, w_ptr, scale_ptr, bias_ptr, out_ptr, partial_ptr, counter_ptr, rows_ptr,
                       expert_of_block_ptr, total, num_blocks, columns, depth, num_quads, x_stride, choices, splits,
                       GATED: tl.constexpr, LIMIT: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr,
                       COLUMNS: tl.constexpr, WORDS: tl.constexpr, BAND: tl.constexpr, REDUCES: tl.constexpr,
                       PTX: tl.constexpr, PDL: tl.constexpr):
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
    PARTS: tl.constexpr = 2 if GATED else 1
    word = tl.arange(0, WORDS)
    row_words = num_quads * GROUP
    outputs = columns * PARTS
    # Word i of four groups has the value i of each.
    position = word // GROUP * (4 * GROUP) + word % GROUP
    x_at = x_ptr + row[:, None] * x_stride + position[None, :]
    w_at = (w_ptr.to(tl.pointer_type(tl.int16)) + expert * outputs * row_words + safe.to(tl.int64)[:, None] * row_words
            + word[None, :])
    scale_at = scale_ptr.to(tl.pointer_type(tl.int32)) + expert * num_quads * outputs + safe[:, None]
    if WORDS > GROUP:
        scale_at += (word // GROUP * outputs)[None, :]
    acc = tl.zeros((COLUMNS, ROWS), tl.float32)
    up = tl.zeros((COLUMNS, ROWS), tl.float32)
    steps = row_words // WORDS
    each = tl.cdiv(steps, splits)
    first_step = tl.program_id(1) * each
    position += first_step * (WORDS * 4)
    x_at += first_step * (WORDS * 4)
    w_at += first_step * WORDS
    scale_at += first_step * (WORDS // GROUP * outputs)
    for _ in range(first_step, tl.minimum(first_step + each, steps)):
        x = (_load_group(x_at, position, depth), _load_group(x_at + GROUP, position + GROUP, depth),
             _load_group(x_at + 2 * GROUP, position + 2 * GROUP, depth),
             _load_group(x_at + 3 * GROUP, position + 3 * GROUP, depth))
        acc = _add_products(acc, x, w_at, scale_at, PTX)
        if GATED:
            up = _add_products(up, x, w_at + columns.to(tl.int64) * row_words, scale_at + columns, PTX)
        position += WORDS * 4
        x_at += WORDS * 4
        w_at += WORDS
        scale_at += WORDS // GROUP * outputs
    out_at = choice[None, :] * columns + column[:, None]
    stored = column_in[:, None] & present[None, :]
    is_last = True
    if REDUCES:
        size = tl.cast(total, tl.int64) * columns
        up_ptr = partial_ptr + splits * size
        if GATED:
            tl.store(up_ptr + tl.program_id(1) * size + out_at, up, stored)
        is_last, acc = last_split_sum(acc, partial_ptr, counter_ptr, program, tl.program_id(1), splits, size, out_at,
                                      stored)
        if GATED and is_last:
            up = tl.zeros((COLUMNS, ROWS), tl.float32)
            for other in range(splits):
                up += tl.load(up_ptr + tl.cast(other, tl.int64) * size + out_at, stored, other=0.0,
                              cache_modifier=".cg")
    if is_last:
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
        tl.store(out_ptr + out_at, acc.to(out_ptr.dtype.element_ty), stored)


def mxfp4_gemm(x: torch.Tensor, weights: Mxfp4Weights, aligned: Alignment, choices: int, total: int, tile: Mxfp4Tile, *,
               gated: bool = False, bias: torch.Tensor | None = None, limit: float = 0.0) -> torch.Tensor:
    """``[total, N]`` in the type of ``x``: row c is ``x[c // choices]`` times its expert's matrix, transposed; rows
    that ``aligned`` leaves out are not written.

    ``x`` [., depth], contiguous in depth. ``gated``: the weights have 2 * N outputs, and the result is ``silu`` of the
    gates' product times the ups', with a ``limit`` ``gated_activation.clamped_gate``. ``bias``, one for each output of
    an expert, is added before that.
    """
    outputs, group, depth = weights.packed.shape[1], weights.group, x.shape[1]
    num_quads = weights.scale.shape[1]
    words = max(group, reference.MXFP4_MIN_WORDS)
    columns = outputs // (2 if gated else 1)
    assert x.stride(-1) == 1 and weights.packed.is_contiguous() and weights.scale.is_contiguous()
    assert aligned.block == tile.rows and weights.packed.shape[2] == 2 * num_quads * group
    assert num_quads * group % words == 0 and -(-depth // group // 4) <= num_quads
    out = torch.empty((total, columns), dtype=x.dtype, device=x.device)
    num_blocks = aligned.expert_of_block.shape[0]
    tiles = num_blocks * triton.cdiv(columns, tile.columns)
    splits = tile.splits if tiles <= len(split_counters(x.device)) else 1
    partials = out
    if splits > 1:
        partials = torch.empty((2 if gated else 1, splits, total, columns), dtype=torch.float32, device=x.device)
    if num_blocks:
        _mxfp4_gemm_kernel[(tiles, splits)](
            x, weights.packed, weights.scale, bias, out, partials, split_counters(x.device), aligned.sorted_choices,
            aligned.expert_of_block, total, num_blocks, columns, depth, num_quads, x.stride(0), choices, splits,
            GATED=gated, LIMIT=limit, GROUP=group, ROWS=tile.rows, COLUMNS=tile.columns, WORDS=words, BAND=tile.band,
            REDUCES=splits > 1, PTX=x.dtype == torch.bfloat16 and not INTERPRETED, num_warps=tile.warps,
            num_stages=tile.stages, **pdl(x))
    return out


def mxfp4_products(x: torch.Tensor, gate_up: Mxfp4Weights, down: Mxfp4Weights, topk_ids: torch.Tensor,
                   biases: ExpertBiases | None = None, limit: float = 0.0,
                   tile: Mxfp4Tile | None = None, activate: GateActivation | None = None) -> torch.Tensor:
    """The rows that ``moe_sum`` adds up for ``mxfp4_experts``, in the order of choices. It runs the kernels, and needs
    one token or more."""
    tokens, choices = topk_ids.shape
    num_experts, total = len(gate_up.packed), topk_ids.numel()
    tile = tile or default_tile(32 if policy_of(x.device).batch_invariant else tokens * choices / num_experts)
    aligned = moe_align(topk_ids, num_experts, tile.rows)
    between = mxfp4_gemm(x, gate_up, aligned, choices, total, tile, gated=activate is None,
                         bias=None if biases is None else biases.gate_up, limit=limit)
    if activate is not None:
        between = activate(between)
    return mxfp4_gemm(between, down, aligned, 1, total, tile, bias=None if biases is None else biases.down)


def mxfp4_experts(x: torch.Tensor, gate_up: Mxfp4Weights, down: Mxfp4Weights, topk_ids: torch.Tensor,
                  weights: torch.Tensor, biases: ExpertBiases | None = None, limit: float = 0.0,
                  tile: Mxfp4Tile | None = None, activate: GateActivation | None = None) -> torch.Tensor:
    """As ``moe_experts.moe_experts``, with S experts in MXFP4: ``gate_up`` of 2 * I outputs, gates before ups, and
    ``down``. ``x`` [T, H]; ``topk_ids`` [T, K] int64, of which those outside of ``[0, S)`` add nothing; ``weights``
    [T, K] float32."""
    if not runs_triton(x):
        return reference.mxfp4_experts(x, gate_up, down, topk_ids, weights, biases, limit, activate)
    out = torch.empty_like(x)
    if len(x):
        made = mxfp4_products(x, gate_up, down, topk_ids, biases, limit, tile, activate)
        moe_sum(made, topk_ids.contiguous(), len(gate_up.packed), weights.contiguous(), None, out)
    return out


def default_tile(rows_each: float) -> Mxfp4Tile:
    """The tile by the rows that an expert gets on average. All have the same depth, so that a row's sums are in one
    order, but where few experts have rows: their inputs are split, or too few programs would read."""
    if rows_each <= 0.25:
        return Mxfp4Tile(8, 64, 1, 2, 4, 6 if rows_each <= 0.05 else 4)
    if rows_each <= 8:
        return Mxfp4Tile(8, 64, 1, 2, 6) if rows_each <= 4 else Mxfp4Tile(16, 64, 1, 4, 4)
    if rows_each <= 32:
        return Mxfp4Tile(32, 128, 1, 8, 3)
    return Mxfp4Tile(64, 128, 4, 8, 3) if rows_each <= 96 else Mxfp4Tile(128, 128, 4, 8, 3)
