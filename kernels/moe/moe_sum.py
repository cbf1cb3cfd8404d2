"""Sums each token's experts with their weights, always in the order of its choices."""

from __future__ import annotations

import torch

from .._triton import pdl, start_next, tl, triton, wait_for_last


@triton.jit
def _moe_sum_kernel(made_ptr, topk_ids_ptr, weights_ptr, positions_ptr, out_ptr, num_experts, columns,
                    CHOICES: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    start_next(PDL)
    wait_for_last(PDL)
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < columns
    total = tl.zeros((BLOCK,), tl.float32)
    for choice in tl.static_range(CHOICES):
        at = token * CHOICES + choice
        expert = tl.load(topk_ids_ptr + at)
        weight = tl.load(weights_ptr + at)
        position = at
        if positions_ptr is not None:  # loaded together with the expert, on which it does not depend
            position = tl.load(positions_ptr + at).to(tl.int64)
        here = (expert >= 0) & (expert < num_experts)  # others' rows were not computed, and positions are arbitrary
        made = tl.load(made_ptr + position * columns + column, inside & here, other=0.0)
        total += made.to(tl.float32) * weight
    tl.store(out_ptr + token * columns + column, total.to(out_ptr.dtype.element_ty), inside)


def moe_sum(made: torch.Tensor, topk_ids: torch.Tensor, num_experts: int, weights: torch.Tensor,
            positions: torch.Tensor | None, out: torch.Tensor) -> None:
    """``out[t] = sum over k of weights[t, k] * made[row of choice (t, k)]`` for ``topk_ids`` in ``[0, num_experts)``.

    ``topk_ids`` [T, K] int64, ``weights`` [T, K] float32 and ``out`` [T, N] are contiguous. The row of choice c is
    ``positions[c]``, int32 [T * K], without them c.
    """
    tokens, columns = out.shape
    block = min(512, triton.next_power_of_2(columns))
    _moe_sum_kernel[(tokens, triton.cdiv(columns, block))](
        made, topk_ids, weights, positions, out, num_experts, columns, CHOICES=topk_ids.shape[1], BLOCK=block,
        num_warps=1, **pdl(made))
