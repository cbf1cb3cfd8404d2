"""The number of drafts: as many as make a batch fastest, by the cost of a step and the running acceptance.

A step of b requests with k_i drafts each computes b + sum(k_i) rows, and yields as many tokens as requests and accepted
drafts. While weights are read for few rows, further rows are almost free; in a large batch each costs its arithmetic.
So the best k falls with the batch, and with acceptance; where no k pays, the step is plain.

All is computed from counts and a table that was measured before, never from a clock: ranks that share requests choose
the same.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import msgspec
import numpy as np

_BATCH_FORGETS = 0.98
"""The weight that the batch's observations keep in each step."""
_REQUEST_FORGETS = 0.9
_PRIOR_ACCEPTANCE = 0.7
_BATCH_PRIOR_WEIGHT = 2.0
"""Drafts that the guess before any observation counts for, at each position."""
_REQUEST_PRIOR_WEIGHT = 8.0
"""Drafts that the batch's acceptance counts for in the estimate of one request."""
_GAIN_TO_CHANGE = 1.01
"""Another number of drafts must be this much faster than the present one, so that noise does not change it."""
_GAIN_TO_START = 1.02
_STEPS_TO_STOP = 8
"""Plain steps must look faster for so many choices in a row: who stops may be unable to draft again."""
_STEPS_OF_CHOICE = 8
"""A choice holds for so many steps while the batch is the same."""


class CostTable(msgspec.Struct, frozen=True, array_like=True):
    """Seconds that parts of a step take, by the number of ``rows`` (ascending): a ``plain`` decode step of so many
    requests, a ``verify`` step of so many rows, and one pass of the drafter (``draft``) over so many rows. Between the
    rows they are linear, beyond them too. ``context_seconds``: those of each token that the requests' attention reads,
    in steps of either kind."""

    rows: tuple[int, ...]
    plain: tuple[float, ...]
    verify: tuple[float, ...]
    draft: tuple[float, ...]
    context_seconds: float = 0.0

    def __post_init__(self) -> None:
        if len(self.rows) < 2 or any(a >= b for a, b in zip(self.rows, self.rows[1:])):
            raise ValueError("A cost table needs at least two ascending numbers of rows.")


class _Curve:
    """A piecewise linear function, which goes on beyond its last point."""

    def __init__(self, rows: Sequence[int], seconds: Sequence[float]):
        slope = (seconds[-1] - seconds[-2]) / (rows[-1] - rows[-2])
        far = 64 * rows[-1]
        self._rows = np.array([*rows, far], np.float64)
        self._seconds = np.array([*seconds, seconds[-1] + max(slope, 0.0) * (far - rows[-1])], np.float64)

    def __call__(self, rows: np.ndarray) -> np.ndarray:
        seconds: np.ndarray = np.interp(rows, self._rows, self._seconds)
        return seconds

    def slope(self, rows: float) -> float:
        """Seconds of one row more, over the next eighth."""
        more = max(rows / 8, 1.0)
        before, after = self(np.array([rows, rows + more]))
        return float(max(after - before, 0.0) / more)


