"""An index of what followed each n-gram, in all requests that a server has run or is running.

For some lengths of n-grams there is a hash table, whose buckets have the newest places of the n-grams that end there: a
new place pushes the oldest one out, so that memory is bounded. Hashes are compared, not tokens: a wrong draft costs
nothing but its verification. Tokens of requests in another namespace are never read.

All is done with arrays, for all requests of a step at once. Nothing depends on time or chance: ranks that see the same
requests in the same order draft the same.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np

from ..api.namespace import Namespace
from ..request.req import Req
from ..request.token_buffer import TokenBuffer

WAYS = 8
"""Places of a bucket: a cache line."""
_MAX_NEW_TOKENS = 16
"""A request with more new tokens, those of a prompt, is indexed by itself."""
_FEW_TOKENS = 4
_PROMPT_TOKENS = 2048
"""Tokens of prompts that are indexed at once, in about a millisecond: the others wait for the next steps."""
_OFFSET_BITS = _STREAM_BITS = 22
"""Bits of a place: where in a stream, which one, and those of the hash above."""
_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)


class Match(NamedTuple):
    """An n-gram of ``length`` tokens at a request's end, and what followed it elsewhere, newest first."""

    length: int
    continuations: list[list[int]]


class Text(Protocol):
    """Tokens that are indexed: a request, or a document."""

    @property
    def tokens(self) -> TokenBuffer: ...

    @property
    def namespace(self) -> Namespace: ...


class _Stream(NamedTuple):
    """A request's tokens, which grow while it runs."""

    tokens: TokenBuffer
    namespace: Namespace


