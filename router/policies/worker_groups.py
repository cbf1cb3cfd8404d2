"""What policies derive from the registry's tuples of workers, once for each tuple."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ..workers.registry import Worker

_REMEMBERED = 8
"""Tuples: both roles, or kinds of decode workers that requests alternate between."""


class WorkerGroup(NamedTuple):
    """Workers to choose among, by id."""

    workers: Sequence[Worker]
    by_id: dict[int, Worker]
    ids: frozenset[int]


class WorkerGroups:
    """Fleets by the identity of their tuple; a list is the workers left for one request's retry."""

    def __init__(self) -> None:
        self._known: dict[int, WorkerGroup] = {}

    def of(self, workers: Sequence[Worker]) -> WorkerGroup:
        fleet = self._known.get(id(workers))
        if fleet is None or fleet.workers is not workers:
            by_id = {worker.id: worker for worker in workers}
            fleet = WorkerGroup(workers, by_id, frozenset(by_id))
            if len(self._known) >= _REMEMBERED:
                self._known.clear()
            self._known[id(workers)] = fleet
        return fleet
