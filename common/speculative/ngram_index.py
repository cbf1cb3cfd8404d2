"""An index of what followed each n-gram, in all requests that a server has run or is running.

For some lengths of n-grams there is a hash table of buckets with a few ways each, in which a token leaves the place
where it stands, under the n-gram that ends there. The oldest place of a full bucket is overwritten, so that memory is
bounded. Hashes are compared, not tokens: a wrong draft costs nothing but its verification. Requests of other namespaces
have other hashes, and their tokens are never read.

All is done with arrays for all requests of a step at once. Nothing depends on time or chance: ranks that see the same
requests in the same order draft the same.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from ..api.namespace import Namespace
from ..request.req import Req
from ..request.token_buffer import TokenBuffer

WAYS = 8
"""Places of a bucket, the newest of one n-gram or of several."""
_PROMPT_TOKENS = 32
"""New tokens of a request that is indexed by itself, not with the others."""
_OFFSET_BITS = 24
"""Of a place's number: those below are the stream's."""
_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)


class Match(NamedTuple):
    """An n-gram of ``length`` tokens at a request's end, and what followed it elsewhere, newest first."""

    length: int
    continuations: list[list[int]]


class _Stream(NamedTuple):
    """A request's tokens, which grow while it runs."""

    tokens: TokenBuffer
    namespace: Namespace


class _Fed:
    """The number of a running request's stream, and its tokens that were seen."""

    __slots__ = ("count", "number", "seed")

    def __init__(self, number: int, seed: int):
        self.number = number
        self.seed = seed
        self.count = 0


