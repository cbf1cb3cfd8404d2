"""Ranks of a model as threads of one process: collectives over tensors in memory, for tests of what ranks compute."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import numpy as np
import torch

from baton.common.distributed.tp import TPGroup

T = TypeVar("T")


class _Board:
    """What the ranks of a group have brought to a collective."""

    def __init__(self, size: int):
        self.values: list = [None] * size
        self.barrier = threading.Barrier(size, timeout=60)


class ThreadGroup(TPGroup):
    """A process group whose ranks are threads."""

    def __init__(self, rank: int, size: int, board: _Board):
        super().__init__(rank, size)
        self._board = board

    def _all(self, value: T) -> list[T]:
        self._board.values[self.rank] = value
        self._board.barrier.wait()
        values = list(self._board.values)
        self._board.barrier.wait()
        return values

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.copy_(torch.stack(self._all(tensor.clone())).sum(0))

    def all_gather_rows(self, tensor: torch.Tensor) -> torch.Tensor:
        return torch.cat(self._all(tensor.clone()))

    def reduce_scatter_rows(self, tensor: torch.Tensor) -> torch.Tensor:
        return torch.stack(self._all(tensor.clone())).sum(0).chunk(self.size)[self.rank]

    def min_reduce(self, values: np.ndarray) -> np.ndarray:
        return np.min(self._all(values.astype(np.int64)), axis=0)

    def broadcast_bytes(self, data: bytes | None) -> bytes:
        return self._all(data)[0]

    def _gather_host(self, mine: torch.Tensor) -> torch.Tensor:
        return torch.cat(self._all(mine))

    def barrier(self) -> None:
        self._board.barrier.wait()


def on_ranks(size: int, work: Callable[[TPGroup], T]) -> list[T]:
    """Runs ``work(group)`` on ``size`` ranks, and returns their results; raises what one of them raises."""
    board = _Board(size)

    def run(rank: int) -> T:
        try:
            return work(ThreadGroup(rank, size, board))
        except BaseException:
            board.barrier.abort()  # or the others would wait
            raise

    with ThreadPoolExecutor(size) as pool:
        futures = [pool.submit(run, rank) for rank in range(size)]
    errors = [future.exception() for future in futures]
    raised = sorted(filter(None, errors), key=lambda error: isinstance(error, threading.BrokenBarrierError))
    if raised:
        raise raised[0]
    return [future.result() for future in futures]
