"""Computes the gated MLPs of a mixture of experts: align, two grouped products, and the sum of each token's experts."""

from __future__ import annotations

import torch

from .. import reference
from .._triton import runs_triton
from ..arguments import ExpertBiases, Float8Rows, Int8Format, Scales
from ..gated_activation import GateActivation
from ..rowwise.fp8_quantize import quantize_groups
from ..rowwise.int8_quantize import quantize_int8
from ..tuning.moe import Tiles
from ..tuning.policy import policy_of
from .moe_align import Alignment, moe_align
from .moe_gemm import SCALE_GROUP, moe_gemm
from .moe_sorted import fits, moe_down, moe_up, moe_up_in_float8, supports_warp_specialized
from .moe_sum import moe_sum

Biases = tuple[torch.Tensor | None, torch.Tensor | None]
Quantized = tuple[torch.Tensor, torch.Tensor | None]
"""A pair of rows and, where they are in float8 or int8, their scales."""


def moe_experts(x: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor, topk_ids: torch.Tensor,
                weights: torch.Tensor, scales: Scales | None = None, tiles: Tiles | None = None,
                biases: ExpertBiases | None = None, limit: float = 0.0,
                activate: GateActivation | None = None) -> torch.Tensor:
    """``sum over k of weights[t, k] * down[p] (silu(gate[p] x[t]) * up[p] x[t])`` with ``p = topk_ids[t, k]``.

    ``x`` [T, H]; ``gate_up`` [S, 2 * I, H], each expert's gate before its up; ``down`` [S, H, I]; ``topk_ids`` [T, K]
    int64, of which those outside of ``[0, S)`` add nothing; ``weights`` [T, K] float32. A token chooses an expert once.
    Float8 and int8 experts come with ``scales``; then ``x`` and the activation between the products are quantized too,
    with a scale a token, or a group of 128 of its values. ``tiles`` replace the policy's. ``biases`` are added to the
    products; with a ``limit`` the activation is ``gated_activation.clamped_gate`` instead of ``silu(g) * u``,
    and ``activate`` takes the place of both; it is then a launch of its own between the products.
    """
    if not runs_triton(x):
        return reference.moe_experts(x, gate_up, down, topk_ids, weights, scales, biases, limit, activate)
    out = torch.empty_like(x)
    if len(x):
        made, positions = moe_products(x, gate_up, down, topk_ids, scales, tiles, biases, limit, activate)
        moe_sum(made, topk_ids.contiguous(), len(gate_up), weights.contiguous(), positions, out)
    return out


