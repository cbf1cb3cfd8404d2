"""Grouped matrix products of many rows an expert: between the two products rows stay in the order of the experts.

So the second product reads and writes whole tiles, and TMA, where there is one, moves all tiles but the tokens' own. A
block that is at most half full is computed as half a block: of 256 rows an expert a quarter of the work would otherwise
be padding. On a Hopper GPU moe_warp_specialized.py has the same products in warp-specialized kernels.
"""

from __future__ import annotations

import torch

from .._triton import pdl, runs_gluon, start_next, tl, triton, wait_for_last
from ..gated_activation import gate_times
from ..tuning.moe import Tile
from .moe_align import Alignment
from .moe_gemm import SCALE_GROUP

HALVES_MIN_ROWS = 128
"""Rows from which on a block may be computed as half a block: a tensor core product of Hopper has 64 at least."""


@triton.jit
def _block_of_program(num_blocks, column_blocks, band):
    """``(row block, column block)``: a band of row blocks, before the next columns, keeps an expert's matrix cached."""
    program = tl.program_id(0)
    first = program // (band * column_blocks) * band
    height = tl.minimum(num_blocks - first, band)
    within = program % (band * column_blocks)
    return first + within % height, within // height


@triton.jit
def _tile_of_program(rows_ptr, expert_of_block_ptr, total, num_blocks, columns, band, HALVES: tl.constexpr,
                     BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr):
    """``(first row, first column, the block's expert, is more than half of the block used)``."""
    block, column_block = _block_of_program(num_blocks, tl.cdiv(columns, BLOCK_COLUMNS), band)
    start_row = block * BLOCK_ROWS
    expert = tl.load(expert_of_block_ptr + block)
    full = True
    if HALVES:  # loaded before the wait for the expert
        full = tl.load(rows_ptr + start_row + BLOCK_ROWS // 2) < total
    return start_row, column_block * BLOCK_COLUMNS, expert, full


@triton.jit
def _up_tile(a_ptr, a_scale_ptr, b_desc, b_scale_ptr, bias_ptr, out_desc, rows_ptr, start_row, expert, column, total,
             columns, depth, a_stride, scale_columns, scale_depth, choices, SCALES: tl.constexpr, GROUP: tl.constexpr,
             LIMIT: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr):
    choice = tl.load(rows_ptr + start_row + tl.arange(0, ROWS))
    row = tl.where(choice < total, choice, 0).to(tl.int64) // choices
    a_at = a_ptr + row[:, None] * a_stride + tl.arange(0, DEPTH)[None, :]
    gate_row = expert * 2 * columns + column
    if SCALES == "block":
        a_scale_at = a_scale_ptr + row * scale_depth
        b_scale_at = b_scale_ptr + (expert * scale_columns + column // GROUP) * scale_depth
        up_scale_at = b_scale_ptr + (expert * scale_columns + (columns + column) // GROUP) * scale_depth
    gate = tl.zeros((ROWS, COLUMNS), tl.float32)
    up = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(0, depth, DEPTH):
        b = b_desc.load([gate_row, start])  # before the tokens, since it does not wait for the rows' numbers
        c = b_desc.load([gate_row + columns, start])
        a = tl.load(a_at)
        if SCALES == "block":
            step = start // GROUP
            a_scale = tl.load(a_scale_at + step)[:, None]
            gate += tl.dot(a, b.T) * (a_scale * tl.load(b_scale_at + step))
            up += tl.dot(a, c.T) * (a_scale * tl.load(up_scale_at + step))
        else:
            gate = tl.dot(a, b.T, gate, input_precision="ieee")
            up = tl.dot(a, c.T, up, input_precision="ieee")
        a_at += DEPTH
    if SCALES == "row":
        row_scale = tl.load(a_scale_ptr + row)[:, None]
        each = column + tl.arange(0, COLUMNS)
        b_scale_at = b_scale_ptr + expert * scale_columns + each
        gate *= row_scale * tl.load(b_scale_at, each < columns, other=0.0)[None, :]
        up *= row_scale * tl.load(b_scale_at + columns, each < columns, other=0.0)[None, :]
    if bias_ptr is not None:
        each = column + tl.arange(0, COLUMNS)
        bias_at = bias_ptr + expert.to(tl.int64) * 2 * columns + each
        gate += tl.load(bias_at, each < columns, other=0.0).to(tl.float32)[None, :]
        up += tl.load(bias_at + columns, each < columns, other=0.0).to(tl.float32)[None, :]
    made = gate_times(gate, up, LIMIT)
    out_desc.store([start_row, column], made.to(out_desc.dtype))


# Scales' sizes too: another shape must not recompile the kernel.
@triton.jit(do_not_specialize=["total", "num_blocks", "scale_columns", "scale_depth", "choices", "band"])
def _moe_up_kernel(a_ptr, a_scale_ptr, b_desc, b_scale_ptr, bias_ptr, out_desc, out_half, rows_ptr, expert_of_block_ptr,
                   total, num_blocks, columns, depth, a_stride, scale_columns, scale_depth, choices, band,
                   SCALES: tl.constexpr, GROUP: tl.constexpr, LIMIT: tl.constexpr, HALVES: tl.constexpr,
                   BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr, BLOCK_DEPTH: tl.constexpr, PDL: tl.constexpr):
    start_next(PDL)
    wait_for_last(PDL)
    start_row, column, expert, full = _tile_of_program(rows_ptr, expert_of_block_ptr, total, num_blocks, columns, band,
                                                       HALVES, BLOCK_ROWS, BLOCK_COLUMNS)
    if expert < 0:
        return
    if full:
        _up_tile(a_ptr, a_scale_ptr, b_desc, b_scale_ptr, bias_ptr, out_desc, rows_ptr, start_row, expert, column,
                 total, columns, depth, a_stride, scale_columns, scale_depth, choices, SCALES, GROUP, LIMIT, BLOCK_ROWS,
                 BLOCK_COLUMNS, BLOCK_DEPTH)
    else:
        _up_tile(a_ptr, a_scale_ptr, b_desc, b_scale_ptr, bias_ptr, out_half, rows_ptr, start_row, expert, column,
                 total, columns, depth, a_stride, scale_columns, scale_depth, choices, SCALES, GROUP, LIMIT,
                 BLOCK_ROWS // 2, BLOCK_COLUMNS, BLOCK_DEPTH)


@triton.jit
def _down_tile(a_desc, a_scale_ptr, b_desc, b_scale_ptr, bias_ptr, out_desc, start_row, expert, column, columns, depth,
               scale_columns, scale_depth, SCALES: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr,
               COLUMNS: tl.constexpr, DEPTH: tl.constexpr):
    row = start_row + tl.arange(0, ROWS)
    if SCALES == "block":
        a_scale_at = a_scale_ptr + row * scale_depth
        b_scale_at = b_scale_ptr + (expert * scale_columns + column // GROUP) * scale_depth
    acc = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(0, depth, DEPTH):
        a = a_desc.load([start_row, start])
        b = b_desc.load([expert * columns + column, start])
        if SCALES == "block":
            step = start // GROUP
            acc += tl.dot(a, b.T) * (tl.load(a_scale_at + step)[:, None] * tl.load(b_scale_at + step))
        else:
            acc = tl.dot(a, b.T, acc, input_precision="ieee")
    if SCALES == "row":
        each = column + tl.arange(0, COLUMNS)
        b_scale = tl.load(b_scale_ptr + expert * scale_columns + each, each < columns, other=0.0)
        acc *= tl.load(a_scale_ptr + row)[:, None] * b_scale[None, :]
    if bias_ptr is not None:
        each = column + tl.arange(0, COLUMNS)
        bias = tl.load(bias_ptr + expert.to(tl.int64) * columns + each, each < columns, other=0.0)
        acc += bias.to(tl.float32)[None, :]
    out_desc.store([start_row, column], acc.to(out_desc.dtype))


@triton.jit(do_not_specialize=["total", "num_blocks", "scale_columns", "scale_depth", "band"])
def _moe_down_kernel(a_desc, a_half, a_scale_ptr, b_desc, b_scale_ptr, bias_ptr, out_desc, out_half, rows_ptr,
                     expert_of_block_ptr, total, num_blocks, columns, depth, scale_columns, scale_depth, band,
                     SCALES: tl.constexpr, GROUP: tl.constexpr, HALVES: tl.constexpr, BLOCK_ROWS: tl.constexpr,
                     BLOCK_COLUMNS: tl.constexpr, BLOCK_DEPTH: tl.constexpr, PDL: tl.constexpr):
    start_next(PDL)
    wait_for_last(PDL)
    start_row, column, expert, full = _tile_of_program(rows_ptr, expert_of_block_ptr, total, num_blocks, columns, band,
                                                       HALVES, BLOCK_ROWS, BLOCK_COLUMNS)
    if expert < 0:
        return
    if full:
        _down_tile(a_desc, a_scale_ptr, b_desc, b_scale_ptr, bias_ptr, out_desc, start_row, expert, column, columns,
                   depth, scale_columns, scale_depth, SCALES, GROUP, BLOCK_ROWS, BLOCK_COLUMNS, BLOCK_DEPTH)
    else:
        _down_tile(a_half, a_scale_ptr, b_desc, b_scale_ptr, bias_ptr, out_half, start_row, expert, column, columns,
                   depth, scale_columns, scale_depth, SCALES, GROUP, BLOCK_ROWS // 2, BLOCK_COLUMNS, BLOCK_DEPTH)


def _tiles_of(matrix: torch.Tensor, rows: int, columns: int) -> object:
    """Describes tiles of ``matrix``, of any number of dimensions, as rows of its last one."""
    from triton.tools.tensor_descriptor import TensorDescriptor  # not there without Triton
    return TensorDescriptor.from_tensor(matrix.view(-1, matrix.shape[-1]), [rows, columns])


def _scale_kind(b_scale: torch.Tensor | None) -> tuple[str, int, int]:
    """``(the kernels' name of the scales, their sizes)``."""
    if b_scale is None:
        return "none", 0, 0
    return "row" if b_scale.dim() == 2 else "block", b_scale.shape[1], b_scale.shape[-1]


def fits(tile: Tile, depth: int, columns: int, by_block: bool) -> bool:
    """Says whether a product of this depth can be cut into such tiles: in whole steps, and rows of whole 16 bytes."""
    most_columns = 2 * SCALE_GROUP if tile.is_warp_specialized else SCALE_GROUP
    return depth % tile.depth == 0 and columns % 16 == 0 and (
        not by_block or (tile.depth == SCALE_GROUP and tile.columns <= most_columns))


def supports_warp_specialized(device: torch.device, hidden: int, size: int, dtype: torch.dtype) -> bool:
    """Says whether warp-specialized products run on a device, and have whole steps in a layer with these sizes."""
    if dtype.itemsize == 1:
        return runs_gluon(device) and hidden % (2 * SCALE_GROUP) == 0 and size % SCALE_GROUP == 0
    return runs_gluon(device) and dtype.itemsize == 2 and hidden % 64 == 0 and size % 64 == 0


def _warp_specialized(a: torch.Tensor, b: torch.Tensor, aligned: Alignment, choices: int, total: int, tile: Tile,
                      dtype: torch.dtype, gated: bool, a_scale: torch.Tensor | None, b_scale: torch.Tensor | None,
                      bias: torch.Tensor | None, limit: float = 0.0,
                      out_scale: torch.Tensor | None = None) -> torch.Tensor:
    from .moe_warp_specialized import grouped_product  # not there without Triton
    assert b_scale is None or b_scale.dim() == 3
    return grouped_product(a, b, aligned, choices, total, tile, dtype, gated, a_scale, b_scale, bias, limit, out_scale)


def moe_up(a: torch.Tensor, b: torch.Tensor, aligned: Alignment, choices: int, total: int, tile: Tile,
           dtype: torch.dtype, a_scale: torch.Tensor | None = None,
           b_scale: torch.Tensor | None = None, bias: torch.Tensor | None = None, limit: float = 0.0) -> torch.Tensor:
    """``[rows of aligned, N]`` in ``dtype``: row i is ``silu(gate) * up`` of its token,
    ``aligned.sorted_choices[i] // choices``, by its expert's matrices; arbitrary where ``aligned`` has no choice.

    ``a`` [T, depth], contiguous in depth; ``b`` [S, 2 * N, depth], each gate before its up. Scales, bias and limit as
    in ``moe_gemm``.
    """
    columns, depth = b.shape[1] // 2, b.shape[2]
    how, scale_columns, scale_depth = _scale_kind(b_scale)
    assert a.stride(-1) == 1 and b.is_contiguous() and aligned.block == tile.block
    assert fits(tile, depth, columns, how == "block")
    if tile.is_warp_specialized:
        return _warp_specialized(a, b, aligned, choices, total, tile, dtype, True, a_scale, b_scale, bias, limit)
    out = torch.empty((len(aligned.sorted_choices), columns), dtype=dtype, device=a.device)
    num_blocks = len(aligned.expert_of_block)
    _moe_up_kernel[(num_blocks * triton.cdiv(columns, tile.columns),)](
        a, a_scale, _tiles_of(b, tile.columns, tile.depth), b_scale, bias, _tiles_of(out, tile.rows, tile.columns),
        _tiles_of(out, tile.rows // 2, tile.columns), aligned.sorted_choices, aligned.expert_of_block, total,
        num_blocks, columns, depth, a.stride(0), scale_columns, scale_depth, choices, tile.band, SCALES=how,
        GROUP=SCALE_GROUP, LIMIT=limit, HALVES=tile.rows >= HALVES_MIN_ROWS, BLOCK_ROWS=tile.rows,
        BLOCK_COLUMNS=tile.columns, BLOCK_DEPTH=tile.depth, num_warps=tile.warps, num_stages=tile.stages, **pdl(a))
    return out


def moe_up_in_float8(a: torch.Tensor, b: torch.Tensor, aligned: Alignment, choices: int, total: int, tile: Tile,
                     dtype: torch.dtype, a_scale: torch.Tensor, b_scale: torch.Tensor | None,
                     bias: torch.Tensor | None, limit: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Computes ``quantize_groups`` of ``moe_up`` in one kernel, by a warp-specialized ``tile``."""
    columns = b.shape[1] // 2
    assert fits(tile, b.shape[2], columns, True) and columns % SCALE_GROUP == 0
    scale = torch.empty((len(aligned.sorted_choices), columns // SCALE_GROUP), dtype=torch.float32, device=a.device)
    made = _warp_specialized(a, b, aligned, choices, total, tile, dtype, True, a_scale, b_scale, bias, limit, scale)
    return made, scale


def moe_down(a: torch.Tensor, b: torch.Tensor, aligned: Alignment, total: int, tile: Tile, dtype: torch.dtype,
             a_scale: torch.Tensor | None = None, b_scale: torch.Tensor | None = None,
             bias: torch.Tensor | None = None) -> torch.Tensor:
    """``[rows of aligned, N]`` in ``dtype``: row i is ``a[i]`` times its expert's matrix, transposed, plus ``bias``.

    ``a`` [rows of aligned, depth] as ``moe_up`` makes it; ``b`` [S, N, depth]; both contiguous.
    """
    columns, depth = b.shape[1:]
    how, scale_columns, scale_depth = _scale_kind(b_scale)
    assert a.is_contiguous() and b.is_contiguous() and aligned.block == tile.block
    assert fits(tile, depth, columns, how == "block")
    if tile.is_warp_specialized:
        return _warp_specialized(a, b, aligned, 1, total, tile, dtype, False, a_scale, b_scale, bias)
    out = torch.empty((len(aligned.sorted_choices), columns), dtype=dtype, device=a.device)
    num_blocks = len(aligned.expert_of_block)
    _moe_down_kernel[(num_blocks * triton.cdiv(columns, tile.columns),)](
        _tiles_of(a, tile.rows, tile.depth), _tiles_of(a, tile.rows // 2, tile.depth), a_scale,
        _tiles_of(b, tile.columns, tile.depth), b_scale, bias, _tiles_of(out, tile.rows, tile.columns),
        _tiles_of(out, tile.rows // 2, tile.columns), aligned.sorted_choices, aligned.expert_of_block, total,
        num_blocks, columns, depth, scale_columns, scale_depth, tile.band, SCALES=how, GROUP=SCALE_GROUP,
        HALVES=tile.rows >= HALVES_MIN_ROWS, BLOCK_ROWS=tile.rows, BLOCK_COLUMNS=tile.columns, BLOCK_DEPTH=tile.depth,
        num_warps=tile.warps, num_stages=tile.stages, **pdl(a))
    return out
