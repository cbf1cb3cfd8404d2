"""Where the requests of one rank stand."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ..request.req import Req
from .new_token_ratio import left_of
from .waiting_queue import WaitingQueue


class RequestQueues:
    """waiting -> prefilling (pages for all its tokens allocated, computed chunk by chunk) -> running (decode). Of
    a decode server ``arriving`` ones have pages, which another server is filling. A request stands in one of them.

    Who moves one that has pages tells by ``count_left`` how its ``left_of`` has changed.
    """

    def __init__(self, waiting: WaitingQueue):
        self.waiting = waiting
        self.prefilling: list[Req] = []
        self.running: list[Req] = []
        self.arriving: list[Req] = []
        self._left: int | None = None  # once counted

    def __repr__(self) -> str:
        return (f"Places(waiting {len(self.waiting)}, prefilling {len(self.prefilling)}, "
                f"running {len(self.running)}, arriving {len(self.arriving)})")

    def __iter__(self) -> Iterator[Req]:
        yield from self.waiting
        yield from self.with_pages()

    def with_pages(self) -> Iterator[Req]:
        """All that have left the queue."""
        yield from self.prefilling
        yield from self.running
        yield from self.arriving

    @property
    def num_with_pages(self) -> int:
        return len(self.prefilling) + len(self.running) + len(self.arriving)

    @property
    def left(self) -> int:
        """Output tokens that those with pages have before them: the sum of their ``left_of``."""
        if self._left is None:
            self._left = sum(map(left_of, self.with_pages()))
        return self._left

    def count_left(self, tokens: int) -> None:
        """``left`` is more by so many."""
        if self._left is not None:
            self._left += tokens

    def recount(self) -> None:
        """Nobody has told how much ``left`` is now."""
        self._left = None

    def take_out(self, reqs: Sequence[Req]) -> None:
        """Wherever they stand; they may stand nowhere."""
        leaving = set(reqs)
        for req in reqs if len(self.waiting) else ():
            if req in self.waiting:
                self.waiting.remove(req)
                leaving.discard(req)
        for place in (self.prefilling, self.running, self.arriving):
            if not leaving:
                return
            found = [req for req in leaving if req in place] if len(leaving) == 1 else leaving.intersection(place)
            if len(found) == 1:
                place.remove(*found)
            elif found:
                place[:] = [req for req in place if req not in found]
            self.count_left(-sum(map(left_of, found)))
            leaving.difference_update(found)
