"""Rows of a decode step that verifies chains of drafts, whose tokens and positions may be on the device only."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np


class ChainRows(NamedTuple):
    """The rows of B requests, ``width`` each: the newest token, its drafts, and void rows up to the width.

    ``sources`` [B] int64: the request's row in the chain step numbered ``follows``, which leaves its newest token, that
    token's position and its drafts on the device; -1 where the host knows them, as ``positions`` [B] int64, ``tokens``
    [B, width] int64 and ``num_drafts`` [B] int64 say. Where it does not, positions are lower bounds.

    ``limits`` [B] int64: the request has pages, and a use, for the tokens at lower positions; rows at others are void.
    ``kv_indices`` [N] int32 from ``kv_indptr[b]`` to ``kv_indptr[b + 1]`` are the request's pages up to that of the
    last slot that the step may write, void rows and drafts after it included; where the request has no page there is
    the scratch page. Equal ``pages_version`` (not None) have equal ``kv_indptr`` and ``kv_indices``.
    """

    width: int
    sources: np.ndarray
    positions: np.ndarray
    tokens: np.ndarray
    num_drafts: np.ndarray
    limits: np.ndarray
    kv_indptr: np.ndarray
    kv_indices: np.ndarray
    pages_version: int | None = None
    follows: int = 0

    @property
    def num_reqs(self) -> int:
        return len(self.positions)


class ChainLevels(NamedTuple):
    """The chain steps that a runner has captured: with ``num_drafts[i]`` drafts (ascending) of up to
    ``max_requests[i]`` requests. Those with 0 drafts are plain steps after which the drafter stores its keys and
    values, and drafts nothing. Rows without a page are stored in ``scratch_page``. With ``exact_sizes`` only steps of
    these numbers of requests are chain steps, by drafts."""

    num_drafts: tuple[int, ...]
    max_requests: tuple[int, ...]
    scratch_page: int
    exact_sizes: tuple[frozenset[int], ...] = ()

    @property
    def has_plain(self) -> bool:
        """True where there are steps with 0 drafts."""
        return self.num_drafts[0] == 0

    def width_for(self, num_reqs: int, num_drafts: int) -> int | None:
        """Returns the least width of a chain step of ``num_reqs`` requests that verifies and drafts ``num_drafts``
        tokens of each, or else as many as possible: with fewer a captured step is still faster than an eager one. None
        where none is captured."""
        counts = [count for index, (count, most) in enumerate(zip(self.num_drafts, self.max_requests))
                  if num_reqs <= most and (not self.exact_sizes or num_reqs in self.exact_sizes[index])]
        enough = next((count for count in counts if count >= num_drafts), None)
        if enough is None and counts and counts[-1] > 0:
            enough = counts[-1]
        return None if enough is None else enough + 1
