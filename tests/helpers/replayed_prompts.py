"""Pieces of prompts' steps as CUDA graphs compute them, without any; and steps of prompts to compare."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from baton.common.forward.forward_batch import build_forward_batch
from baton.common.runner.cuda_graphs.piecewise_graphs import GraphSizes
from baton.tests.helpers.small_models import row_of, scattered_pages

SIZES = [16, 48, 64]
PADDED = [16, 48, 48, 48, 16]
"""Of ``steps_of``."""


class Again:
    """Records by computing once more into the tensors of the first time. ``replayed`` has the rows of every replay."""

    def __init__(self) -> None:
        self.replayed: list[int] = []

    def record(self, work: Callable[[], Any]) -> tuple[Any, Callable[[], None]]:
        held = work()

        def replay() -> None:
            (projected, residual), (new, new_residual) = held, work()
            for old, made in zip((*projected, residual), (*new, new_residual)):
                old.copy_(made)
            self.replayed.append(len(residual))

        return held, replay

    def alias(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor


def record_again(runner: Any, sizes: list[int]) -> list[int]:
    """The runner's prompts run in pieces of ``sizes`` from now on; the rows of every piece that will be replayed."""
    recorder = Again()
    runner.prefill_graphs.record(GraphSizes(sizes, sizes[-1]), recorder, lambda what, share: None)
    recorder.replayed.clear()
    return recorder.replayed


def steps_of(runner: Any) -> list[torch.Tensor]:
    """Logits of chunks of three prompts, over prefixes and in the middle, and of a decode step behind them."""
    tokens = np.random.default_rng(1).integers(0, 90, (3, 70))
    pages = scattered_pages(runner, 3, 70)
    page_size, device = runner.layout.page_size, runner.device
    steps = [([(0, 0, 13)], None), ([(0, 13, 40), (1, 0, 9), (2, 0, 12)], None), ([(2, 12, 60)], None),
             ([(1, 9, 50)], []), ([(1, 50, 57)], list(range(7)))]
    found = []
    for parts, wanted in steps:
        rows = [row_of(runner, tokens[req, start:stop], start, pages[req]) for req, start, stop in parts]
        groups: list[int] = []
        batch = build_forward_batch(rows, page_size, device, wanted)
        found.append(runner.forward(batch, lambda group, event: groups.append(group)).clone())  # noqa: B023
        assert groups == list(range(len(runner.layout.groups)))
    rows = [row_of(runner, tokens[req, stop:stop + 1], stop, pages[req]) for req, stop in ((0, 40), (2, 60))]
    found.append(runner.forward(build_forward_batch(rows, page_size, device)).clone())
    assert [len(logits) for logits in found] == [1, 3, 1, 0, 7, 2]
    return found
