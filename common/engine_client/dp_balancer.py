"""DP balancer: assigns requests to the data-parallel ranks of a server."""

from __future__ import annotations

import itertools
from typing import Literal

from ..api.messages import Generate

Method = Literal["round_robin", "shortest_queue", "minimum_tokens"]


class DPBalancer:
    """Tracks the open requests of each rank, and chooses by ``method``: the next rank (round robin), the one with the
    fewest requests, or with the fewest tokens of prompts and output so far. Ties are broken by round robin."""

    def __init__(self, method: Method, size: int):
        self.size = size
        self._method = method
        self._sequence = itertools.count()
        self._rank_of: dict[str, int] = {}
        self._tokens_of: dict[str, int] = {}
        self._requests = [0] * size
        self._tokens = [0] * size

    def assign(self, request: Generate) -> None:
        """Set the request's ``dp_rank``, unless it has one, and count it there until ``release``."""
        if request.dp_rank is None:
            request.dp_rank = self._choose()
        rank = self._rank_of[request.rid] = request.dp_rank
        self._requests[rank] += 1
        self._add(request.rid, rank, len(request.input_ids))

    def add_tokens(self, rid: str, num_tokens: int) -> None:
        self._add(rid, self._rank_of[rid], num_tokens)

    def release(self, rid: str) -> None:
        """Stop counting a request that has ended."""
        rank = self._rank_of.pop(rid)
        self._requests[rank] -= 1
        self._tokens[rank] -= self._tokens_of.pop(rid)

    def _add(self, rid: str, rank: int, num_tokens: int) -> None:
        self._tokens_of[rid] = self._tokens_of.get(rid, 0) + num_tokens
        self._tokens[rank] += num_tokens

    def _choose(self) -> int:
        first = next(self._sequence) % self.size
        ranks = [(first + i) % self.size for i in range(self.size)]
        if self._method == "round_robin":
            return first
        load = self._requests if self._method == "shortest_queue" else self._tokens
        return min(ranks, key=load.__getitem__)
