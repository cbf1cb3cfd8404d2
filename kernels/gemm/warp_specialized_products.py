"""Computes and stores a tile in a multiplying warp group of warp-specialized kernels: 64 rows by 256 of the matrix's.

``ring`` is shared memory of rows and of matrices, and barriers that say of each slot that it is loaded, or read.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from .. import reference
from .._gluon import tma_store
from .warp_specialized_gate import gate_times, rounded

FP8_LARGEST, FP8_LEAST = gl.constexpr(reference.FP8_LARGEST), gl.constexpr(reference.FP8_LEAST)


@gluon.jit
def wait_for_step(ring, step, GATHERED: gl.constexpr, STAGES: gl.constexpr):
    """Waits until a step is loaded and returns its slot."""
    mbarrier.wait(ring[2].index(step % STAGES), (step // STAGES) & 1)
    if GATHERED:  # makes threads' copies visible to the tensor cores
        fence_async_shared()
    return step % STAGES


@gluon.jit
def product(ring, step, depth, GROUP: gl.constexpr, GATHERED: gl.constexpr, DEPTH: gl.constexpr, STAGES: gl.constexpr):
    """``(the first 128 columns, the others, the next step)`` of a product in 16 bits."""
    a_bufs, b_bufs, ready, empty = ring
    layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 256, 16])
    acc = gl.zeros((64, 256), gl.float32, layout)
    for start in range(0, depth, DEPTH):
        slot = wait_for_step(ring, step, GATHERED, STAGES)
        acc = warpgroup_mma(a_bufs.index(2 * slot + GROUP), b_bufs.index(slot).permute((1, 0)), acc, use_acc=start > 0,
                            is_async=True)
        acc = warpgroup_mma_wait(1, deps=(acc,))  # the previous step has been read
        mbarrier.arrive(empty.index((step + STAGES - 1) % STAGES), pred=start > 0)
        step += 1
    made = warpgroup_mma_wait(0, deps=(acc,))
    mbarrier.arrive(empty.index((step + STAGES - 1) % STAGES))
    left, right = made.reshape([64, 2, 128]).permute(0, 2, 1).split()
    return left, right, step


@gluon.jit
def _plus_scaled(sums, part, scale):
    """``sums + part * scale``, computed at once: the compiler would postpone it until after the next product, which can
    reuse the registers of ``part``."""
    scale = gl.broadcast(scale, part)[0]
    return gl.inline_asm_elementwise("fma.rn.f32 $0, $1, $2, $3;", "=f,f,f,f", [part, scale, sums], dtype=gl.float32,
                                     is_pure=False, pack=1)


@gluon.jit
def scaled_product(ring, step, depth, a_scale_at, left_at, right_at, GROUP: gl.constexpr, GATED: gl.constexpr,
                   DEPTH: gl.constexpr, STAGES: gl.constexpr):
    """Computes ``product`` in float8, with a scale for each row's and each matrix's 128 values of depth.

    Alternating the two groups' products by barriers gained nothing, nor did parts of 64 columns, of which one is scaled
    while the tensor cores compute the next (tests/bench/results, experts).
    """
    a_bufs, b_bufs, ready, empty = ring
    layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 128, 32])
    zero = gl.zeros((64, 128), gl.float32, layout)
    left, right = zero, zero
    a_scale, left_scale, right_scale = gl.load(a_scale_at), gl.load(left_at), gl.load(right_at)
    for start in range(0, depth, DEPTH):
        slot = wait_for_step(ring, step, GATED, STAGES)
        a, b = a_bufs.index(2 * slot + GROUP), b_bufs.index(slot)
        part = warpgroup_mma(a, b.slice(0, 128, 0).permute((1, 0)), zero, use_acc=False, is_async=True)
        ahead = start // DEPTH + 1  # loaded before they are needed
        more = start + DEPTH < depth
        next_a = gl.load(a_scale_at + ahead, mask=more, other=0.0)
        next_left = gl.load(left_at + ahead, mask=more, other=0.0)
        next_right = gl.load(right_at + ahead, mask=more, other=0.0)
        part = warpgroup_mma_wait(0, deps=(part,))
        left = _plus_scaled(left, part, (a_scale * left_scale)[:, None])
        part = warpgroup_mma(a, b.slice(128, 128, 0).permute((1, 0)), zero, use_acc=False, is_async=True)
        part = warpgroup_mma_wait(0, deps=(part,))
        mbarrier.arrive(empty.index(slot))
        right += part * (a_scale * right_scale)[:, None]
        a_scale, left_scale, right_scale = next_a, next_left, next_right
        step += 1
    return left, right, step


@gluon.jit
def scales_at(scales, work, row, expert, column, columns, GATED: gl.constexpr):
    """Pointers to the first scales of 64 rows, tokens' by their choices, and of the matrix's two column halves."""
    a_scale_ptr, b_scale_ptr, scale_columns, scale_depth, choices = scales
    layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 128, 32])
    each = row + gl.arange(0, 64, gl.SliceLayout(1, layout))
    if GATED:
        choice = gl.load(work[0] + each)
        each = gl.where(choice < work[2], choice, 0) // choices
    left_at = b_scale_ptr + (expert * scale_columns + column // 128) * scale_depth
    right_at = left_at + (columns // 128 if GATED else 1) * scale_depth
    return a_scale_ptr + each * scale_depth, left_at, right_at


@gluon.jit
def with_bias(left, right, bias_ptr, expert, column, columns, GATED: gl.constexpr):
    each = column + gl.arange(0, 128, gl.SliceLayout(0, left.type.layout))
    bias_at = bias_ptr + expert.to(gl.int64) * (2 * columns if GATED else columns) + each
    left += gl.load(bias_at, mask=each < columns, other=0.0).to(gl.float32)[None, :]
    if GATED:
        right += gl.load(bias_at + columns, mask=each < columns, other=0.0).to(gl.float32)[None, :]
    else:
        right += gl.load(bias_at + 128, mask=each + 128 < columns, other=0.0).to(gl.float32)[None, :]
    return left, right


@gluon.jit
def store(out_desc, made, out, row, column):
    """Stores by TMA, once it has read the previous content of ``out``."""
    tma.store_wait(0)
    out.store(made.to(out_desc.dtype))
    fence_async_shared()
    tma_store(out_desc, [row, column], out)


@gluon.jit
def gated_or_float8(left, right, row, column, columns, out_scale_ptr, LIMIT: gl.constexpr, BETWEEN: gl.constexpr):
    """The activation of ``left`` and ``right``; where there are scales to write, in float8, as fp8_quantize.py makes it
    of ``BETWEEN``'s type. Only values between two float8 ones may differ, since they are multiplied by the scale's
    inverse."""
    made = gate_times(left, right, LIMIT)
    if out_scale_ptr is not None:
        made = rounded(made, BETWEEN)
        scale = gl.maximum(gl.max(gl.abs(made), 1), FP8_LEAST) / FP8_LARGEST
        each = row + gl.arange(0, 64, scale.type.layout)
        gl.store(out_scale_ptr + each * (columns // 128) + column // 128, scale)
        made = made * gl.expand_dims(1.0 / scale, 1)  # the cast saturates
    return made


@gluon.jit
def store_gated(out_desc, left, right, out, row, column, columns, out_scale_ptr, LIMIT: gl.constexpr,
                BETWEEN: gl.constexpr):
    """Stores the result of ``gated_or_float8``."""
    made = gated_or_float8(left, right, row, column, columns, out_scale_ptr, LIMIT, BETWEEN)
    store(out_desc, made, out, row, column)


@gluon.jit
def store_panels(out_desc, made, outs, FIRST: gl.constexpr, row, column, GROUP: gl.constexpr):
    """Stores 128 columns by panels of 128 bytes a row, of which a group has two: while TMA reads one, the other is
    filled. ``FIRST`` is the number of the first panel in the tile."""
    wide: gl.constexpr = out_desc.block_shape[1]
    if wide == 128:
        tma.store_wait(0)  # always the same of the two
        _store_panel(out_desc, made, outs.index(2 * GROUP), row, column)
    else:
        first, second = made.reshape([64, 2, 64]).permute(0, 2, 1).split()
        _store_panel(out_desc, first, outs.index(2 * GROUP), row, column + 64 * FIRST)
        _store_panel(out_desc, second, outs.index(2 * GROUP + 1), row, column + 64 * FIRST + 64)


@gluon.jit
def _store_panel(out_desc, made, out, row, column):
    tma.store_wait(1)
    out.store(made.to(out_desc.dtype))
    fence_async_shared()
    tma_store(out_desc, [row, column], out)