class Acceptance:
    """The running acceptance of drafts by position: of the batch, and of each request with the batch's as its prior.

    ``estimate`` gives the probability that a request's drafts are accepted up to a position.
    """

    def __init__(self, max_drafts: int):
        self._max_drafts = max_drafts
        self._positions = np.arange(max_drafts)
        self._slots: dict[Hashable, int] = {}
        self._free: list[int] = []
        self._tried = np.zeros((16, max_drafts))
        self._accepted = np.zeros((16, max_drafts))
        self._batch_tried = np.zeros(max_drafts)
        self._batch_accepted = np.zeros(max_drafts)

    def observe(self, keys: Sequence[Hashable], drafted: np.ndarray, accepted: np.ndarray) -> None:
        """Counts a step's chains: ``drafted`` [n] and ``accepted`` [n] tokens of the requests ``keys``."""
        slots = self._slots_of(keys)
        tried = (self._positions < np.minimum(drafted, accepted + 1)[:, None]).astype(np.float64)
        right = (self._positions < accepted[:, None]).astype(np.float64)
        self._tried[slots] = self._tried[slots] * _REQUEST_FORGETS + tried
        self._accepted[slots] = self._accepted[slots] * _REQUEST_FORGETS + right
        self._batch_tried = self._batch_tried * _BATCH_FORGETS + tried.sum(0)
        self._batch_accepted = self._batch_accepted * _BATCH_FORGETS + right.sum(0)

    def forget(self, keys: Sequence[Hashable]) -> None:
        """Drops requests that have ended."""
        for key in keys:
            slot = self._slots.pop(key, None)
            if slot is not None:
                self._free.append(slot)
                self._tried[slot] = self._accepted[slot] = 0.0

    def fade(self) -> None:
        """Lets the batch's observations lose weight in a step without drafts: some day drafts are tried again."""
        self._batch_tried *= _BATCH_FORGETS
        self._batch_accepted *= _BATCH_FORGETS

    def of_batch(self) -> np.ndarray:
        """The probability [max_drafts] that a draft is accepted if those before it are. A position that was hardly
        tried is taken to be as good as the one before."""
        found = np.empty(self._max_drafts)
        before = _PRIOR_ACCEPTANCE
        for position in range(self._max_drafts):
            before = ((self._batch_accepted[position] + _BATCH_PRIOR_WEIGHT * before)
                      / (self._batch_tried[position] + _BATCH_PRIOR_WEIGHT))
            found[position] = before
        return found

    def estimate(self, keys: Sequence[Hashable]) -> np.ndarray:
        """The probability [n, max_drafts] that a request's draft and all those before it are accepted."""
        slots = self._slots_of(keys)
        prior = self.of_batch()
        each = ((self._accepted[slots] + _REQUEST_PRIOR_WEIGHT * prior)
                / (self._tried[slots] + _REQUEST_PRIOR_WEIGHT))
        return np.cumprod(each, axis=1)

    def _slots_of(self, keys: Sequence[Hashable]) -> np.ndarray:
        slots = self._slots
        for key in keys:
            if key not in slots:
                slots[key] = self._free.pop() if self._free else len(slots)
        if len(slots) > len(self._tried):
            more = np.zeros((2 * len(slots) - len(self._tried), self._max_drafts))
            self._tried = np.concatenate([self._tried, more])
            self._accepted = np.concatenate([self._accepted, more])
        return np.array([slots[key] for key in keys], np.int64)


