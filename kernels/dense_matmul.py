"""Product with a weight of the rows' own type: our kernel for few rows, cuBLAS for many."""

from __future__ import annotations

import torch
from torch.nn.functional import linear

from .dense_tiles import MANY_ROWS, TALL, USUAL, DenseTile, gated_tile, takes_gated
from .silu_and_mul import silu_and_mul
from .skinny_matmul import skinny_matmul
from .skinny_tiles import most_rows


def dense_matmul(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, *,
                 gated: bool = False) -> torch.Tensor:
    """``x`` [T, in] ``@ weight`` [out, in] ``.T + bias``: ``[T, out]``, in their type; ``silu_and_mul`` of that,
    ``[T, out / 2]``, where it is ``gated``."""
    if len(x) <= most_rows(weight) and x.stride(-1) == 1:
        return skinny_matmul(x, weight, bias, gated=gated)
    many = gated_tile(x, weight) if gated and bias is None else None
    if many is not None:
        return _activated(x, weight, many)
    y = linear(x, weight, bias)
    return silu_and_mul(y) if gated else y


def _activated(x: torch.Tensor, weight: torch.Tensor, tile: DenseTile) -> torch.Tensor:
    from .dense_warpgroups import dense_product  # not there without Triton
    return dense_product(x, weight, tile, gated=True)


def adds_products(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether ``add_product`` is the quicker way to what ``dense_matmul`` makes and a sum behind it."""
    return x.is_cuda and len(x) >= MANY_ROWS and weight.itemsize == 2


def add_product(total: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> None:
    """``total`` [T, out], contiguous, ``+= x @ weight.T``, rounded once."""
    total.addmm_(x, weight.T)


def compile_tiles(weight: torch.Tensor, *, gated: bool = False) -> None:
    """Compile what products with it take, so that no request waits for it; its values do not matter."""
    for rows in (1, 2, 9, 17, 33):
        if rows <= most_rows(weight):
            skinny_matmul(weight.new_zeros((rows, weight.shape[1])), weight, gated=gated)
    for tall in (TALL, USUAL) if gated and takes_gated(weight) else ():
        _activated(weight.new_zeros((1, weight.shape[1])), weight, tall)
