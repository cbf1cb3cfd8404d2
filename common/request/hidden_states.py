"""Hidden states that a request asks for: gathered chunk by chunk, sent as the raw bytes of float32 rows.

They are the outputs of the model's final norm at every position that the request computes: those of its prompt, and
those of its output except the last token, from which nothing is computed.
"""

from __future__ import annotations

import numpy as np


class HiddenStates:
    """Hidden states of one request, by position. ``num_launched`` positions were computed, or will have been by the
    step in flight; a request that is recomputed after a retraction keeps those that it has."""

    def __init__(self) -> None:
        self.num_launched = 0
        self._new: list[np.ndarray] = []  # [n, hidden] each, not sent yet

    def add(self, rows: np.ndarray) -> None:
        """Append ``rows`` [n, hidden] float32 of the next positions."""
        self._new.append(rows)

    def drop_last(self, count: int) -> None:
        """Drop ``count`` of the rows that were added last, which follow the end of the output."""
        self._new[-1] = self._new[-1][:-count]

    def add_prefilled(self, states: bytes, num_positions: int) -> None:
        """Append the rows of the prompt that a prefill server has sent."""
        self.num_launched = num_positions
        self._new.append(np.frombuffer(states, "<f4").reshape(num_positions, -1))

    def take(self) -> bytes:
        """The rows added since the last call."""
        new, self._new = self._new, []
        return b"".join(rows.astype("<f4", copy=False).tobytes() for rows in new)
