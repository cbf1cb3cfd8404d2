"""Which rows of a batch are hidden states that requests ask for, and their way to the requests."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..forward.host_copies import Download
from ..request.batch import ScheduledBatch
from ..request.req import Req


@dataclass(frozen=True)
class HiddenRows:
    """Rows ``first:stop`` of a batch are the next positions of ``req``."""

    req: Req
    first: int
    stop: int


def hidden_rows(batch: ScheduledBatch) -> list[HiddenRows]:
    """The rows whose hidden states are wanted; counts them as launched."""
    if all(chunk.req.hidden is None for chunk in batch.chunks):
        return []
    found, offset = [], 0
    for chunk in batch.chunks:
        states = chunk.req.hidden
        if states is not None and chunk.stop > states.num_launched:
            start = max(chunk.start, states.num_launched)
            assert start == states.num_launched, "positions were left out"
            found.append(HiddenRows(chunk.req, offset + start - chunk.start, offset + chunk.stop - chunk.start))
            states.num_launched = chunk.stop
        offset += chunk.stop - chunk.start
    return found


class HiddenReport:
    """Hidden states of ``wanted``, end to end in ``states`` [rows, hidden], which the device is computing."""

    def __init__(self, wanted: list[HiddenRows], states: torch.Tensor):
        self._wanted = wanted
        self._download = Download([states.float()])

    def take_in(self) -> None:
        """Wait, and hand the rows to their requests."""
        states = self._download.arrays()[0]
        first = 0
        for rows in self._wanted:
            count = rows.stop - rows.first
            assert rows.req.hidden is not None
            rows.req.hidden.add(states[first:first + count])
            first += count
