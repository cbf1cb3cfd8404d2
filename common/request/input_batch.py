"""A decode batch that goes on: the same requests, one token each in every step.

What a step needs of them stands in arrays, which a step advances. Gathered from 256 requests anew it would take a
microsecond a request and more, in every step.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from typing import NamedTuple

import numpy as np

from ..api.messages import NewTokens
from ..forward.forward_batch import DecodeTable
from ..kvcache.manager import KVCacheManager, PageTable
from .req import Req
from .sampling_metadata import SamplingMetadata

_NOTHING_GIVEN = np.empty(0, np.int64), np.empty(0, np.int64)
_HOLD, _STOP_IDS = attrgetter("hold"), attrgetter("stop_ids")


class InputBatch:
    """``reqs`` decode together until one leaves or joins: what follows is another run, which takes over the arrays.

    ``positions`` [B] int64 are those of the tokens that the next step computes; ``left`` [B] int64: steps that may be
    launched until the request has all the tokens that it asked for. ``plain``: parameters alone say how tokens are
    chosen, and beside tokens a step tells nothing; ``greedy``: all choose the likeliest. ``kept``: places that the
    first of them had in the run before, whose requests are ``follows``.
    """

    def __init__(self, reqs: list[Req], page_size: int, before: InputBatch | None = None):
        """None of ``reqs`` is complete, and each has computed all of its tokens but the last. ``before`` ran last, and
        its requests have not been computed otherwise since."""
        self.reqs = reqs
        self._page_size = page_size
        self._holds: list[PageTable | None] = list(map(_HOLD, reqs))
        kept = self.kept = self._places_in(before)
        self.follows = [] if before is None else before.reqs
        new = reqs[len(kept):]
        self.positions = np.array([req.num_computed_tokens for req in new], np.int64)
        self.left = np.array([req.num_prompt_tokens + req.sampling.max_new_tokens for req in new], np.int64)
        self.left -= self.positions + 1
        self._held = np.array([0 if req.hold is None else req.hold.count * page_size for req in new], np.int64)
        self._facts = np.array([(_plain(req), req.sampling.greedy, req.sampling.seed is not None) for req in new],
                               bool).reshape(-1, 3)
        self._unreported = list(range(len(kept), len(reqs)))
        self._kv_indptr = np.zeros(len(reqs) + 1, np.int32)
        self._kv_indices = np.empty(0, np.int32)
        self._page_of_token = np.empty(0, np.int64)
        self._offsets: np.ndarray | None = None  # of the positions in their pages, once a table was asked for
        self._given = _NOTHING_GIVEN  # places, and the pages that they were given since the table was made
        self.stop_ids: frozenset[int] = frozenset().union(*set(map(_STOP_IDS, reqs)))
        self._newest: list[int] = []  # tokens of the first requests, as far as the host knows them
        self._num_ahead = 0  # steps whose tokens were not taken in
        self._told: _Told | None = None
        if before is not None and len(kept):
            self._take_over(before, kept)
        self.plain, self.greedy, self._seeded = (bool(self._facts[:, 0].all()), bool(self._facts[:, 1].all()),
                                                 bool(self._facts[:, 2].any()))
        self.steps_left = int(self.left.min())  # that all requests want
        self.gone: list[int] = []  # places of those that left
        self._rows: list[SamplingMetadata] | None = None

    def _take_over(self, before: InputBatch, kept: np.ndarray) -> None:
        """What ``before`` has of the requests at its places ``kept``, the first of this run."""
        self.positions = np.concatenate((before.positions[kept], self.positions))
        self.left = np.concatenate((before.left[kept], self.left))
        self._held = np.concatenate((before._held[kept], self._held))
        facts = before._facts[kept]
        for place in np.flatnonzero(~facts[:, 0]).tolist():
            facts[place, 0] = _plain(self.reqs[place])  # now that it has ``min_new_tokens``
        self._facts = np.concatenate((facts, self._facts))
        waiting = set(before._unreported)
        self._unreported += [place for place, was in enumerate(kept.tolist()) if was in waiting] if waiting else []
        places = kept.tolist()
        if not before._num_ahead and len(before._newest) == len(before.reqs):
            self._newest = [before._newest[place] for place in places]
        if before._told is not None:
            self._told = before._told.of(places).with_those_of(self.reqs[len(kept):])
        indptr, indices = before._kv_indptr, before._kv_indices
        np.cumsum(np.diff(indptr)[kept], out=self._kv_indptr[1:len(kept) + 1])
        self._kv_indptr[len(kept) + 1:] = self._kv_indptr[len(kept)]
        cuts = np.flatnonzero(np.diff(kept) != 1) + 1
        self._kv_indices = np.concatenate([indices[indptr[some[0]]:indptr[some[-1] + 1]] for some in
                                           np.split(kept, cuts)])

    def __repr__(self) -> str:
        return f"InputBatch({len(self.reqs)} requests, {self.steps_left} steps left)"

    def __len__(self) -> int:
        return len(self.reqs)

    def wanting(self, running: Sequence[Req]) -> list[Req]:
        """Those of ``running`` that want more: first the run's, in its order, then those that have joined since."""
        stays = self.left > 0
        stays[self.gone] = False
        reqs = self.reqs if stays.all() else [self.reqs[place] for place in np.flatnonzero(stays).tolist()]
        behind = len(running) if reqs else 0
        while behind and running[behind - 1] is not reqs[-1]:
            behind -= 1
        return reqs + [req for req in running[behind:] if not req.complete]

    def ending(self) -> list[int]:
        """Places of the requests whose last token the next step chooses."""
        return np.flatnonzero(self.left == 1).tolist() if self.steps_left == 1 else []

    def short(self) -> list[int]:
        """Places of the requests that have no page for the next step's token; ``grown`` is to be called for each."""
        return np.flatnonzero(self._held <= self.positions).tolist()

    def grown(self, place: int) -> None:
        """The request at ``place`` got pages."""
        hold = self.reqs[place].hold
        assert hold is not None
        self._held[place] = hold.count * self._page_size

    def add_page_each(self, cache: KVCacheManager, places: list[int]) -> bool:
        """A page for each request that is ``short``; False, and no change, where so many are not free, or where one has
        got pages that nobody told of."""
        holds = [hold for hold in map(self._holds.__getitem__, places) if hold is not None]
        known = [hold.count for hold in holds] == (self._held[places] // self._page_size).tolist()
        pages = cache.add_page_each(holds) if known else None
        if pages is None:
            return False
        self._given = np.array(places), pages
        self._held[places] += self._page_size
        return True

    def leave(self, reqs: Sequence[Req]) -> None:
        """Those of ``reqs`` that are of the run have ended or give their pages back."""
        if len(reqs) == 1:  # found faster by the list's own search
            self.gone += [self.reqs.index(req) for req in reqs if req in self.reqs]
        else:
            leaving = set(reqs)
            self.gone += [place for place, req in enumerate(self.reqs) if req in leaving]

    def advance(self) -> None:
        """A step was launched."""
        for req in self.reqs:
            req.num_computed_tokens += 1
            req.num_pending += 1
        self._num_ahead += 1
        self.positions = self.positions + 1
        if self._offsets is not None:
            self._offsets = self._offsets + 1
        self.left -= 1
        self.steps_left -= 1

    def table(self) -> DecodeTable:
        """Where the next step's keys and values live. All requests have pages for it."""
        if self._offsets is None or int(self._offsets.max()) >= self._page_size:
            self._offsets = self._turn_pages()
        return DecodeTable(self.positions, self._page_of_token, self._offsets, self._kv_indptr, self._kv_indices,
                           (self._offsets + 1).astype(np.int32))

    def _turn_pages(self) -> np.ndarray:
        """Bring the pages up to ``positions``; returns these within their pages."""
        pages = self.positions // self._page_size
        missing = np.flatnonzero(np.diff(self._kv_indptr) <= pages)
        if len(missing):
            self._add_pages(pages, missing)
        assert len(self._kv_indices) == self._kv_indptr[-1], "a request's pages do not cover its tokens"
        self._page_of_token = self._kv_indices[self._kv_indptr[1:] - 1].astype(np.int64)
        return self.positions - pages * self._page_size

    def _add_pages(self, pages: np.ndarray, missing: np.ndarray) -> None:
        """Put the pages up to ``pages`` of the requests at ``missing`` behind those that the table has of them."""
        before, indptr = self._kv_indices, self._kv_indptr
        (places, given), self._given = self._given, _NOTHING_GIVEN
        lack_one = len(before) == int(pages.sum()) + len(pages) - len(missing)
        if lack_one and np.array_equal(places, missing):  # they have gone on together
            self._kv_indices = np.insert(before, indptr[missing + 1], given.astype(np.int32))
        else:
            self._kv_indices = self._with_pages_of(missing.tolist(), pages[missing].tolist())
        self._kv_indptr = np.zeros_like(self._kv_indptr)
        np.cumsum(pages + 1, out=self._kv_indptr[1:])

    def _with_pages_of(self, places: list[int], lasts: list[int]) -> np.ndarray:
        """The table's pages, and behind what it has of the requests at ``places`` theirs up to ``lasts``."""
        before, indptr = self._kv_indices, self._kv_indptr.tolist()
        parts: list[np.ndarray] = []
        at = 0
        for place, last in zip(places, lasts):
            begin, end = indptr[place], indptr[place + 1]
            if at < end:
                parts.append(before[at:end])
            parts.append(_held_by(self.reqs[place]).ids[end - begin:last + 1])
            at = end
        parts.append(before[at:])
        return np.concatenate(parts, dtype=np.int32, casting="same_kind")

    def took(self, token_ids: list[int]) -> None:
        """The tokens [B] of the next of its steps are here."""
        self._newest = token_ids
        self._num_ahead -= 1

    def newest(self, follows: bool) -> tuple[list[int], list[int]]:
        """The last token [B] of each request, and the places of those whose token the host does not know: 0 there.
        ``follows``: those of the run before are on the device, and are left out in the same way."""
        known = [0] * len(self.kept) if follows else [] if self._num_ahead else self._newest
        behind = self.reqs[len(known):]
        return (known + [0 if req.num_pending else req.tokens.last for req in behind],
                [place for place, req in enumerate(behind, len(known)) if req.num_pending])

    def choosing(self) -> Sequence[SamplingMetadata]:
        """How each request's next token is to be chosen, of a plain run. Only a seed makes the position matter."""
        if self._rows is None or self._seeded:
            self._rows = [SamplingMetadata(req.sampling, start + 1) for req,
                          start in zip(self.reqs, self.positions.tolist())]
        return self._rows

    def gained(self, token_ids: list[int], positions: np.ndarray, places: list[int] | None = None) -> NewTokens:
        """What the front is told of a step that computed ``positions`` [B] and chose ``token_ids`` [B]; of the requests
        at ``places`` alone, where given."""
        if self._told is None:
            self._told = _Told([], [], [], np.empty(0, np.int64)).with_those_of(self.reqs)
        rids, prompts, cached, before = self._told
        outputs = (positions - before).tolist()
        if places is None:
            return NewTokens(rids, token_ids, prompts, cached, outputs)
        return NewTokens([rids[place] for place in places], [token_ids[place] for place in places],
                         [prompts[place] for place in places], [cached[place] for place in places],
                         [outputs[place] for place in places])

    def watched(self, token_ids: Sequence[int], ending: Sequence[int]) -> list[int]:
        """Places, ascending, of requests of which more is to be said than that they gain ``token_ids`` [B] and go on: a
        step's, when its results are taken in. ``ending``: what ``ending`` said of the step."""
        places = {*self.gone, *ending}
        if not self.stop_ids.isdisjoint(token_ids):
            places.update(place for place, token_id in enumerate(token_ids) if token_id in self.stop_ids)
        if self._unreported:
            reqs = self.reqs
            self._unreported = [place for place in self._unreported if not reqs[place].reported or reqs[place].stages]
            places.update(self._unreported)
        return sorted(places)


    def _places_in(self, before: InputBatch | None) -> np.ndarray:
        """The places in ``before`` of the first of ``reqs`` as far as they stand in the same order there, with the same
        pages."""
        if before is None:
            return np.empty(0, np.int64)
        stays = before.left > 0
        stays[before.gone] = False
        places = np.flatnonzero(stays)
        wanted = places.tolist()
        if ([before.reqs[place] for place in wanted] == self.reqs[:len(wanted)]
                and [before._holds[place] for place in wanted] == self._holds[:len(wanted)]):
            return places  # as where requests joined, ended or were retracted
        return _kept(self.reqs, before)


class _Told(NamedTuple):
    """What a run's messages say of its requests; ``before``: outputs are positions less this."""

    rids: list[str]
    prompts: list[int]
    cached: list[int]
    before: np.ndarray

    def of(self, places: list[int]) -> _Told:
        return _Told([self.rids[place] for place in places], [self.prompts[place] for place in places],
                     [self.cached[place] for place in places], self.before[places])

    def with_those_of(self, reqs: Sequence[Req]) -> _Told:
        if not reqs:
            return self
        prompts = [req.num_prompt_tokens for req in reqs]
        return _Told(self.rids + [req.rid for req in reqs], self.prompts + prompts,
                     self.cached + [req.num_cached_tokens for req in reqs],
                     np.concatenate((self.before, np.array(prompts) - 2)))  # a token is chosen behind the computed one


def _held_by(req: Req) -> PageTable:
    assert req.hold is not None
    return req.hold


def _kept(reqs: list[Req], before: InputBatch | None) -> np.ndarray:
    """The places in ``before`` of the first of ``reqs`` as far as they stand in the same order there, with the same
    pages."""
    places: list[int] = []
    if before is None:
        return np.array(places, np.int64)
    following = iter(reqs)
    wanted = next(following, None)
    for place, (req, hold) in enumerate(zip(before.reqs, before._holds)):
        if req is wanted and req.hold is hold:
            places.append(place)
            wanted = next(following, None)
    return np.array(places, np.int64)


def _plain(req: Req) -> bool:
    """Whether the request's next token depends on logits and parameters alone, and is all that is told."""
    sampling = req.sampling
    return (req.logprobs is None and req.history is None and req.bias is None and req.processor is None
            and req.embeds is None and req.hidden is None and sampling.grammar is None
            and (not sampling.min_new_tokens or req.length - req.num_prompt_tokens >= sampling.min_new_tokens))