class _Running:
    """The number of a running request's stream, and its tokens that were indexed."""

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
        self._first_bucket = np.arange(len(self.windows)) * buckets
        self._table = np.zeros((len(self.windows) * buckets, WAYS), np.uint64)  # 0: none
        self._max_tokens = buckets * WAYS  # of requests that have ended
        self._streams: dict[int, _Stream] = {}
        self._running: dict[Text, _Running] = {}
        self._ended: deque[int] = deque()
        self._num_ended_tokens = 0
        self._next_number = 1
        self._powers = np.array([pow(int(_MULTIPLIER), power, 1 << 64) for power in range(max_window)], np.uint64)

    def __len__(self) -> int:
        """Tokens of requests that have ended and are still read."""
        return self._num_ended_tokens

    def match(self, reqs: Sequence[Req], limits: Sequence[int], most: int) -> list[Match | None]:
        """Indexes the tokens of ``reqs`` that are new, and returns what followed their last ones before: ``most``
        continuations of up to ``limits[i]`` tokens each, or the first that is whole where ``most`` is 1."""
        if not reqs:
            return []
        running = [self._running.get(req) or self._begin(req) for req in reqs]
        counts = [req.tokens.count for req in reqs]
        self._add_prompts(reqs, running, counts, _MAX_NEW_TOKENS)
        new = max(1, *(count - of.count for of, count in zip(running, counts) if count - of.count <= _MAX_NEW_TOKENS),
                  1)
        tails = _tails(reqs, counts, self._max_window + new)
        hashes = self._hashes(tails, new + 1, [of.seed for of in running])
        ends = np.array(counts, np.int64) - 1
        self._insert(hashes[:, :, :-1], ends - new, running, counts)
        return self._look_up(hashes[:, :, -1], ends, [req.namespace for req in reqs], limits, most)

    def add(self, text: Text) -> None:
        """Indexes all tokens of a text, which stay until ``end``."""
        of, count = self._running.get(text) or self._begin(text), text.tokens.count
        while of.count < count:
            self._add_prompts([text], [of], [count], 0)

    def find(self, reqs: Sequence[Req], namespace: Namespace, limits: Sequence[int],
             most: int) -> list[Match | None]:
        """Returns what followed the last tokens of ``reqs`` in the texts of a namespace; see ``match``. Adds nothing.
        """
        if not reqs:
            return []
        counts = [req.tokens.count for req in reqs]
        hashes = self._hashes(_tails(reqs, counts, self._max_window), 1, [namespace.seed or 0] * len(reqs))
        return self._look_up(hashes[:, :, -1], np.array(counts, np.int64) - 1, [namespace] * len(reqs), limits, most)

    def end(self, reqs: Sequence[Req]) -> None:
        """Takes note that requests have ended: their tokens are kept until more have ended than there is room for."""
        for req in reqs:
            of = self._running.pop(req, None)
            if of is not None:
                self._ended.append(of.number)
                self._num_ended_tokens += req.tokens.count
        while self._num_ended_tokens > self._max_tokens:
            self._num_ended_tokens -= self._streams.pop(self._ended.popleft()).tokens.count

    def _begin(self, req: Text) -> _Running:
        while self._next_number in self._streams or not self._next_number:
            self._next_number = (self._next_number + 1) % (1 << _STREAM_BITS)
        of = self._running[req] = _Running(self._next_number, req.namespace.seed or 0)
        self._streams[of.number] = _Stream(req.tokens, req.namespace)
        return of

    def _add_prompts(self, reqs: Sequence[Text], running: Sequence[_Running], counts: Sequence[int],
                     few: int) -> None:
        """Indexes tokens of requests that have more than a ``few`` new ones, as many as are allowed at once."""
        left = _PROMPT_TOKENS
        for req, of, count in zip(reqs, running, counts):
            missing = min(left, count - of.count)
            if count - of.count <= few or not missing:
                continue
            start, stop = max(0, of.count - self._max_window), of.count + missing
            tokens = req.tokens.view(start, stop)
            padded = np.concatenate((np.full(self._max_window, -1, np.int64), tokens))[None]
            hashes = self._hashes(padded, len(tokens), [of.seed])
            self._insert(hashes[:, :, :-1], np.array([start]), [of], [stop])
            left -= missing

    def _hashes(self, tails: np.ndarray, ends: int, seeds: list[int]) -> np.ndarray:
        """Returns hashes [windows, n, ends] uint64 of the n-grams that end at the last ``ends`` tokens of ``tails``
        [n, width]."""
        width = tails.shape[1]
        tokens = (tails + 2).astype(np.uint64)
        found = np.empty((len(self.windows), len(tails), ends), np.uint64)
        total = np.zeros((len(tails), ends), np.uint64)
        column = 0
        for back in range(self._max_window):
            total += tokens[:, width - ends - back:width - back] * self._powers[back]
            if back + 1 == self.windows[column]:
                found[column] = total
                column += 1
        found ^= np.array(seeds, np.uint64)[:, None]
        found ^= found >> np.uint64(31)
        found *= _MULTIPLIER
        found ^= found >> np.uint64(29)
        return found

    def _insert(self, hashes: np.ndarray, firsts: np.ndarray, running: Sequence[_Running],
                counts: Sequence[int]) -> None:
        """Adds the places of tokens that are not indexed yet, of those from ``firsts`` [n] on, whose n-grams have
        ``hashes`` [windows, n, m]. The last of ``counts`` [n] tokens waits for the next one."""
        positions = firsts[:, None] + np.arange(hashes.shape[2])
        done = np.array([of.count for of in running])[:, None] - 1
        caught_up = np.array([count - of.count <= _MAX_NEW_TOKENS or len(running) == 1
                              for of, count in zip(running, counts)])[:, None]
        is_new = (positions >= np.maximum(done, 0)) & caught_up
        places = (np.array([of.number for of in running])[:, None] << _OFFSET_BITS) + positions
        whole = is_new & (positions >= np.array(self.windows)[:, None, None] - 1)
        window, row, column = np.nonzero(whole)
        chosen = hashes[window, row, column]
        buckets = (chosen & self._mask).astype(np.int64) + self._first_bucket[window]
        entries = (chosen >> np.uint64(_TAG_SHIFT) << np.uint64(_TAG_SHIFT)) | places[row, column].astype(np.uint64)
        # Of a few new tokens two in one bucket are rare, and the first of them is then left out.
        parts = _last_ways(buckets) if hashes.shape[2] > _FEW_TOKENS else [np.arange(len(buckets))]
        for part in parts:
            before = self._table[buckets[part]]
            before[:, 1:] = before[:, :-1]
            before[:, 0] = entries[part]
            self._table[buckets[part]] = before
        for of, count, done_now in zip(running, counts, caught_up[:, 0].tolist()):
            if done_now:
                of.count = count

    def _look_up(self, hashes: np.ndarray, ends: np.ndarray, namespaces: Sequence[Namespace], limits: Sequence[int],
                 most: int) -> list[Match | None]:
        """Returns the matches in ``namespaces`` of the requests whose last n-grams, which end at ``ends`` [n], have
        ``hashes`` [windows, n]."""
        rows = self._table[(hashes & self._mask).astype(np.int64) + self._first_bucket[:, None]]
        found = ((rows ^ hashes[:, :, None]) >> np.uint64(_TAG_SHIFT) == 0) & (rows != 0)
        some = found.any(2) & (ends >= np.array(self.windows)[:, None] - 1)
        matches: list[Match | None] = [None] * len(namespaces)
        chosen = np.flatnonzero(some.any(0))
        longest = len(self.windows) - 1 - np.argmax(some[::-1, chosen], 0)
        places = np.where(found[longest, chosen], rows[longest, chosen] & np.uint64((1 << _TAG_SHIFT) - 1), 0)
        for row, of_row, window in zip(chosen.tolist(), places.tolist(), longest.tolist()):
            continuations = self._continuations(of_row, namespaces[row], limits[row], most)
            if continuations:
                matches[row] = Match(self.windows[window], continuations)
        return matches

    def _continuations(self, places: list[int], namespace: Namespace, limit: int, most: int) -> list[list[int]]:
        found: list[list[int]] = []
        for place in places:
            stream = self._streams.get(place >> _OFFSET_BITS) if place else None
            if stream is None or stream.namespace != namespace:
                continue
            start = (place & ((1 << _OFFSET_BITS) - 1)) + 1
            tokens: list[int] = stream.tokens.view(start, start + limit).tolist()
            if most == 1 and len(tokens) < limit:  # a later one may be longer
                found = [tokens] if tokens and (not found or len(tokens) > len(found[0])) else found
                continue
            if tokens:
                found = [*found, tokens] if most > 1 else [tokens]
            if len(found) == most:
                break
        return found


