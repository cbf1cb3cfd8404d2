"""Which steps of prompts the host launches more slowly than the device computes them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch

from ..models.decoder import DenseDecoder

_LAYERS = 8
"""That are tried."""
_BEHIND = 1.2
"""A device that needs so many times what launching takes is kept at work by the host."""


def launch_bound(model: DenseDecoder, sizes: Sequence[int], try_size: Callable[[int, Callable[[], None]], bool]) -> int:
    """How many of ``sizes``, which ascend, are steps of so many rows that wait for the host; larger ones do less.

    ``try_size(size, work)`` says it of one, of which ``work`` launches what a few layers compute between attentions.
    """
    most, device = sizes[-1], model.cos_sin.device
    entering = torch.randn(most, model.width, dtype=model.dtype, device=device)  # zeros would all go to few experts
    heads = torch.randn(most, model.layers[0].attention.width, dtype=model.dtype, device=device)

    def through(size: int) -> None:
        rows, residual = entering[:size], None
        for index in range(min(_LAYERS, len(model.layers))):
            _, residual = model.between(index, rows, residual)
            rows = heads[:size]

    fewest, count = 0, len(sizes)
    while fewest < count:
        middle = (fewest + count + 1) // 2
        size = sizes[middle - 1]
        if try_size(size, lambda: through(size)):  # noqa: B023
            fewest = middle
        else:
            count = middle - 1
    return fewest


def waits_for_host(work: Callable[[], None], device: torch.device) -> bool:
    """Whether the device has done ``work`` about when it is launched; the first time, which compiles, does not count.
    """
    found = []
    for _ in range(3):
        torch.cuda.synchronize(device)
        began = time.perf_counter()
        work()
        launched = time.perf_counter()
        torch.cuda.synchronize(device)
        found.append((time.perf_counter() - began) / (launched - began))
    return min(found[1:]) < _BEHIND
