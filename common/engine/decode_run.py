"""A decode batch that goes on: the same requests, one token each in every step.

What a step needs of them stands in arrays, which a step advances. Gathered from 256 requests anew it would take a
microsecond a request and more, in every step.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from .choosing import Choosing
from .forward_batch import DecodeTable
from .req import Req


class DecodeRun:
    """``reqs`` decode together until one ends or leaves (``over``), or one joins: that is another run.

    ``positions`` [B] int64 are those of the tokens that the next step computes; ``steps_left`` steps may be launched
    until the first request has all the tokens that it asked for. ``plain``: parameters alone say how tokens are chosen,
    and nothing but the token is told of a step; ``greedy``: all choose the likeliest.
    """

    def __init__(self, reqs: list[Req], page_size: int):
        """None of ``reqs`` is complete, and each has computed all of its tokens but the last."""
        self.reqs = reqs
        self.over = False
        self.positions = np.array([req.num_computed_tokens for req in reqs], np.int64)
        self.steps_left = min(req.max_tokens - req.length for req in reqs)
        self.plain = all(_plain(req) for req in reqs)
        self.greedy = all(req.sampling.greedy for req in reqs)
        self.stop_ids = frozenset().union(*{req.stop_ids for req in reqs})
        self._page_size = page_size
        self._seeded = any(req.sampling.seed is not None for req in reqs)
        self._held = np.array([0 if req.hold is None else req.hold.count * page_size for req in reqs], np.int64)
        self._kv_indptr = np.zeros(len(reqs) + 1, np.int32)
        self._kv_indices = np.empty(0, np.int32)
        self._rows: list[Choosing] | None = None
        self._reported = False

    def __repr__(self) -> str:
        return f"DecodeRun({len(self.reqs)} requests, {self.steps_left} steps left{', over' * self.over})"

    def __len__(self) -> int:
        return len(self.reqs)

    def short(self) -> list[int]:
        """Places of the requests that have no page for the next step's token; ``grown`` is to be called for each."""
        return np.flatnonzero(self._held <= self.positions).tolist()

    def grown(self, place: int) -> None:
        """The request at ``place`` got pages."""
        hold = self.reqs[place].hold
        assert hold is not None
        self._held[place] = hold.count * self._page_size

    def advance(self) -> None:
        """A step was launched."""
        for req in self.reqs:
            req.num_computed_tokens += 1
            req.num_pending += 1
        self.positions = self.positions + 1
        self.steps_left -= 1

    def table(self) -> DecodeTable:
        """Where the next step's keys and values live. All requests have pages for it."""
        page_size = self._page_size
        pages = self.positions // page_size
        offsets = self.positions - pages * page_size
        missing = np.flatnonzero(np.diff(self._kv_indptr) <= pages)
        if len(missing):
            self._add_pages(pages, missing)
        kv_indptr, kv_indices = self._kv_indptr, self._kv_indices
        assert len(kv_indices) == kv_indptr[-1], "a request's pages do not cover its tokens"
        return DecodeTable(self.positions, kv_indices[kv_indptr[1:] - 1].astype(np.int64), offsets, kv_indptr,
                           kv_indices, (offsets + 1).astype(np.int32))

    def _add_pages(self, pages: np.ndarray, missing: np.ndarray) -> None:
        """Put the pages up to ``pages`` of the requests at ``missing`` behind those that the table has of them."""
        before, indptr = self._kv_indices, self._kv_indptr
        parts, at = [], 0
        for place, last in zip(missing.tolist(), pages[missing].tolist()):
            begin, end = int(indptr[place]), int(indptr[place + 1])
            hold = self.reqs[place].hold
            assert hold is not None
            parts += (before[at:end], hold.ids[end - begin:last + 1])
            at = end
        parts.append(before[at:])
        self._kv_indices = np.concatenate(parts, dtype=np.int32, casting="same_kind")
        self._kv_indptr = np.zeros_like(indptr)
        np.cumsum(pages + 1, out=self._kv_indptr[1:])

    def choosing(self) -> Sequence[Choosing]:
        """How each request's next token is to be chosen, of a plain run. Only a seed makes the position matter."""
        if self._rows is None or self._seeded:
            self._rows = [Choosing(req.sampling, start + 1) for req, start in zip(self.reqs, self.positions.tolist())]
        return self._rows

    def goes_on(self, token_ids: list[int], ends: bool) -> bool:
        """Whether a step of this run, which was plain, has chosen tokens by which no request ends and of which nothing
        is to be told but the tokens. ``ends``: it was some request's last."""
        if ends or self.over or not self.stop_ids.isdisjoint(token_ids):
            return False
        self._reported = self._reported or all(req.reported and not req.stages for req in self.reqs)
        return self._reported


def _plain(req: Req) -> bool:
    """Whether the request's next token depends on logits and parameters alone, and is all that is told."""
    sampling = req.sampling
    return (req.logprobs is None and req.history is None and req.bias is None and req.processor is None
            and req.embeds is None and req.hidden is None and sampling.grammar is None
            and req.length - req.num_prompt_tokens >= sampling.min_new_tokens)
