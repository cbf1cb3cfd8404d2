"""Pages that the scheduler has pushed and that are not on their way yet."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np

from ..protocol.messages import RankInfo
from ..protocol.reshard import parts_of
from ..protocol.states import Phase
from .sender_state import Destination, SendRoom, Write


class WriteQueue:
    """In the order of the pushes, which is also that in which their pages are computed.

    A room's ``queued`` and ``in_flight`` count its writes here, and those taken from here.
    """

    def __init__(self, info: RankInfo):
        """``info`` is the sender's."""
        self._info = info
        self._writes: deque[Write] = deque()
        self._in_flight = 0
        self._since = 0.0  # the time up to which writes under way were told of

    def __len__(self) -> int:
        return len(self._writes)

    def add(self, half: SendRoom, destination: Destination, group: int, first: int, src_page_ids: np.ndarray,
            ready: Any) -> None:
        """What of these pages the destination lacks and its lane carries; in parts, where pages differ in size."""
        way = destination.session.lane
        part = self._info.layout.page_size // way.src_parts
        start, wanted = first * way.src_parts, destination.first_page * way.dst_parts
        skip = max(0, wanted - start)
        src = parts_of(src_page_ids, way.src_parts)[skip:-(-half.num_prompt_tokens // part) - start]
        dst = parts_of(destination.page_ids, way.dst_parts)[start + skip - wanted:][:len(src)]
        assert len(dst) == len(src), "pages beyond the prompt's last"
        if len(src) and way.pieces_of(group):
            half.queued += 1
            self._writes.append(Write(half, destination, group, start + skip, src, dst, ready))

    def take(self, now: float, is_ready: Callable[[Any], bool]) -> list[Write]:
        """Remove and return what is to be posted right now; each must be reported with ``SenderCore.written``.

        Those of a session without a lease are passed over; those of rooms that have failed are dropped.
        """
        taken, kept = [], deque[Write]()
        while self._writes:
            write = self._writes[0]
            half = write.room
            if half.phase is Phase.WRITING:
                if write.session.lease <= now:
                    kept.append(self._writes.popleft())
                    continue
                if write.ready is not None and not is_ready(write.ready):
                    break  # later events are recorded later
            self._writes.popleft()
            half.queued -= 1
            if half.phase is Phase.WRITING:
                half.in_flight += 1
                taken.append(write)
        kept.extend(self._writes)
        self._writes = kept
        if taken and not self._in_flight:
            self._since = now
        self._in_flight += len(taken)
        return taken

    def ended(self, now: float) -> float:
        """One that was taken has ended. Returns for how many seconds, not told of before, any has been under way."""
        self._in_flight -= 1
        seconds, self._since = now - self._since, now
        return seconds
