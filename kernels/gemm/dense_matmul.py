"""Product with a weight of the rows' own type: our kernels where they are faster, else cuBLAS."""

from __future__ import annotations

from types import ModuleType

import torch
from torch.nn.functional import linear

from ..rowwise.rmsnorm import rmsnorm
from ..rowwise.silu_and_mul import silu_and_mul
from ..rowwise.split_k_rmsnorm import joined_rmsnorm
from . import split_k_cublas
from .dense_tiles import MANY_ROWS, TALL, USUAL, DenseTile, gated_tile, takes_gated
from .small_m_matmul import skinny_matmul
from .small_m_tiles import most_rows
from .split_k_cublas import better_plan, left_pieces, product_in_pieces
from .split_k_tiles import LEAST_ROWS, MOST_ROWS, SplitKTile, left_tile, split_tile


def dense_matmul(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, *,
                 gated: bool = False) -> torch.Tensor:
    """``x`` [T, in] ``@ weight`` [out, in] ``.T + bias``: ``[T, out]``, in their type; ``silu_and_mul`` of that,
    ``[T, out / 2]``, where it is ``gated``."""
    if len(x) <= most_rows(weight) and x.stride(-1) == 1:
        return skinny_matmul(x, weight, bias, gated=gated)
    split = split_tile(x, weight) if bias is None and _in_graph(x) else None
    if split is not None:
        return _split().split_matmul(x, weight, split, gated=gated)
    many = gated_tile(x, weight) if gated and bias is None else None
    if many is not None:
        return _activated(x, weight, many)
    plan = better_plan(x, weight) if bias is None else None
    y = linear(x, weight, bias) if plan is None else plan(x, weight)
    return silu_and_mul(y) if gated else y


def _activated(x: torch.Tensor, weight: torch.Tensor, tile: DenseTile) -> torch.Tensor:
    from .dense_warp_specialized import dense_product  # not there without Triton
    return dense_product(x, weight, tile, gated=True)


def _split() -> ModuleType:
    from . import split_k_warp_specialized  # not there without Triton
    return split_k_warp_specialized


def _in_graph(x: torch.Tensor) -> bool:
    """Whether the launch is captured: one of split_warpgroups.py's takes the host 72 us, and cuBLAS's 13."""
    return x.is_cuda and torch.cuda.is_current_stream_capturing()


def adds_products(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether ``normed_product`` is the quicker way to what ``dense_matmul`` makes and the norm of a sum behind it."""
    if not x.is_cuda or weight.itemsize != 2:
        return False
    if len(x) >= MANY_ROWS or left_pieces(x, weight):
        return True
    return _in_graph(x) and left_tile(x, weight) is not None


def normed_product(residual: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, gain: torch.Tensor,
                   eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    """``rmsnorm`` with ``gain`` of ``total = residual + x @ weight.T`` [T, out], and ``total``. ``residual`` is
    contiguous, and used up."""
    tile = left_tile(x, weight)
    if tile is not None:
        return _joined(residual, x, weight, gain, eps, tile)
    pieces = left_pieces(x, weight)
    if pieces:
        return joined_rmsnorm(product_in_pieces(x, weight, pieces), gain, eps, residual)
    residual.addmm_(x, weight.T)  # rounded once
    return rmsnorm(residual, gain, eps)


def _joined(residual: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, gain: torch.Tensor, eps: float,
            tile: SplitKTile) -> tuple[torch.Tensor, torch.Tensor]:
    """Pieces are rounded as the summands of tensor-parallel ranks are: in float32 they would take longer to travel
    than the split gains."""
    return joined_rmsnorm(_split().split_pieces(x, weight, tile, x.dtype), gain, eps, residual)


def compile_tiles(weight: torch.Tensor, *, gated: bool = False) -> None:
    """Compile what products with it take, so that no request waits for it; its values do not matter."""
    for rows in (1, 2, 9, 17, 33):
        if rows <= most_rows(weight):
            skinny_matmul(weight.new_zeros((rows, weight.shape[1])), weight, gated=gated)
    for tall in (TALL, USUAL) if gated and takes_gated(weight) else ():
        _activated(weight.new_zeros((1, weight.shape[1])), weight, tall)
    for rows in (LEAST_ROWS, MOST_ROWS):
        x = weight.new_zeros((rows, weight.shape[1]))
        split, left = split_tile(x, weight), left_tile(x, weight)
        if split is not None:
            _split().split_matmul(x, weight, split, gated=gated)
        elif left is not None and not gated:
            _joined(weight.new_zeros((rows, len(weight))), x, weight, weight.new_zeros(len(weight)), 1.0, left)
    x = weight.new_zeros((split_k_cublas.MOST_ROWS, weight.shape[1]))
    if not gated and left_pieces(x, weight):
        normed_product(weight.new_zeros((len(x), len(weight))), x, weight, weight.new_zeros(len(weight)), 1.0)
