"""Trees of drafts, grown a level a pass: each pass expands the best candidates of the pass before, and the best of all
candidates become drafts (EAGLE-2, arXiv:2406.16858).

A candidate's score is the logarithm of the product of the draft's probabilities on its path.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from ..api.drafts import Drafts

_LEAST_COST = 1e-4
"""A child scores at least this much less than its parent, so that no child is chosen without it."""


class Frontier(NamedTuple):
    """The candidates that the next pass computes, ``topk`` of each of m requests: their ``tokens`` [m, topk] int64,
    which of the request's rows in the pass they continue, ``parents`` [m, topk] int64, and their RowMask's ``words``
    [m, topk] int64, with a bit for each row that passes compute."""

    tokens: torch.Tensor
    parents: torch.Tensor
    words: torch.Tensor


class DraftTrees:
    """The candidates of n requests. A pass may leave requests out; these have no further passes."""

    def __init__(self, num_requests: int, topk: int):
        self._num_requests = num_requests
        self._topk = topk
        self._passes: list[tuple[np.ndarray, torch.Tensor, torch.Tensor, torch.Tensor]] = []
        self._scores: torch.Tensor | None = None  # [m, topk] of the frontier
        self._ids: torch.Tensor | None = None  # [m, topk]: the frontier's indices among all candidates
        self._words: torch.Tensor | None = None
        self._count = 0

    def add(self, chosen: np.ndarray, tokens: torch.Tensor, logprobs: torch.Tensor) -> Frontier:
        """Adds the children that a pass proposes; returns the frontier.

        The pass has computed the requests ``chosen`` [m] (ascending): a row each in the first pass, then the frontier's
        topk rows. ``tokens`` and ``logprobs`` [rows, topk] are each row's children.
        """
        costs = logprobs.clamp(max=-_LEAST_COST).unflatten(0, (len(chosen), -1))
        found = tokens.unflatten(0, (len(chosen), -1)).flatten(1)
        if self._scores is None or self._ids is None or self._words is None:
            scores = costs.flatten(1)
            parents = torch.full_like(found, -1)
            words = torch.zeros_like(found)
        else:
            scores = (self._scores[:, :, None] + costs).flatten(1)
            parents = self._ids.repeat_interleave(self._topk, 1)
            words = self._words.repeat_interleave(self._topk, 1)
        self._passes.append((chosen, found, scores, parents))
        best, index = scores.topk(self._topk, 1)
        bits = torch.arange(self._topk, device=found.device) + (len(self._passes) - 1) * self._topk
        self._scores, self._ids = best, index + self._count
        self._words = words.gather(1, index) | (1 << bits)
        self._count += found.shape[1]
        return Frontier(found.gather(1, index), index // self._topk, self._words)

    def keep(self, rows: torch.Tensor) -> None:
        """Leaves out requests: ``rows`` [k] int64 of the last pass's m go on."""
        assert self._scores is not None and self._ids is not None and self._words is not None
        self._scores, self._ids, self._words = self._scores[rows], self._ids[rows], self._words[rows]

    def drafts(self, limits: np.ndarray) -> list[Drafts | None]:
        """Returns the best ``limits[b]`` candidates of each request as drafts; waits for the device."""
        most = min(int(limits.max(initial=0)), self._count)
        if most == 0:
            return [None] * self._num_requests
        device = self._passes[0][1].device
        scores = torch.full((self._num_requests, self._count), float("-inf"), device=device)
        tokens, parents = (torch.zeros(scores.shape, dtype=torch.int64, device=device) for _ in range(2))
        first = 0
        for chosen, *found in self._passes:
            rows, columns = torch.from_numpy(chosen).to(device), slice(first, first + found[0].shape[1])
            for target, values in zip((tokens, scores, parents), found):
                target[rows, columns] = values
            first = columns.stop
        best, index = scores.topk(most, 1)
        chosen_ids = torch.where(best.isfinite(), index, -1)
        columns_of = torch.stack((chosen_ids, tokens.gather(1, index), parents.gather(1, index))).tolist()
        return [_drafts_of(ids[:limit], own, before)
                for ids, own, before, limit in zip(*columns_of, limits.tolist())]


def _drafts_of(ids: list[int], tokens: list[int], parents: list[int]) -> Drafts | None:
    """Returns the candidates ``ids``, best first, as drafts in that order, so that the first of them are the best, too;
    -1 for none. A parent scores more than its children."""
    found = [place for place, id in enumerate(ids) if id >= 0]
    if not found:
        return None
    index_of = {ids[place]: index for index, place in enumerate(found)}
    return Drafts(tuple(tokens[place] for place in found), tuple(index_of.get(parents[place], -1) for place in found))
