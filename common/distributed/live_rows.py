"""The rows of a padded step that are tokens."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

import torch


class LiveRows:
    """``rows`` [T] is 0 for rows that only pad the step, of all attention groups together; None: all are tokens."""

    def __init__(self) -> None:
        self.rows: torch.Tensor | None = None

    @contextmanager
    def using(self, rows: torch.Tensor) -> Generator[None, None, None]:
        """Sets ``rows`` within the context."""
        before, self.rows = self.rows, rows
        try:
            yield
        finally:
            self.rows = before
