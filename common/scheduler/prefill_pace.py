"""Prefill pace: the time that a prompt token takes, as the scheduler's clock shows it."""

from __future__ import annotations

_WINDOW_TOKENS = 65536
"""Older tokens count half as much with each window."""
_OVERLAPPING_STEPS = 2
"""Iterations in which a step may be in flight: that of its launch, and with overlap the next."""


class PrefillPace:
    """Measures seconds per computed prompt token over the iterations in which prompts are computed, decode steps
    between them included. All ranks of a group are given the same times, and so measure the same."""

    def __init__(self) -> None:
        self.now = 0.0
        """The time of the current iteration."""
        self._seconds = 0.0
        self._tokens = 0.0
        self._busy_steps = 0

    @property
    def seconds_per_token(self) -> float:
        """0 until it is known."""
        return self._seconds / self._tokens if self._tokens else 0.0

    @property
    def tokens_per_second(self) -> float:
        return self._tokens / self._seconds if self._seconds else 0.0

    def begin(self, now: float) -> None:
        """An iteration begins at time ``now``."""
        if self._busy_steps:
            self._seconds += max(0.0, now - self.now)
            self._busy_steps -= 1
        self.now = now

    def launch(self, num_tokens: int) -> None:
        """Counts a launched step's prompt tokens."""
        if self._tokens >= _WINDOW_TOKENS:
            self._tokens /= 2
            self._seconds /= 2
        self._tokens += num_tokens
        self._busy_steps = _OVERLAPPING_STEPS
