"""Products on a CPU whose rows do not depend on each other: calls of fixed numbers of rows.

A library chooses its code by the shape of a product, and code of another shape adds in another order. So rows are
computed in calls of a few sizes, padded with zeros. Whether this machine's library gives a row the same bits in calls
of all these sizes, at every place in them and at any address, is tried once for each shape of weight; where it does
not, fewer sizes are used, at last one row a call.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence

import torch
from torch.nn.functional import linear, pad

_LEAST_OUT = 16
"""Outputs of a product: with fewer, a library may add up a row in an order that depends on the row's place."""
_TRIED_OUT = 4096
_TRIALS = 3

Product = Callable[[torch.Tensor], torch.Tensor]
"""Multiplies ``[..., rows, in]`` with something fixed."""


def batch_invariant_matmul(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Twin of ``gemm.batch_invariant_matmul.batch_invariant_matmul``: ``x`` [T, in] ``@ weight`` [out, in] ``.T +
    bias`` in the type of ``x``, computed in float32: what 16 bits round away would make the trial blind."""
    wide = weight.float()
    if len(wide) < _LEAST_OUT:
        wide = pad(wide, (0, 0, 0, _LEAST_OUT - len(wide)))
    (rows, width), out = x.shape, len(wide)
    y = wide.new_empty((rows, out))
    sizes = _linear_sizes(min(out, _TRIED_OUT + out % _TRIED_OUT), width, wide.is_contiguous())
    for start, stop, size in calls(rows, sizes):
        # A new tensor, whatever its size: it begins at an aligned address.
        y[start:stop] = linear(pad(x[start:stop].float(), (0, 0, 0, size - stop + start)), wide)[:stop - start]
    y = y[:, :len(weight)]
    return (y if bias is None else y + bias.float()).to(x.dtype)


def calls(rows: int, sizes: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Yields ``(start, stop, size)`` of calls that together compute ``rows``; ``sizes`` are ascending."""
    start = 0
    while start < rows:
        left = rows - start
        size = sizes[-1] if 2 * left > sizes[-1] else sizes[0]
        yield start, min(start + size, rows), size
        start += size


@functools.cache
def _linear_sizes(out: int, width: int, contiguous: bool) -> Sequence[int]:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn((out, width) if contiguous else (width, out), generator=generator)
    weight = weight if contiguous else weight.T
    return invariant_sizes(((8, 64), (16,)), width, lambda x: linear(x, weight))


def invariant_sizes(candidates: Sequence[Sequence[int]], width: int, product: Product) -> Sequence[int]:
    """Returns the first of the ``candidates`` whose sizes of calls give a float32 row of ``width`` the same bits;
    ``(1,)`` where there is none."""
    for sizes in candidates:
        if _is_invariant(sizes, width, product):
            return sizes
    return (1,)


def _is_invariant(sizes: Sequence[int], width: int, product: Product) -> bool:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn((sizes[-1], width), generator=generator)
    expected = product(x)
    for _ in range(_TRIALS):
        for size in sizes:
            chosen = torch.randperm(len(x), generator=generator)[:size]
            elsewhere = torch.empty(size * width + 1)[1:].view(size, width).copy_(x[chosen])
            for rows in (x[chosen], elsewhere):
                if not torch.equal(product(rows), expected[..., chosen, :]):
                    return False
    return True
