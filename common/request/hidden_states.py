"""Hidden states that requests ask for: gathered chunk by chunk, told as the raw bytes of float32 rows.

They are those behind the model's last norm, of every position that the request computes: its prompt's, and those of its
output but for the last token's, which nothing is computed from.
"""

from __future__ import annotations

import numpy as np


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