def moe_products(x: torch.Tensor | Float8Rows, gate_up: torch.Tensor, down: torch.Tensor, topk_ids: torch.Tensor,
                 scales: Scales | None = None, tiles: Tiles | None = None, biases: ExpertBiases | None = None,
                 limit: float = 0.0,
                 activate: GateActivation | None = None) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The rows that ``moe_sum`` adds up for ``moe_experts``, and the position of each choice's row. ``x`` may be in
    float8 already, with a scale for each 128 of a row's values, for experts with block scales. It needs a GPU and one
    token or more."""
    rows, dtype = (x.values, x.dtype) if isinstance(x, Float8Rows) else (x, x.dtype)
    hidden, num_experts, choices, size = rows.shape[1], gate_up.shape[0], topk_ids.shape[1], down.shape[2]
    tiles = tiles or _tiles_of(rows, gate_up, down, choices, scales, fuses=activate is None)
    aligned = moe_align(topk_ids, num_experts, tiles.gate_up.block, tiles.gate_up.max_blocks)
    by_block = scales is not None and scales.by == "block"
    assert by_block or not isinstance(x, Float8Rows)
    in_order = gate_up.dtype == torch.int8 or not (tiles.sorted and fits(tiles.gate_up, hidden, size, by_block)
                    and fits(tiles.down, size, hidden, by_block))
    given = _quantized(x, gate_up, scales)
    if activate is not None:
        return _products_by(activate, given, dtype, gate_up, down, aligned, choices, tiles, scales,
                            biases or (None, None)), None
    products = _products_in_order if in_order else _sorted_products
    made = products(given, dtype, gate_up, down, aligned, choices, tiles, scales, biases or (None, None), limit)
    return made, None if in_order else aligned.positions


def _products_by(activate: GateActivation, x: Quantized, dtype: torch.dtype, gate_up: torch.Tensor, down: torch.Tensor,
                 aligned: Alignment, choices: int, tiles: Tiles, scales: Scales | None,
                 biases: Biases) -> torch.Tensor:
    """Computes a row for each choice, in the order of choices, with gates and ups written out between."""
    up_scale, down_scale = (None, None) if scales is None else (scales.gate_up, scales.down)
    given, given_scale = x
    total = len(given) * choices
    between = activate(moe_gemm(given, gate_up, aligned, choices, total, tiles.gate_up, dtype, a_scale=given_scale,
                                b_scale=up_scale, bias=biases[0]))
    given, given_scale = _quantized(between, down, scales)
    return moe_gemm(given, down, aligned, 1, total, tiles.down, dtype, a_scale=given_scale, b_scale=down_scale,
                    bias=biases[1])


def _products_in_order(x: Quantized, dtype: torch.dtype, gate_up: torch.Tensor, down: torch.Tensor,
                       aligned: Alignment, choices: int, tiles: Tiles, scales: Scales | None, biases: Biases,
                       limit: float) -> torch.Tensor:
    """Computes a row for each choice, in the order of choices."""
    up_scale, down_scale = (None, None) if scales is None else (scales.gate_up, scales.down)
    given, given_scale = x
    total = len(given) * choices
    between = moe_gemm(given, gate_up, aligned, choices, total, tiles.gate_up, dtype, gated=True,
                       a_scale=given_scale, b_scale=up_scale, bias=biases[0], limit=limit)
    given, given_scale = _quantized(between, down, scales)
    return moe_gemm(given, down, aligned, 1, total, tiles.down, dtype, a_scale=given_scale, b_scale=down_scale,
                    bias=biases[1])


def _sorted_products(x: Quantized, dtype: torch.dtype, gate_up: torch.Tensor, down: torch.Tensor, aligned: Alignment,
                     choices: int, tiles: Tiles, scales: Scales | None, biases: Biases, limit: float) -> torch.Tensor:
    """Computes a row for each of ``aligned``'s, in the order of experts."""
    up_scale, down_scale = (None, None) if scales is None else (scales.gate_up, scales.down)
    given, given_scale = x
    total = len(given) * choices
    if given_scale is not None and tiles.gate_up.is_warp_specialized:
        given, given_scale = moe_up_in_float8(given, gate_up, aligned, choices, total, tiles.gate_up, dtype,
                                              given_scale, up_scale, biases[0], limit)
    else:
        between = moe_up(given, gate_up, aligned, choices, total, tiles.gate_up, dtype, given_scale, up_scale,
                         biases[0], limit)
        given, given_scale = _quantized(between, down, scales)
    return moe_down(given, down, aligned, total, tiles.down, dtype, given_scale, down_scale, biases[1])


def _tiles_of(x: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor, choices: int,
              scales: Scales | None, *, fuses: bool) -> Tiles:
    """The policy's tiles of this layer. Warp-specialized products in float8 need block scales, and tokens whose rows
    begin at multiples of 16 bytes, and an activation that is fused."""
    hidden, size, dtype = x.shape[1], down.shape[2], gate_up.dtype
    warp_specialized = fuses and (scales is None or scales.by == "block") and (
        x.stride(0) % 16 == x.data_ptr() % 16 == 0 and supports_warp_specialized(x.device, hidden, size, dtype))
    return policy_of(x.device).moe.tiles(len(x), len(gate_up), hidden, size, choices, dtype, warp_specialized)


def _quantized(rows: torch.Tensor | Float8Rows, stack: torch.Tensor, scales: Scales | None) -> Quantized:
    """Quantizes rows as the experts' weights are."""
    if isinstance(rows, Float8Rows):
        return rows.values, rows.scale
    if scales is None:
        return rows, None
    if stack.dtype == torch.int8:
        q = quantize_int8(rows, Int8Format())
        return q.values, q.scale
    return quantize_groups(rows, SCALE_GROUP if scales.by == "block" else rows.shape[1])
