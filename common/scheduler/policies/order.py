"""Two ways to keep waiting requests in an order, neither of which looks at all of them in a step."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

from ...request.req import Req

WINDOW = 128
PER_LOOK = 8


class Order(Protocol):
    """Waiting requests, each once."""

    def __len__(self) -> int: ...

    def add(self, req: Req) -> None: ...

    def first(self) -> Req:
        """The next one; there is one."""

    def discard(self, req: Req) -> None:
        """Take out a request that is in it."""


class KeyOrder:
    """By a number that is drawn as a request is added, smaller first; equal ones in the order of their coming.

    Every operation takes the logarithm of their count: what was taken out stays in the heap until it comes up, or until
    half of the heap is gone.
    """

    def __init__(self, key: Callable[[Req], float]):
        self._key = key
        self._heap: list[tuple[float, int, Req]] = []
        self._place: dict[Req, int] = {}
        self._count = 0

    def __len__(self) -> int:
        return len(self._place)

    def add(self, req: Req) -> None:
        self._count += 1
        self._place[req] = self._count
        heapq.heappush(self._heap, (self._key(req), self._count, req))

    def first(self) -> Req:
        while not self._stands(self._heap[0]):
            heapq.heappop(self._heap)
        return self._heap[0][2]

    def discard(self, req: Req) -> None:
        del self._place[req]
        if len(self._heap) > 2 * len(self._place) + 16:
            self._heap = [entry for entry in self._heap if self._stands(entry)]
            heapq.heapify(self._heap)

    def _stands(self, entry: tuple[float, int, Req]) -> bool:
        return self._place.get(entry[2]) == entry[1]


class ArrangedOrder:
    """As a function arranges them, which sees no more than the ``WINDOW`` that came first.

    What was arranged holds until it is used up, or until there was something new (a request, or ``version()``) and
    ``first`` was asked so often that on average it looks at ``PER_LOOK`` requests: with that many or fewer waiting, the
    order is always the newest.
    """

    def __init__(self, arrange: Callable[[Sequence[Req]], list[Req]], version: Callable[[], int]):
        self._arrange = arrange
        self._version = version
        self._waiting: dict[Req, None] = {}
        self._plan: deque[Req] = deque()
        self._planned_at = (-1, -1)
        self._looks_left = 0
        self._count = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, req: Req) -> None:
        self._count += 1
        self._waiting[req] = None

    def first(self) -> Req:
        self._looks_left -= 1
        while self._plan and self._plan[0] not in self._waiting:
            self._plan.popleft()
        if not self._plan or (self._looks_left <= 0 and self._planned_at != (self._version(), self._count)):
            self._replan()
        return self._plan[0]

    def discard(self, req: Req) -> None:
        del self._waiting[req]

    def _replan(self) -> None:
        window = [req for req, _ in zip(self._waiting, range(WINDOW))]
        self._plan = deque(self._arrange(window))
        self._planned_at = (self._version(), self._count)
        self._looks_left = -(-len(window) // PER_LOOK)
