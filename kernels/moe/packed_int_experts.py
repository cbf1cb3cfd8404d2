"""Computes the gated MLPs of a mixture of experts whose weights are packed integers."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .._triton import pdl, start_next, tl, triton, wait_for_last
from ..arguments import ExpertBiases, PackedInts
from ..gated_activation import GateActivation, clamped_gate
from ..gemm.packed_int_matmul import options, packed_sums, table_of
from ..rowwise.silu_and_mul import silu_and_mul
from ..tuning.policy import policy_of
from ..tuning.split_tile import SplitTile
from .moe_align import Alignment, moe_align


@triton.jit(do_not_specialize=["total", "num_blocks", "choices", "group", "groups"])
def _moe_packed_int_kernel(x_ptr, q_ptr, scale_ptr, table_ptr, order_ptr, bias_ptr, out_ptr, rows_ptr,
                           expert_of_block_ptr, total, num_blocks, columns, width, x_stride, out_stride, bias_stride,
                           choices, group, groups, BITS: tl.constexpr, QUARTER: tl.constexpr,
                           TABLE: tl.constexpr,
                           SCALES_SUMS: tl.constexpr,
                           INDEXED: tl.constexpr, WHOLE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
                           DEPTH: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr):
    start_next(PDL)
    wait_for_last(PDL)
    program = tl.program_id(0)
    block = program % num_blocks  # all blocks of rows before the next columns
    expert = tl.load(expert_of_block_ptr + block).to(tl.int64)
    if expert < 0:
        return
    choice = tl.load(rows_ptr + block * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    present = choice < total
    column = program // num_blocks * COLUMNS + tl.arange(0, COLUMNS)
    column_in = column < columns
    safe = tl.where(column_in, column, 0)
    of_group = expert * groups * columns
    order_at = order_ptr if order_ptr is None else order_ptr + expert * 2 * width
    sums = packed_sums(x_ptr + tl.where(present, choice, 0) // choices * x_stride, present,
                       q_ptr + expert * columns * (width * BITS // 8), scale_ptr + of_group, table_ptr, order_at, safe,
                       columns, width, group, 0, tl.cdiv(width, DEPTH), BITS, QUARTER, TABLE, SCALES_SUMS, INDEXED,
                       WHOLE, ROWS, COLUMNS, DEPTH, STAGES, x_ptr.dtype.element_ty)
    acc = tl.trans(sums)
    if bias_ptr is not None:
        acc += tl.load(bias_ptr + expert * bias_stride + safe).to(tl.float32)[None, :]
    out_at = out_ptr + choice[:, None] * out_stride + column[None, :]
    tl.store(out_at, acc.to(out_ptr.dtype.element_ty), present[:, None] & column_in[None, :])


def moe_packed_ints(x: torch.Tensor, parts: Sequence[PackedInts], aligned: Alignment, choices: int, total: int,
                    tile: SplitTile, bias: torch.Tensor | None = None) -> torch.Tensor:
    """``[total, N]`` in the type of ``x`` [., in]: row c is ``x[c // choices]`` times its expert's matrix, transposed;
    rows that ``aligned`` leaves out are not written. The stacks ``parts`` have the outputs ``N`` one after the other;
    ``bias`` [S, N] is added."""
    assert x.stride(-1) == 1 and aligned.block == tile.rows
    sizes = [part.values.shape[1] for part in parts]
    out = torch.empty((total, sum(sizes)), dtype=x.dtype, device=x.device)
    num_blocks = aligned.expert_of_block.shape[0]
    biases = [None] * len(parts) if bias is None else bias.split(sizes, 1)
    for part, made, own in zip(parts, out.split(sizes, 1), biases) if num_blocks else ():
        columns = part.values.shape[1]
        _moe_packed_int_kernel[(num_blocks * triton.cdiv(columns, tile.columns),)](
            x, part.values, part.scales, table_of(part), part.order, own, made, aligned.sorted_choices,
            aligned.expert_of_block, total, num_blocks, columns, part.width, x.stride(0), made.stride(0),
            0 if own is None else own.stride(0), choices, part.group, part.scales.shape[1], **options(part, tile),
            ROWS=tile.rows, COLUMNS=tile.columns, **pdl(x))
    return out


def packed_int_expert_products(x: torch.Tensor, gate_up: Sequence[PackedInts], down: Sequence[PackedInts],
                               topk_ids: torch.Tensor, biases: ExpertBiases | None = None, limit: float = 0.0,
                               activate: GateActivation = silu_and_mul) -> torch.Tensor:
    """The rows that ``moe_sum`` adds up for the experts of ``x`` [T, H], in the order of choices: ``[T * K, H]``.

    ``gate_up`` are stacks with the outputs [S, 2 * I], gates before ups, and ``down`` with [S, H]; ``topk_ids`` [T, K]
    int64, of which those outside of ``[0, S)`` have no row. It needs Triton and one token or more."""
    num_experts, choices = len(gate_up[0].values), topk_ids.shape[1]
    policy, itemsize = policy_of(x.device).packed_ints, x.element_size()
    tiles = [policy.expert_tile(len(x), choices, num_experts, parts[0].width, parts[0].group, itemsize,
                                parts[0].bits)
             for parts in (gate_up, down)]
    aligned = moe_align(topk_ids, num_experts, tiles[0].rows)
    total = topk_ids.numel()
    x = x if x.stride(-1) == 1 else x.contiguous()
    hidden = moe_packed_ints(x, gate_up, aligned, choices, total, tiles[0], None if biases is None else biases.gate_up)
    hidden = clamped_gate(hidden, limit) if limit else activate(hidden)
    return moe_packed_ints(hidden, down, aligned, 1, total, tiles[1], None if biases is None else biases.down)
