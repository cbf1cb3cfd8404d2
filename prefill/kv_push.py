"""When the pages that a step computes leave for decode: beside the layers that follow, the next chunk, or nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ..common.config.server.disaggregation import TransferOverlap
from ..common.kvcache.manager import KVCacheManager
from ..common.request.batch import Chunk, ScheduledBatch
from ..common.request.req import Req
from ..kvtransfer.sender.kv_sender import KVSender

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class _Leaving:
    """Pages of one request: prompt pages ``first`` onwards."""

    room: int
    first: int
    page_ids: np.ndarray


class KVPush:
    """Pushes pages to ``sender``, layer group by layer group. ``event`` marks what was launched so far.

    ``overlap`` is ``--kv-transfer-overlap``: ``layers`` lets a group leave as soon as its last layer is computed,
    ``chunk`` all groups when the step is, and ``prompt`` all pages when the prompt's last chunk is.
    """

    def __init__(self, sender: KVSender, cache: KVCacheManager, num_groups: int, overlap: TransferOverlap,
                 event: Callable[[], torch.cuda.Event | None]):
        self._sender = sender
        self._cache = cache
        self._num_groups = num_groups
        self._overlap = overlap
        self._event = event

    def computed_before(self, room: int, page_ids: np.ndarray) -> None:
        """A whole prompt of an earlier attempt."""
        self._push(_Leaving(room, 0, page_ids), range(self._num_groups), self._event())

    def cached(self, batch: ScheduledBatch) -> None:
        """Pages that this server's prefix cache holds leave before the forward pass of a request's first chunk.

        The step in flight may be computing them: they leave when it has run.
        """
        if self._overlap == "prompt":
            return
        for chunk in batch.chunks:
            hold = chunk.req.page_table
            assert hold is not None
            cached = hold.num_cached_pages
            if cached and chunk.start == cached * self._cache.page_size:
                self._push(_Leaving(_room(chunk.req), 0, hold.ids[:cached].copy()), range(self._num_groups),
                           self._event())

    def of(self, batch: ScheduledBatch) -> Callable[[int, torch.cuda.Event | None], None]:
        """A callback for the forward pass, told of each layer group that is computed."""
        leaving = list(self._leaving(batch))

        def push(group: int, ready: torch.cuda.Event | None) -> None:
            if self._overlap == "layers":
                groups = range(group, group + 1)
            else:
                groups = range(self._num_groups if group == self._num_groups - 1 else 0)
            for pages in leaving:
                self._push(pages, groups, ready)

        return push

    def _leaving(self, batch: ScheduledBatch) -> Iterator[_Leaving]:
        for chunk in batch.chunks:
            assert chunk.req.page_table is not None
            first, end = self._span(chunk)
            if end > first:
                yield _Leaving(_room(chunk.req), first, chunk.req.page_table.ids[first:end].copy())

    def _span(self, chunk: Chunk) -> tuple[int, int]:
        """The prompt's pages that leave with a chunk, from the first to the one behind the last."""
        page_size = self._cache.page_size
        # A page that this chunk leaves partly filled waits for the chunk that fills it, or for the prompt's end.
        end = self._cache.pages_for(chunk.stop) if chunk.samples else chunk.stop // page_size
        if self._overlap == "prompt":
            return 0, end if chunk.samples else 0
        return chunk.start // page_size, end

    def _push(self, pages: _Leaving, groups: range, ready: torch.cuda.Event | None) -> None:
        for group in groups:
            self._sender.push(pages.room, group, pages.first, pages.page_ids, ready)


def _room(req: Req) -> int:
    assert req.bootstrap is not None
    return req.bootstrap.room
