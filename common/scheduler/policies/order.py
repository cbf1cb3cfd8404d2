"""Two orders of waiting requests, neither of which looks at all of them in a step."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple, Protocol

from ...kvcache.prefix_cache import PrefixCache
from ...request.req import Req
from ..prefill_pace import PrefillPace

SORT_WINDOW_REQUESTS = 128
SORTED_PER_PEEK = 8


class Order(Protocol):
    """Waiting requests, each once."""

    def __len__(self) -> int: ...

    def add(self, req: Req) -> None: ...

    def first(self) -> Req:
        """The next request; the order must not be empty."""

    def discard(self, req: Req) -> None:
        """Remove a request that is in the order."""


class OrderInputs(NamedTuple):
    """Inputs of a policy: the prefix cache, None where there is none, a seed that the ranks of a group share, and the
    pace at which prompts are computed, with the clock that they share; the TTFT in seconds that requests want which do
    not say so."""

    cache: PrefixCache | None
    seed: int
    pace: PrefillPace = PrefillPace()
    page_size: int = 1
    default_slo_ttft: float = 10.0

    def cached_tokens(self, req: Req) -> int:
        """Tokens of the request's prompt that the prefix cache has now."""
        if self.cache is None:
            return 0
        return len(self.cache.match(req.tokens.view(0, req.prefix_limit), req.namespace)[1]) * self.page_size


OrderFactory = Callable[[OrderInputs], Callable[[], Order]]
"""A registered policy: returns a factory of empty orders."""


class KeyOrder:
    """Ascending by a key that is computed as a request is added; equal ones in order of arrival.

    Every operation takes the logarithm of their count: a removed request stays in the heap until it is the first, or
    until half of the heap is stale.
    """

    def __init__(self, key: Callable[[Req], float]):
        self._key = key
        self._heap: list[tuple[float, int, Req]] = []
        self._sequence_of: dict[Req, int] = {}
        self._count = 0

    def __len__(self) -> int:
        return len(self._sequence_of)

    def add(self, req: Req) -> None:
        self._count += 1
        self._sequence_of[req] = self._count
        heapq.heappush(self._heap, (self._key(req), self._count, req))

    def first(self) -> Req:
        while not self._is_current(self._heap[0]):
            heapq.heappop(self._heap)
        return self._heap[0][2]

    def discard(self, req: Req) -> None:
        del self._sequence_of[req]
        if len(self._heap) > 2 * len(self._sequence_of) + 16:
            self._heap = [entry for entry in self._heap if self._is_current(entry)]
            heapq.heapify(self._heap)

    def _is_current(self, entry: tuple[float, int, Req]) -> bool:
        return self._sequence_of.get(entry[2]) == entry[1]


class SortedOrder:
    """Sorted by a function, which sees no more than the ``SORT_WINDOW_REQUESTS`` oldest requests.

    The sorted list is reused until it is used up, or until something changed (a new request, or ``version()``) and
    ``first`` was called often enough that a call sorts ``SORTED_PER_PEEK`` requests on average: with that many or
    fewer waiting, the order is always up to date.
    """

    def __init__(self, sort: Callable[[Sequence[Req]], list[Req]], version: Callable[[], int]):
        self._sort = sort
        self._version = version
        self._waiting: dict[Req, None] = {}
        self._sorted: deque[Req] = deque()
        self._sorted_at = (-1, -1)
        self._peeks_left = 0
        self._count = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, req: Req) -> None:
        self._count += 1
        self._waiting[req] = None

    def first(self) -> Req:
        self._peeks_left -= 1
        while self._sorted and self._sorted[0] not in self._waiting:
            self._sorted.popleft()
        if not self._sorted or (self._peeks_left <= 0 and self._sorted_at != (self._version(), self._count)):
            self._resort()
        return self._sorted[0]

    def discard(self, req: Req) -> None:
        del self._waiting[req]

    def _resort(self) -> None:
        window = [req for req, _ in zip(self._waiting, range(SORT_WINDOW_REQUESTS))]
        self._sorted = deque(self._sort(window))
        self._sorted_at = (self._version(), self._count)
        self._peeks_left = -(-len(window) // SORTED_PER_PEEK)


def sorted_by_cache(sort: Callable[[PrefixCache], Callable[[Sequence[Req]], list[Req]]],
                    inputs: OrderInputs) -> Callable[[], Order]:
    """Returns a factory of orders sorted by the contents of the prefix cache; in order of arrival without one."""
    cache = inputs.cache
    if cache is None:
        return partial(KeyOrder, lambda req: 0.0)
    return partial(SortedOrder, sort(cache), lambda: cache.version)
