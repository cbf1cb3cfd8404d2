"""Ranks of a model as threads of one process: collectives over tensors in memory, for tests of what ranks compute."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import numpy as np
import torch

from baton.common.distributed.parallel import Parallel
from baton.common.distributed.tp import AsyncCollective, TPGroup

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

    def start_all_gather(self, tensor: torch.Tensor) -> AsyncCollective:
        return AsyncCollective(self.all_gather_rows(tensor), None)

    def start_reduce_scatter(self, tensor: torch.Tensor) -> AsyncCollective:
        return AsyncCollective(self.reduce_scatter_rows(tensor), None)

    def all_to_all_rows(self, rows: torch.Tensor, sent: list[int], received: list[int]) -> torch.Tensor:
        return torch.cat([parts[self.rank] for parts in self._all(rows.clone().split(sent))])

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
    return _run(size, 1, lambda group, _: work(group))


def on_attention_groups(size: int, work: Callable[[Parallel], T]) -> list[T]:
    """Runs ``work(parallel)`` on ``size`` ranks, each of which is a data-parallel attention group; see ``on_ranks``."""
    return _run(size, 2, lambda tp, dp: work(Parallel(tp, TPGroup(), dp)))


def _run(size: int, groups: int, work: Callable[..., T]) -> list[T]:
    """Calls ``work`` on each rank with its place in the first and in the last of so many groups of all ranks."""
    boards = [_Board(size) for _ in range(groups)]

    def run(rank: int) -> T:
        try:
            made = [ThreadGroup(rank, size, board) for board in boards]
            return work(made[0], made[-1])
        except BaseException:
            for board in boards:
                board.barrier.abort()  # or the others would wait
            raise

    with ThreadPoolExecutor(size) as pool:
        futures = [pool.submit(run, rank) for rank in range(size)]
    errors = [future.exception() for future in futures]
    raised = sorted(filter(None, errors), key=lambda error: isinstance(error, threading.BrokenBarrierError))
    if raised:
        raise raised[0]
    return [future.result() for future in futures]
