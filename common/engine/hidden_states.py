"""Hidden states that requests ask for: gathered chunk by chunk, told as the raw bytes of float32 rows.

They are those behind the model's last norm, of every position that the request computes: its prompt's, and those of its
output but for the last token's, which nothing is computed from.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from .host_copies import Download

if TYPE_CHECKING:
    from .batcher import Batch
    from .req import Req


class HiddenStates:
    """Of one request, by position. ``num_launched`` positions were computed, or will have been by the step in flight;
    a request that is computed again after it was retracted keeps what it has."""

    def __init__(self) -> None:
        self.num_launched = 0
        self._new: list[np.ndarray] = []  # [n, hidden] each, behind what was told

    def add(self, rows: np.ndarray) -> None:
        """``rows`` [n, hidden] float32 of the next positions."""
        self._new.append(rows)

    def add_told(self, states: bytes, num_positions: int) -> None:
        """What a prefill server has told of the prompt."""
        self.num_launched = num_positions
        self._new.append(np.frombuffer(states, "<f4").reshape(num_positions, -1))

    def take(self) -> bytes:
        """What is new since the last call."""
        new, self._new = self._new, []
        return b"".join(rows.astype("<f4", copy=False).tobytes() for rows in new)


@dataclass(frozen=True)
class HiddenRows:
    """Rows ``first:stop`` of a batch are the next positions of ``req``."""

    req: Req
    first: int
    stop: int


def hidden_rows(batch: Batch) -> list[HiddenRows]:
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
