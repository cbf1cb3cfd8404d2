"""A run's counts so far, for its progress."""

from __future__ import annotations

from ..client.answer import Answer
from ..client.load import Load
from .progress import Progress


class Tally:
    """Tells a progress of each answer, and what came of them until then."""

    def __init__(self, progress: Progress):
        self._progress = progress
        self._done = self._tokens = self._failed = 0

    def add(self, answer: Answer, load: Load) -> None:
        self._done += 1
        self._tokens += answer.num_output_tokens
        self._failed += answer.failure is not None
        seconds = max(load.duration, 1e-9)
        note = f"{self._done / seconds:.1f} req/s, {self._tokens / seconds:,.0f} tok/s, {load.num_open} open"
        self._progress.advance(note + (f", {self._failed} failed" if self._failed else ""))