class NgramIndex:
    """N-grams of ``min_window`` to ``max_window`` tokens. ``capacity``: the most places in the index."""

    def __init__(self, min_window: int, max_window: int, capacity: int):
        self.windows = _windows(min_window, max_window)
        self._max_window = max_window
        buckets = 1 << max(0, (capacity // (len(self.windows) * WAYS)).bit_length() - 1)
        self._mask = np.uint64(buckets - 1)
        self._first_bucket = (np.arange(len(self.windows), dtype=np.int64) * buckets)[:, None, None]
        self._places = np.zeros((len(self.windows) * buckets, WAYS), np.int64)  # 0: none
        self._tags = np.zeros((len(self.windows) * buckets, WAYS), np.uint32)
        self._next_way = np.zeros(len(self.windows) * buckets, np.uint8)
        self._max_tokens = buckets * WAYS  # of requests that have ended
        self._streams: dict[int, _Stream] = {}
        self._fed: dict[Req, _Fed] = {}
        self._ended: deque[int] = deque()
        self._num_ended_tokens = 0
        self._next_number = 1
        self._powers = np.array([pow(int(_MULTIPLIER), power, 1 << 64) for power in range(max_window)], np.uint64)

    def __len__(self) -> int:
        """Tokens of requests that have ended and are still read."""
        return self._num_ended_tokens

    def match(self, reqs: Sequence[Req], limits: Sequence[int]) -> list[Match | None]:
        """Adds the tokens of ``reqs`` that are new, and returns what followed their last ones before: up to
        ``limits[i]`` tokens."""
        if not reqs:
            return []
        feds = [self._fed.get(req) or self._begin(req) for req in reqs]
        counts = [req.tokens.count for req in reqs]
        new = max(1, *(min(_PROMPT_TOKENS, count - fed.count) for fed, count in zip(feds, counts)))
        for req, fed, count in zip(reqs, feds, counts):
            if count - fed.count > new:
                self._add_prompt(req, fed, count - new)
        width = self._max_window + new
        tails = np.full((len(reqs), width), -1, np.int64)
        for row, (req, count) in enumerate(zip(reqs, counts)):
            tail = req.tokens.view(max(0, count - width), count)
            tails[row, width - len(tail):] = tail
        seeds = np.array([fed.seed for fed in feds], np.uint64)
        hashes = self._hashes(tails, new + 1, seeds)  # [windows, n, new + 1]: of those that end before, and there
        ends = np.array(counts, np.int64)[:, None] - 1
        positions = ends + np.arange(-new, 1)
        fed_counts = np.array([fed.count for fed in feds], np.int64)[:, None]
        is_new = (positions >= fed_counts - 1) & (positions < ends) & (positions >= 0)
        numbers = np.array([fed.number for fed in feds], np.int64)[:, None]
        self._insert(hashes, (numbers << _OFFSET_BITS) + positions, is_new, positions)
        for fed, count in zip(feds, counts):
            fed.count = count
        return self._look_up(hashes[:, :, -1], ends[:, 0], reqs, limits)

    def end(self, reqs: Sequence[Req]) -> None:
        """Takes note that requests have ended: their tokens are kept until more have ended than there is room for."""
        for req in reqs:
            fed = self._fed.pop(req, None)
            if fed is not None:
                self._ended.append(fed.number)
                self._num_ended_tokens += req.tokens.count
        while self._num_ended_tokens > self._max_tokens:
            self._num_ended_tokens -= self._streams.pop(self._ended.popleft()).tokens.count

    def _begin(self, req: Req) -> _Fed:
        fed = self._fed[req] = _Fed(self._next_number, req.namespace.seed or 0)
        self._streams[fed.number] = _Stream(req.tokens, req.namespace)
        self._next_number += 1
        return fed

    def _add_prompt(self, req: Req, fed: _Fed, count: int) -> None:
        """Adds a request's tokens up to ``count``, so many that they are indexed by themselves."""
        start = max(0, fed.count - self._max_window)
        tokens = req.tokens.view(start, count).astype(np.int64)
        padded = np.concatenate((np.full(self._max_window, -1, np.int64), tokens))[None]
        hashes = self._hashes(padded, len(tokens), np.array([fed.seed], np.uint64))
        positions = np.arange(start, count)[None]
        is_new = (positions >= fed.count - 1) & (positions < count - 1)
        self._insert(hashes, (fed.number << _OFFSET_BITS) + positions, is_new, positions)
        fed.count = count

    def _hashes(self, tails: np.ndarray, ends: int, seeds: np.ndarray) -> np.ndarray:
        """Returns hashes [windows, n, ends] uint64 of the n-grams that end at the last ``ends`` tokens of ``tails``
        [n, width]."""
        width = tails.shape[1]
        tokens = (tails + 2).astype(np.uint64)
        found = np.empty((len(self.windows), len(tails), ends), np.uint64)
        total = np.zeros((len(tails), ends), np.uint64)
        column = 0
        for back in range(self.windows[-1]):
            total += tokens[:, width - ends - back:width - back] * self._powers[back]
            if back + 1 == self.windows[column]:
                found[column] = total
                column += 1
        found ^= seeds[:, None]
        found ^= found >> np.uint64(31)
        found *= _MULTIPLIER
        found ^= found >> np.uint64(29)
        return found

    def _insert(self, hashes: np.ndarray, places: np.ndarray, is_new: np.ndarray, positions: np.ndarray) -> None:
        """Adds ``places`` [n, ends] where they are new, under ``hashes`` [windows, n, ends]."""
        whole = is_new & (positions >= np.array(self.windows)[:, None, None] - 1)
        buckets = self._buckets(hashes)[whole]
        ways = self._next_way[buckets]
        self._places[buckets, ways] = np.broadcast_to(places, whole.shape)[whole]
        self._tags[buckets, ways] = (hashes[whole] >> np.uint64(32)).astype(np.uint32)
        self._next_way[buckets] = (ways + 1) % WAYS

    def _buckets(self, hashes: np.ndarray) -> np.ndarray:
        return (hashes & self._mask).astype(np.int64) + self._first_bucket[:, :, :hashes.ndim - 2 or None].reshape(
            (-1,) + (1,) * (hashes.ndim - 1))

    def _look_up(self, hashes: np.ndarray, ends: np.ndarray, reqs: Sequence[Req],
                 limits: Sequence[int]) -> list[Match | None]:
        """Returns the matches of the requests whose last n-grams have ``hashes`` [windows, n]."""
        buckets = self._buckets(hashes)  # [windows, n]
        tags = (hashes >> np.uint64(32)).astype(np.uint32)
        whole = ends >= np.array(self.windows)[:, None] - 1
        found = (self._tags[buckets] == tags[:, :, None]) & (self._places[buckets] > 0) & whole[:, :, None]
        some = found.any(2)
        longest = len(self.windows) - 1 - np.argmax(some[::-1], 0)
        rows = np.flatnonzero(some.any(0))
        chosen = buckets[longest[rows], rows]
        ways = (self._next_way[chosen][:, None].astype(np.int64) - 1 - np.arange(WAYS)) % WAYS
        places = np.take_along_axis(np.where(found[longest[rows], rows], self._places[chosen], 0), ways, 1)
        matches: list[Match | None] = [None] * len(reqs)
        for row, at, window in zip(rows.tolist(), places.tolist(), longest[rows].tolist()):
            continuations = self._continuations(at, reqs[row].namespace, limits[row])
            if continuations:
                matches[row] = Match(self.windows[window], continuations)
        return matches

    def _continuations(self, places: list[int], namespace: Namespace, limit: int) -> list[list[int]]:
        found = []
        for place in places:
            stream = self._streams.get(place >> _OFFSET_BITS) if place else None
            if stream is not None and stream.namespace == namespace:
                start = (place & ((1 << _OFFSET_BITS) - 1)) + 1
                tokens: list[int] = stream.tokens.view(start, start + limit).tolist()
                if tokens:
                    found.append(tokens)
        return found


def _windows(least: int, most: int) -> list[int]:
    """Returns the lengths of n-grams that are indexed: about 1.5 times the one before."""
    windows = [least]
    while windows[-1] < most:
        windows.append(min(most, max(windows[-1] + 1, windows[-1] * 3 // 2)))
    return windows
