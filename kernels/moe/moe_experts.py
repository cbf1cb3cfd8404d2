"""The gated MLPs of a mixture of experts: align, two grouped products, and the sum of each token's experts."""

from __future__ import annotations

import torch

from .. import reference
from .._triton import runs_triton
from ..arguments import ExpertBiases, Float8Rows, Scales
from ..rowwise.fp8_quantize import quantize_groups
from .moe_align import Alignment, moe_align
from .moe_gemm import SCALE_GROUP, moe_gemm
from .moe_sorted import fits, moe_down, moe_up, moe_up_in_float8, takes_warpgroups
from .moe_sum import moe_sum
from .moe_tiles import Tiles, device_name, tiles_for

Biases = tuple[torch.Tensor | None, torch.Tensor | None]
Quantized = tuple[torch.Tensor, torch.Tensor | None]
"""Rows, and their scales where they are in float8."""


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
    out = torch.empty_like(x)
    if len(x):
        made, positions = moe_products(x, gate_up, down, places, scales, tiles, biases, limit)
        moe_sum(made, places.contiguous(), len(gate_up), weights.contiguous(), positions, out)
    return out


def moe_products(x: torch.Tensor | Float8Rows, gate_up: torch.Tensor, down: torch.Tensor, places: torch.Tensor,
                 scales: Scales | None = None, tiles: Tiles | None = None, biases: ExpertBiases | None = None,
                 limit: float = 0.0) -> tuple[torch.Tensor, torch.Tensor | None]:
    """What ``moe_sum`` adds up for ``moe_experts``: rows, and where each choice's is. ``x`` may be in float8 already,
    with a scale for each 128 of a row's values, for experts by blocks. On a GPU, of one token or more."""
    rows, dtype = (x.values, x.dtype) if isinstance(x, Float8Rows) else (x, x.dtype)
    hidden, num_places, choices, size = rows.shape[1], gate_up.shape[0], places.shape[1], down.shape[2]
    tiles = tiles or _tiles_of(rows, gate_up, down, choices, scales)
    aligned = moe_align(places, num_places, tiles.gate_up.block, tiles.gate_up.tall)
    by_block = scales is not None and scales.by == "block"
    assert by_block or not isinstance(x, Float8Rows)
    in_order = not (tiles.sorted and fits(tiles.gate_up, hidden, size, by_block)
                    and fits(tiles.down, size, hidden, by_block))
    products = _products_in_order if in_order else _sorted_products
    made = products(_quantized(x, scales), dtype, gate_up, down, aligned, choices, tiles, scales,
                    biases or (None, None), limit)
    return made, None if in_order else aligned.positions


def _products_in_order(x: Quantized, dtype: torch.dtype, gate_up: torch.Tensor, down: torch.Tensor,
                       aligned: Alignment, choices: int, tiles: Tiles, scales: Scales | None, biases: Biases,
                       limit: float) -> torch.Tensor:
    """A row for each choice, in their order."""
    up_scale, down_scale = (None, None) if scales is None else (scales.gate_up, scales.down)
    given, given_scale = x
    total = len(given) * choices
    between = moe_gemm(given, gate_up, aligned, choices, total, tiles.gate_up, dtype, gated=True,
                       a_scale=given_scale, b_scale=up_scale, bias=biases[0], limit=limit)
    given, given_scale = _quantized(between, scales)
    return moe_gemm(given, down, aligned, 1, total, tiles.down, dtype, a_scale=given_scale, b_scale=down_scale,
                    bias=biases[1])


def _sorted_products(x: Quantized, dtype: torch.dtype, gate_up: torch.Tensor, down: torch.Tensor, aligned: Alignment,
                     choices: int, tiles: Tiles, scales: Scales | None, biases: Biases, limit: float) -> torch.Tensor:
    """A row for each of ``aligned``'s."""
    up_scale, down_scale = (None, None) if scales is None else (scales.gate_up, scales.down)
    given, given_scale = x
    total = len(given) * choices
    if given_scale is not None and tiles.gate_up.by_warpgroups:
        given, given_scale = moe_up_in_float8(given, gate_up, aligned, choices, total, tiles.gate_up, dtype,
                                              given_scale, up_scale, biases[0], limit)
    else:
        between = moe_up(given, gate_up, aligned, choices, total, tiles.gate_up, dtype, given_scale, up_scale,
                         biases[0], limit)
        given, given_scale = _quantized(between, scales)
    return moe_down(given, down, aligned, total, tiles.down, dtype, given_scale, down_scale, biases[1])


def _tiles_of(x: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor, choices: int,
              scales: Scales | None) -> Tiles:
    """What ``moe_tiles`` has for this layer. Warp groups know of float8 only scales by blocks, and of tokens whose
    rows begin at whole 16 bytes."""
    hidden, size, dtype = x.shape[1], down.shape[2], gate_up.dtype
    warpgroups = (scales is None or scales.by == "block") and takes_warpgroups(x.device, hidden, size, dtype) and (
        x.stride(0) % 16 == 0 and x.data_ptr() % 16 == 0)
    return tiles_for(len(x), len(gate_up), hidden, size, choices, dtype, device_name(x.device), warpgroups)


def _quantized(rows: torch.Tensor | Float8Rows, scales: Scales | None) -> Quantized:
    if isinstance(rows, Float8Rows):
        return rows.values, rows.scale
    if scales is None:
        return rows, None
    return quantize_groups(rows, SCALE_GROUP if scales.by == "block" else rows.shape[1])