_TAG_SHIFT = _OFFSET_BITS + _STREAM_BITS


def _tails(reqs: Sequence[Req], counts: Sequence[int], width: int) -> np.ndarray:
    """Returns the last tokens [n, width] int64 of requests that have ``counts`` of them, -1 before the first."""
    tails = np.full((len(reqs), width), -1, np.int64)
    for row, (req, count) in enumerate(zip(reqs, counts)):
        tail = req.tokens.view(max(0, count - width), count)
        tails[row, width - len(tail):] = tail
    return tails


def _last_ways(buckets: np.ndarray) -> list[np.ndarray]:
    """Returns indices of ``buckets`` [n] in parts that name no bucket twice: the last WAYS of each, in order."""
    order = np.argsort(buckets, kind="stable")
    ends = np.append(np.flatnonzero(np.diff(buckets[order])) + 1, len(order)) if len(order) else order
    later = np.repeat(ends, np.diff(ends, prepend=0)) - 1 - np.arange(len(order))
    return [order[later == rank] for rank in range(min(WAYS, int(later.max(initial=-1)) + 1) - 1, -1, -1)]


def _windows(least: int, most: int) -> list[int]:
    """Returns the lengths of n-grams that are indexed: each about twice the one before."""
    windows = [least]
    while windows[-1] < most:
        windows.append(min(most, windows[-1] * 2))
    return windows
