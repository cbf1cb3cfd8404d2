"""Which steps of prompts the host launches more slowly than the device computes them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import cache

import torch

from ...models.causal_lm import CausalLM

_LAYERS = 8
"""That are tried."""
_WAITS = 1.2
"""Times what launching takes, in which a device has done a step that it waits for."""
_AHEAD = 2.0
"""In so many times the host is so far ahead that nothing is won by launching faster."""

Trial = Callable[[int, Callable[[], None]], float]
"""``(size, work)``: how many times what launching ``work`` takes the device has done it in, equal on all ranks."""


def launch_bound(model: CausalLM, sizes: Sequence[int], trial: Trial) -> tuple[list[int], int]:
    """Of ``sizes``, which ascend, those of which launching faster makes steps of so many rows faster; and the largest
    at which the device waits for the host all the time (0: none), so that more rows cost nothing.

    A trial's ``work`` launches what a few layers compute between attentions.
    """
    most, device = sizes[-1], model.cos_sin.device
    entering = torch.randn(most, model.width, dtype=model.dtype, device=device)  # zeros would all go to few experts
    heads = torch.randn(most, model.layers[0].attention.width, dtype=model.dtype, device=device)

    def through(size: int) -> None:
        rows, residual = entering[:size], None
        for index in range(min(_LAYERS, len(model.layers))):
            _, residual = model.between(index, rows, residual)
            rows = heads[:size]

    @cache
    def times(size: int) -> float:
        return trial(size, lambda: through(size))

    won = sizes[:_count(sizes, lambda size: times(size) < _AHEAD)]
    free = _count(won, lambda size: times(size) < _WAITS)
    return list(won), won[free - 1] if free else 0


def _count(sizes: Sequence[int], fits: Callable[[int], bool]) -> int:
    """How many fit, the largest of which are those that do not."""
    fewest, most = 0, len(sizes)
    while fewest < most:
        middle = (fewest + most + 1) // 2
        if fits(sizes[middle - 1]):
            fewest = middle
        else:
            most = middle - 1
    return fewest


def times_of_launching(work: Callable[[], None], device: torch.device) -> float:
    """See Trial. The first time, which compiles, does not count."""
    found = []
    for _ in range(3):
        torch.cuda.synchronize(device)
        began = time.perf_counter()
        work()
        launched = time.perf_counter()
        torch.cuda.synchronize(device)
        found.append((time.perf_counter() - began) / (launched - began))
    return min(found[1:])
