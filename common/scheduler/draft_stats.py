"""Statistics of an engine's speculative decoding."""

from __future__ import annotations

import numpy as np

_FORGETS = 0.99
"""The weight that the gauges' observations keep in each step."""


class DraftStats:
    """Counts drafts and how many of them were accepted, of all requests."""

    def __init__(self, num_steps: int, max_drafts: int):
        """``num_steps``: passes of the drafter; ``max_drafts``: those of a request in a step."""
        self._num_passes = num_steps
        self.num_rows = max_drafts + 1
        """Rows of a request in a step, at present."""
        self.num_steps = 0
        self.num_verified = 0
        self.num_drafted = 0
        self.num_accepted = 0
        self._accepted = np.zeros(max_drafts + 1, np.int64)
        self._recent = np.zeros(3)

    def add(self, drafted: np.ndarray, accepted: np.ndarray) -> None:
        """Counts a step whose requests had ``drafted`` [n] drafts, of which ``accepted`` [n] were accepted."""
        self.num_steps += 1
        recent = np.array([np.count_nonzero(drafted), drafted.sum(), accepted.sum()], np.float64)
        num_verified, num_drafted, num_accepted = recent.astype(np.int64).tolist()
        self.num_verified += num_verified
        self.num_drafted += num_drafted
        self.num_accepted += num_accepted
        self._accepted += np.bincount(accepted[drafted > 0], minlength=len(self._accepted))
        self._recent = self._recent * _FORGETS + recent

    @property
    def histogram(self) -> list[int]:
        """Steps of a request with drafts, by the number of accepted ones."""
        accepted: list[int] = self._accepted.tolist()
        return accepted

    @property
    def counters(self) -> dict[str, float]:
        at_least = np.cumsum(self._accepted[::-1])[::-1]
        return {"spec_verified_drafts": self.num_verified, "spec_draft_tokens": self.num_drafted,
                "spec_accepted_tokens": self.num_accepted,
                **{f"spec_accepted_tokens_at_{position}": int(count)
                   for position, count in enumerate(at_least[1:].tolist(), 1)}}

    @property
    def gauges(self) -> dict[str, float]:
        """``spec_accept_length``: tokens of a step, for a request with drafts; ``spec_accept_rate``: share of its
        drafts; both over the last hundred steps or so."""
        verified, drafted, accepted = self._recent.tolist()
        return {"spec_accept_length": 1 + accepted / verified if verified else 0.0,
                "spec_accept_rate": accepted / drafted if drafted else 0.0,
                "spec_num_steps": self._num_passes, "spec_num_draft_tokens": self.num_rows}
