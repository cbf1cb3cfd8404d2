"""Which data-parallel rank of a server computes a request that names none."""

from __future__ import annotations

import itertools
from typing import Literal

from ..api.messages import Generate

Method = Literal["round_robin", "shortest_queue", "minimum_tokens"]


class DPBalancer:
    """Knows the requests that are open on each rank, and chooses by ``method``: the next rank in turn, the one with the
    fewest requests, or with the fewest tokens of prompts and output so far. Of equals the next in turn."""

    def __init__(self, method: Method, size: int):
        self.size = size
        self._method = method
        self._turn = itertools.count()
        self._rank_of: dict[str, int] = {}
        self._tokens_of: dict[str, int] = {}
        self._requests = [0] * size
        self._tokens = [0] * size

    def place(self, request: Generate) -> None:
        """Set the request's ``dp_rank``, unless it has one, and count it there until ``ended``."""
        if request.dp_rank is None:
            request.dp_rank = self._choose()
        rank = self._rank_of[request.rid] = request.dp_rank
        self._requests[rank] += 1
        self._add(request.rid, rank, len(request.input_ids))

    def grew(self, rid: str, num_tokens: int) -> None:
        self._add(rid, self._rank_of[rid], num_tokens)

    def ended(self, rid: str) -> None:
        rank = self._rank_of.pop(rid)
        self._requests[rank] -= 1
        self._tokens[rank] -= self._tokens_of.pop(rid)

    def _add(self, rid: str, rank: int, num_tokens: int) -> None:
        self._tokens_of[rid] = self._tokens_of.get(rid, 0) + num_tokens
        self._tokens[rank] += num_tokens

    def _choose(self) -> int:
        first = next(self._turn) % self.size
        ranks = [(first + i) % self.size for i in range(self.size)]
        if self._method == "round_robin":
            return first
        load = self._requests if self._method == "shortest_queue" else self._tokens
        return min(ranks, key=load.__getitem__)
