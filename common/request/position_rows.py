"""Rows of values for positions that a request computes, which it asks for: gathered chunk by chunk, sent as bytes.

Positions are those of its prompt, and those of its output except the last token, from which nothing is computed.
"""

from __future__ import annotations

import numpy as np

HIDDEN_STATE = "<f4"
"""The outputs of the model's final norm."""
ROUTED_EXPERTS = "<u2"
"""The experts of a position in each layer, ``num_layers * top_k`` a row."""


class PositionRows:
    """Rows of one request, by position, of numpy's type ``dtype``. ``num_launched`` positions were computed, or will
    have been by the step in flight; a request that is recomputed after a retraction keeps those that it has."""

    def __init__(self, dtype: str) -> None:
        self.num_launched = 0
        self._dtype = dtype
        self._new: list[np.ndarray] = []  # [n, width] each, not sent yet

    def add(self, rows: np.ndarray) -> None:
        """Append ``rows`` [n, width] of the next positions."""
        self._new.append(rows)

    def drop_last(self, count: int) -> None:
        """Drop ``count`` of the rows that were added last, which follow the end of the output."""
        self._new[-1] = self._new[-1][:-count]

    def add_prefilled(self, rows: bytes, num_positions: int) -> None:
        """Append the rows of the prompt that a prefill server has sent."""
        self.num_launched = num_positions
        self._new.append(np.frombuffer(rows, self._dtype).reshape(num_positions, -1))

    def take(self) -> bytes:
        """The rows added since the last call."""
        new, self._new = self._new, []
        return b"".join(rows.astype(self._dtype, copy=False).tobytes() for rows in new)
