"""Counts of a request's speculative decoding."""

from __future__ import annotations

from typing import NamedTuple


class Speculation(NamedTuple):
    """Speculative decoding of a request on a server: its decode steps, with drafts or without; the drafts that they
    verified, and those that were accepted. ``histogram``: steps with drafts, by the number of accepted ones.
    ``accept_length``: tokens a step. ``simulated``: acceptance was drawn, see --speculative-simulate-acceptance."""

    num_steps: int
    num_drafts: int
    num_accepted: int
    histogram: list[int]
    accept_length: float = 0.0
    simulated: bool = False


class DraftCounts:
    """Counts the drafts of one request, step by step; those of steps without drafts follow from its tokens."""

    __slots__ = ("simulated", "num_drafts", "accepted")

    def __init__(self, *, simulated: bool = False):
        self.simulated = simulated
        self.num_drafts = 0
        self.accepted: list[int] = []
        """Steps with drafts, by the number of accepted ones."""

    def add(self, num_drafts: int, num_tokens: int) -> None:
        """Counts a step that verified ``num_drafts`` drafts, and gave ``num_tokens`` tokens: what follows the answer's
        end in them is left out, as if it had been rejected."""
        num_accepted = max(0, num_tokens - 1)
        self.num_drafts += num_drafts
        if num_accepted >= len(self.accepted):
            self.accepted += [0] * (num_accepted + 1 - len(self.accepted))
        self.accepted[num_accepted] += 1

    def report(self, num_output: int) -> Speculation:
        """The counts of a request with ``num_output`` tokens, of which the first is its prompt's."""
        num_accepted = sum(count * steps for count, steps in enumerate(self.accepted))
        num_steps = max(num_output - 1 - num_accepted, sum(self.accepted))
        return Speculation(num_steps, self.num_drafts, num_accepted, self.accepted,
                           num_output / num_steps if num_steps else 0.0, self.simulated)
