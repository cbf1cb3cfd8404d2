"""Which rows of a padded step are tokens."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

import torch


class LiveRows:
    """``rows`` [T] is 0 for rows that only pad the step, of all attention groups together; None: all are tokens."""

    def __init__(self) -> None:
        self.rows: torch.Tensor | None = None

    @contextmanager
    def of(self, rows: torch.Tensor) -> Generator[None, None, None]:
        """For what is computed meanwhile."""
        before, self.rows = self.rows, rows
        try:
            yield
        finally:
            self.rows = before
