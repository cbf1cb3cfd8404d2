"""Queues pages that the scheduler has pushed and that are not posted to the backend yet."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np

from ..protocol.messages import RankInfo
from ..protocol.reshard import first_read_subpage, split_pages
from ..protocol.states import Phase
from .sender_state import Destination, SendTransfer, Write


class WriteQueue:
    """Writes in the order of their pushes, which is also the order in which their pages are computed.

    A transfer's ``queued`` counts its writes here, its ``in_flight`` those that were taken and have not ended.
    """

    def __init__(self, info: RankInfo):
        self._info = info  # the sender's
        self._writes: deque[Write] = deque()
        self._in_flight = 0
        self._counted_until = 0.0  # the time in flight was reported up to here

    def __len__(self) -> int:
        return len(self._writes)

    def add(self, transfer: SendTransfer, destination: Destination, group: int, first: int, src_page_ids: np.ndarray,
            ready: Any) -> None:
        """Queues those of the pages that the destination lacks, is to read and its plan covers, as sub-pages where page
        sizes differ.

        ``src_page_ids [n]`` are the prompt's pages from ``first`` on.
        """
        plan = destination.session.plan
        cache_group = self._info.cache_group_of(group)
        first_page, page_ids = destination.pages[cache_group]
        subpage_tokens = self._info.layout.page_size // plan.src_subpages
        num_subpages = -(-transfer.num_prompt_tokens // subpage_tokens)
        start, first_missing = first * plan.src_subpages, first_page * plan.dst_subpages
        first_read = first_read_subpage(self._info.layouts[cache_group], transfer.num_prompt_tokens, subpage_tokens)
        skip = max(0, max(first_missing, first_read) - start)
        src = split_pages(src_page_ids, plan.src_subpages)[skip:num_subpages - start]
        dst = split_pages(page_ids, plan.dst_subpages)[start + skip - first_missing:][:len(src)]
        assert len(dst) == len(src), "pages beyond the prompt's last"
        if len(src) and plan.ranges_of(group):
            transfer.queued += 1
            self._writes.append(Write(transfer, destination, group, start + skip, src, dst, ready))

    def take(self, now: float, is_ready: Callable[[Any], bool]) -> list[Write]:
        """Removes and returns the writes to post now; each must be reported with ``SenderCore.written``.

        Writes of a session without a lease stay in the queue; those of transfers that have failed are dropped.
        """
        taken, waiting = [], deque[Write]()
        while self._writes:
            write = self._writes[0]
            transfer = write.transfer
            if transfer.phase is Phase.WRITING:
                if write.session.lease <= now:
                    waiting.append(self._writes.popleft())
                    continue
                if write.ready is not None and not is_ready(write.ready):
                    break  # later events are recorded later
            self._writes.popleft()
            transfer.queued -= 1
            if transfer.phase is Phase.WRITING:
                transfer.in_flight += 1
                taken.append(write)
        waiting.extend(self._writes)
        self._writes = waiting
        if taken and not self._in_flight:
            self._counted_until = now
        self._in_flight += len(taken)
        return taken

    def end_write(self, now: float) -> float:
        """Records the end of a write that was taken. Returns the seconds since the last call, or since the first of the
        writes in flight was taken: added up, the time in which any write was in flight."""
        self._in_flight -= 1
        seconds, self._counted_until = now - self._counted_until, now
        return seconds
