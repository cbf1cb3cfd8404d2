"""Requests in preparation: they will be sent to the engine once their grammar is compiled, unless aborted before."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from ..api.messages import Generate


@dataclass(eq=False)
class _Group:
    requests: Sequence[Generate]
    aborted: asyncio.Future[None]


class PendingRequests:
    """Registry of requests in preparation, which an abort has to reach."""

    def __init__(self) -> None:
        self._groups: list[_Group] = []

    @contextmanager
    def track(self, requests: Sequence[Generate]) -> Iterator[asyncio.Future[None]]:
        """Register the requests of one HTTP request for the block; the future is done once all of them were aborted."""
        group = _Group(requests, asyncio.get_running_loop().create_future())
        self._groups.append(group)
        try:
            yield group.aborted
        finally:
            self._groups.remove(group)

    def ids(self) -> list[str]:
        return [request.rid for group in self._groups for request in group.requests]

    def abort(self, rid: str) -> None:
        """Mark the request, or all for an empty id, as aborted: it ends when it would be sent."""
        for group in self._groups:
            for request in group.requests:
                request.aborted = request.aborted or rid in ("", request.rid)
            if all(request.aborted for request in group.requests) and not group.aborted.done():
                group.aborted.set_result(None)
