"""The rows of a batch whose hidden states requests ask for, and their copies to the requests."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..forward.host_copies import Download
from ..request.batch import ScheduledBatch
from ..request.req import Req


@dataclass(frozen=True)
class HiddenRows:
    """Rows ``start:stop`` of a batch are the next positions of ``req``."""

    req: Req
    start: int
    stop: int


def hidden_rows(batch: ScheduledBatch) -> list[HiddenRows]:
    """Returns the rows whose hidden states are requested; counts them as launched."""
    if all(chunk.req.hidden is None for chunk in batch.chunks):
        return []
    rows, offset = [], 0
    for chunk in batch.chunks:
        states = chunk.req.hidden
        if states is not None and chunk.stop > states.num_launched:
            start = max(chunk.start, states.num_launched)
            assert start == states.num_launched, "positions were left out"
            rows.append(HiddenRows(chunk.req, offset + start - chunk.start, offset + chunk.stop - chunk.start))
            states.num_launched = chunk.stop
        offset += chunk.stop - chunk.start
    return rows


class HiddenReport:
    """Hidden states of ``rows``, concatenated in ``states`` [rows, hidden], which the device is computing."""

    def __init__(self, rows: list[HiddenRows], states: torch.Tensor):
        self._rows = rows
        self._download = Download([states.float()])

    def append_to_requests(self) -> None:
        """Waits for the states, and appends them to their requests."""
        states = self._download.arrays()[0]
        first = 0
        for rows in self._rows:
            count = rows.stop - rows.start
            assert rows.req.hidden is not None
            rows.req.hidden.add(states[first:first + count])
            first += count
