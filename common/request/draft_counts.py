"""Counts of a request's speculative decoding."""

from __future__ import annotations

from ..api.messages import Speculation


class DraftCounts:
    """Counts the drafts of one request, step by step; those of steps without drafts follow from its tokens."""

    __slots__ = ("simulated", "num_drafts", "accepted", "_num_tokens", "_num_plain")

    def __init__(self, *, simulated: bool = False):
        self.simulated = simulated
        self.num_drafts = 0
        self.accepted: list[int] = []
        """Steps with drafts, by the number of accepted ones."""
        self._num_tokens = 0  # of the steps with drafts
        self._num_plain = 0  # steps without drafts, up to the last one with drafts

    def add(self, num_drafts: int, num_accepted: int, num_output: int) -> None:
        """Counts a step that verified ``num_drafts`` drafts of a request that had ``num_output`` tokens before."""
        self._num_plain = max(0, num_output - 1 - self._num_tokens)
        self._num_tokens += num_accepted + 1
        self.num_drafts += num_drafts
        if num_accepted >= len(self.accepted):
            self.accepted += [0] * (num_accepted + 1 - len(self.accepted))
        self.accepted[num_accepted] += 1

    def report(self, num_output: int) -> Speculation:
        """The counts of a request with ``num_output`` tokens, of which the first is its prompt's and the last run may
        have been cut."""
        num_plain = max(self._num_plain, num_output - 1 - self._num_tokens)
        num_accepted = sum(count * steps for count, steps in enumerate(self.accepted))
        return Speculation(num_plain + sum(self.accepted), self.num_drafts, num_accepted, self.accepted,
                           self.simulated)
