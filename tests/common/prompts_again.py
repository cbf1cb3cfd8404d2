"""Pieces of prompts' steps as CUDA graphs compute them, without any."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


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
    runner.record_prompts(sizes, recorder, lambda what, share: None)
    recorder.replayed.clear()
    return recorder.replayed
