"""Launch cost of prefill steps: the sizes at which the host launches kernels more slowly than the device runs them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import cache

import torch

from ...distributed.step_rows import StepRows
from ...models.decoder.causal_lm import CausalLM

_TRIAL_LAYERS = 8
_MAX_LAUNCH_BOUND_RATIO = 1.2
"""Time of a step over the time of launching it, up to which the device waits for the host all the time."""
_MAX_USEFUL_RATIO = 2.0
"""The same ratio above which the host is so far ahead that faster launching gains nothing."""

Trial = Callable[[int, Callable[[StepRows], None]], float]
"""``(size, work)``: returns the time of ``work`` on the device over the time of launching it, equal on all ranks.
``work`` takes the rows of a step of ``size`` rows in every attention group."""


def launch_bound_sizes(model: CausalLM, sizes: Sequence[int], trial: Trial) -> tuple[list[int], int]:
    """Returns those of ``sizes``, which ascend, at which faster launching makes steps faster; and the largest at which
    the device waits for the host all the time (0: none), so that more rows cost nothing.

    A trial's ``work`` launches what a few layers compute between attentions.
    """
    largest, device = sizes[-1], model.device
    inputs = torch.randn(largest, model.hidden_size, dtype=model.dtype, device=device)  # zeros would go to few experts
    heads = torch.randn(largest, model.layers[0].attention.width, dtype=model.dtype, device=device)

    def compute(size: int, rows: StepRows) -> None:
        x, residual = inputs[:size], None
        for index in range(min(_TRIAL_LAYERS, len(model.layers))):
            _, residual = model.between_attentions(index, x, residual, rows)
            x = heads[:size]

    @cache
    def ratio(size: int) -> float:
        return trial(size, lambda rows: compute(size, rows))

    useful = sizes[:_count(sizes, lambda size: ratio(size) < _MAX_USEFUL_RATIO)]
    launch_bound = _count(useful, lambda size: ratio(size) < _MAX_LAUNCH_BOUND_RATIO)
    return list(useful), useful[launch_bound - 1] if launch_bound else 0


def _count(sizes: Sequence[int], fits: Callable[[int], bool]) -> int:
    """Returns how many sizes fit, by bisection: those that do not are the largest."""
    low, high = 0, len(sizes)
    while low < high:
        middle = (low + high + 1) // 2
        if fits(sizes[middle - 1]):
            low = middle
        else:
            high = middle - 1
    return low


def launch_ratio(work: Callable[[], None], device: torch.device) -> float:
    """Measures a Trial's ratio. The first run, which compiles, does not count."""
    ratios = []
    for _ in range(3):
        torch.cuda.synchronize(device)
        began = time.perf_counter()
        work()
        launched = time.perf_counter()
        torch.cuda.synchronize(device)
        ratios.append((time.perf_counter() - began) / (launched - began))
    return min(ratios[1:])
