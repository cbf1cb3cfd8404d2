"""The gated MLPs of a mixture of experts: align, two grouped products, and the sum of each token's experts."""

from __future__ import annotations

import torch

from . import reference
from ._triton import pdl, runs_triton, start_next, tl, triton, wait_for_last
from .forms import ExpertBiases, Scales
from .fp8_quantize import quantize_groups
from .moe_align import moe_align
from .moe_gemm import SCALE_GROUP, moe_gemm
from .moe_sorted import fits, moe_down, moe_up, sum_sorted
from .moe_tiles import Tiles, device_name, tiles_for


@triton.jit
def _moe_sum_kernel(made_ptr, places_ptr, out_ptr, num_places, columns, CHOICES: tl.constexpr, BLOCK: tl.constexpr,
                    PDL: tl.constexpr):
    start_next(PDL)
    wait_for_last(PDL)
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < columns
    total = tl.zeros((BLOCK,), tl.float32)
    for choice in tl.static_range(CHOICES):
        place = tl.load(places_ptr + token * CHOICES + choice)
        here = (place >= 0) & (place < num_places)  # others were not made, and hold anything
        total += tl.load(made_ptr + (token * CHOICES + choice) * columns + column, inside & here, other=0.0).to(
            tl.float32)
    tl.store(out_ptr + token * columns + column, total.to(out_ptr.dtype.element_ty), inside)


def moe_experts(x: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor, places: torch.Tensor,
                weights: torch.Tensor, scales: Scales | None = None, tiles: Tiles | None = None,
                biases: ExpertBiases | None = None, limit: float = 0.0) -> torch.Tensor:
    """``sum over k of weights[t, k] * down[p] (silu(gate[p] x[t]) * up[p] x[t])`` with ``p = places[t, k]``.

    ``x`` [T, H]; ``gate_up`` [S, 2 * I, H], each expert's gate before its up; ``down`` [S, H, I]; ``places`` [T, K]
    int64, of which those outside of ``[0, S)`` add nothing; ``weights`` [T, K] float32. A token names a place once.
    Float8 experts come with ``scales``; then ``x`` and what is between the products are made float8 too, with a scale
    a token, or a group of 128 of its values. ``tiles`` override what ``moe_tiles`` chooses. ``biases`` are added to
    the products; with a ``limit`` ``silu(g) * u`` is ``kernels.gate``'s clamped gate instead.
    """
    if not runs_triton(x):
        return reference.moe_experts(x, gate_up, down, places, weights, scales, biases, limit)
    tokens, hidden = x.shape
    num_places, choices, size = gate_up.shape[0], places.shape[1], down.shape[2]
    out = torch.empty_like(x)
    if not tokens:
        return out
    tiles = tiles or tiles_for(tokens, num_places, hidden, size, choices, gate_up.dtype, device_name(x.device))
    aligned = moe_align(places, num_places, tiles.gate_up.rows)
    total = tokens * choices
    given, given_scale = _quantized(x, scales)
    up_scale, down_scale = (None, None) if scales is None else (scales.gate_up, scales.down)
    up_bias, down_bias = (None, None) if biases is None else biases
    by_block = scales is not None and scales.by == "block"
    if tiles.sorted and fits(tiles.gate_up, hidden, size, by_block) and fits(tiles.down, size, hidden, by_block):
        between = moe_up(given, gate_up, aligned, choices, total, tiles.gate_up, x.dtype, given_scale, up_scale,
                         up_bias, limit)
        given, given_scale = _quantized(between, scales)
        made = moe_down(given, down, aligned, total, tiles.down, x.dtype, given_scale, down_scale, down_bias)
        sum_sorted(made, places.contiguous(), num_places, weights.contiguous(), aligned, out)
        return out
    between = moe_gemm(given, gate_up, aligned, choices, total, tiles.gate_up, x.dtype, gated=True, a_scale=given_scale,
                       b_scale=up_scale, bias=up_bias, limit=limit)
    given, given_scale = _quantized(between, scales)
    made = moe_gemm(given, down, aligned, 1, total, tiles.down, x.dtype, weights=weights.contiguous(),
                    a_scale=given_scale, b_scale=down_scale, bias=down_bias)
    block = min(1024, triton.next_power_of_2(hidden))
    _moe_sum_kernel[(tokens, triton.cdiv(hidden, block))](made, places.contiguous(), out, num_places, hidden,
                                                          CHOICES=choices, BLOCK=block, **pdl(x))
    return out


def _quantized(rows: torch.Tensor, scales: Scales | None) -> tuple[torch.Tensor, torch.Tensor | None]:
    if scales is None:
        return rows, None
    return quantize_groups(rows, SCALE_GROUP if scales.by == "block" else rows.shape[1])