class DraftLength:
    """Chooses the number of drafts of each request of a batch; see the module."""

    def __init__(self, costs: CostTable, max_drafts: int):
        """``max_drafts``: most drafts of a request in a step."""
        self.acceptance = Acceptance(max_drafts)
        self.num_drafts = max_drafts
        """The present number for most requests, 0 where steps are plain."""
        self._max_drafts = max_drafts
        self._plain = _Curve(costs.rows, costs.plain)
        self._verify = _Curve(costs.rows, costs.verify)
        self._draft = _Curve(costs.rows, costs.draft)
        self._context_seconds = costs.context_seconds
        self._plain_in_a_row = 0
        self._chosen: np.ndarray = np.zeros(0, np.int64)
        self._chosen_for: list[Hashable] = []
        self._steps_left = 0

    def choose(self, keys: Sequence[Hashable], limits: np.ndarray, context: int) -> np.ndarray:
        """Returns the number of drafts [n] int64 of each of the requests ``keys``, at most ``limits`` [n]; all 0 where
        a plain step is faster. ``context``: tokens that their attention reads."""
        self._steps_left -= 1
        if self._steps_left <= 0 or self._chosen_for != list(keys):
            self._chosen = self._best(keys, limits, context * self._context_seconds)
            self._chosen_for = list(keys)
            self._steps_left = _STEPS_OF_CHOICE
        counts: np.ndarray = np.minimum(self._chosen, limits)
        return counts

    def _best(self, keys: Sequence[Hashable], limits: np.ndarray, attention: float) -> np.ndarray:
        limits = np.minimum(limits, self._max_drafts)
        if not limits.any():
            return np.zeros(len(keys), np.int64)
        if not self.num_drafts:
            self.acceptance.fade()
        allowed = np.arange(self._max_drafts) < limits[:, None]
        gains = self.acceptance.estimate(keys) * allowed
        speeds = self._speeds(len(keys), gains.sum(0), allowed.sum(0), attention)
        depth = self._with_hysteresis(speeds)
        if not depth:
            return np.zeros(len(keys), np.int64)
        equal = np.minimum(limits, depth)
        own = self._by_gain(gains, allowed, speeds[depth], len(keys))
        return own if self._speed(gains, own, attention) > speeds[depth] else equal

    def _speeds(self, num_reqs: int, gains: np.ndarray, num_drafting: np.ndarray, attention: float) -> np.ndarray:
        """Tokens a second [max_drafts + 1] with 0, 1, ... drafts for each request. ``gains`` and ``num_drafting``
        [max_drafts]: expected accepted drafts at each position, and requests that have one there."""
        tokens = num_reqs + np.concatenate([[0.0], np.cumsum(gains)])
        rows = num_reqs + np.concatenate([[0], np.cumsum(num_drafting)])
        passes = np.concatenate([[0.0, 0.0], np.cumsum(self._draft(num_drafting[1:]))])
        seconds = self._verify(rows) + self._draft(rows) + passes
        seconds[0] = self._plain(rows[:1])[0]
        speeds: np.ndarray = tokens / (seconds + attention)
        return speeds

    def _speed(self, gains: np.ndarray, counts: np.ndarray, attention: float) -> float:
        """Tokens a second with ``counts`` [n] drafts."""
        taken = np.arange(self._max_drafts) < counts[:, None]
        depth = int(counts.max())
        return float(self._speeds(len(counts), (gains * taken).sum(0), taken.sum(0), attention)[depth])

    def _with_hysteresis(self, speeds: np.ndarray) -> int:
        """The number of drafts of most requests, which changes for a gain that is worth it only."""
        best = 1 + int(np.argmax(speeds[1:]))
        present = self.num_drafts
        if not present:
            if speeds[best] > _GAIN_TO_START * speeds[0]:
                self.num_drafts = best
        elif speeds[best] <= speeds[0]:
            self._plain_in_a_row += 1
            if self._plain_in_a_row >= _STEPS_TO_STOP:
                self.num_drafts = self._plain_in_a_row = 0
        else:
            self._plain_in_a_row = 0
            if speeds[best] > _GAIN_TO_CHANGE * speeds[present]:
                self.num_drafts = best
        return self.num_drafts

    def _by_gain(self, gains: np.ndarray, allowed: np.ndarray, speed: float, num_reqs: int) -> np.ndarray:
        """Counts [n] of the drafts whose expected tokens are worth their row at ``speed`` tokens a second, down to the
        depth whose passes are worth it."""
        rows = num_reqs + float(allowed.sum()) * self.num_drafts / self._max_drafts
        row_seconds = self._verify.slope(rows) + self._draft.slope(rows)
        taken = allowed & (gains >= speed * row_seconds)
        num_drafting = taken.sum(0)
        seconds = num_drafting * row_seconds
        seconds[1:] += np.where(num_drafting[1:] > 0, self._draft(num_drafting[1:]), 0.0)
        worth = np.cumsum((gains * taken).sum(0) - speed * seconds)
        depth = 1 + int(np.argmax(worth))
        counts: np.ndarray = np.minimum(taken.sum(1), depth)
        return counts
