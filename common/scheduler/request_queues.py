"""Queues of one rank's requests."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ..request.req import Req
from .new_token_ratio import remaining_output
from .waiting_queue import WaitingQueue


class RequestQueues:
    """prefetching (a storage is asked for their pages) -> waiting -> prefilling (pages for all its tokens allocated,
    computed chunk by chunk) -> running (decode). On a decode server, ``transferring`` requests have pages that another
    server is filling. Those of ``loading`` requests are filled by a KV tier, before they are computed or transferred. A
    request is in one queue.

    The caller that moves an admitted request reports the change of its ``remaining_output`` by ``add_remaining``.
    """

    def __init__(self, waiting: WaitingQueue):
        self.waiting = waiting
        self.prefetching: dict[Req, None] = {}
        self.loading: list[Req] = []
        self.prefilling: list[Req] = []
        self.running: list[Req] = []
        self.transferring: list[Req] = []
        self.running_version = 0
        """It changes with the members of ``running``, which only these methods change."""
        self._remaining: int | None = None  # once counted

    def __repr__(self) -> str:
        return (f"RequestQueues(prefetching {len(self.prefetching)}, waiting {len(self.waiting)}, "
                f"loading {len(self.loading)}, "
                f"prefilling {len(self.prefilling)}, running {len(self.running)}, "
                f"transferring {len(self.transferring)})")

    def __iter__(self) -> Iterator[Req]:
        yield from self.prefetching
        yield from self.waiting
        yield from self.admitted()

    def admitted(self) -> Iterator[Req]:
        """All requests that have pages."""
        yield from self.loading
        yield from self.prefilling
        yield from self.running
        yield from self.transferring

    def start_running(self, req: Req) -> None:
        """Append to ``running``."""
        self.running.append(req)
        self.running_version += 1

    @property
    def num_admitted(self) -> int:
        return len(self.loading) + len(self.prefilling) + len(self.running) + len(self.transferring)

    @property
    def remaining(self) -> int:
        """Output tokens that admitted requests may still generate: the sum of their ``remaining_output``."""
        if self._remaining is None:
            self._remaining = sum(map(remaining_output, self.admitted()))
        return self._remaining

    def add_remaining(self, tokens: int) -> None:
        """Adjust ``remaining`` by a difference."""
        if self._remaining is not None:
            self._remaining += tokens

    def invalidate_remaining(self) -> None:
        """Count ``remaining`` anew when it is next read."""
        self._remaining = None

    def remove(self, reqs: Sequence[Req]) -> None:
        """Remove requests from their queues; those in no queue are ignored."""
        leaving = set(reqs)
        for req in reqs if self.prefetching else ():
            if req in self.prefetching:
                del self.prefetching[req]
                leaving.discard(req)
        for req in reqs if len(self.waiting) else ():
            if req in self.waiting:
                self.waiting.remove(req)
                leaving.discard(req)
        for queue in (self.loading, self.prefilling, self.running, self.transferring):
            if not leaving:
                return
            members = [req for req in leaving if req in queue] if len(leaving) == 1 else leaving.intersection(queue)
            if members and queue is self.running:
                self.running_version += 1
            if len(members) == 1:
                queue.remove(*members)
            elif members:
                queue[:] = [req for req in queue if req not in members]
            self.add_remaining(-sum(map(remaining_output, members)))
            leaving.difference_update(members)
