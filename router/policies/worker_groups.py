"""Indexes of the registry's tuples of workers, built once for each tuple."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ..workers.registry import Worker

_MAX_CACHED = 8
"""Tuples: both roles, or kinds of decode workers that requests alternate between."""


class WorkerGroup(NamedTuple):
    """Workers to choose among, by id."""

    workers: Sequence[Worker]
    by_id: dict[int, Worker]
    ids: frozenset[int]


class WorkerGroups:
    """Groups by the identity of their tuple; a list is the workers that are left for one request's retry."""

    def __init__(self) -> None:
        self._cached: dict[int, WorkerGroup] = {}

    def of(self, workers: Sequence[Worker]) -> WorkerGroup:
        group = self._cached.get(id(workers))
        if group is None or group.workers is not workers:
            by_id = {worker.id: worker for worker in workers}
            group = WorkerGroup(workers, by_id, frozenset(by_id))
            if len(self._cached) >= _MAX_CACHED:
                self._cached.clear()
            self._cached[id(workers)] = group
        return group
