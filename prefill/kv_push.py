"""Decides when the pages that a step computes are pushed to decode: during the following layers, or the next chunk."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ..common.config.server.disaggregation import TransferOverlap
from ..common.kvcache.manager import KVCacheManager
from ..common.request.req import Req
from ..common.request.step_input import Chunk, StepInput
from ..kvtransfer.sender.kv_sender import KVSender

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class _Pages:
    """Pages of one request to push: prompt pages ``first`` onwards."""

    room: int
    first: int
    page_ids: np.ndarray


class KVPush:
    """Pushes pages to ``sender``, layer group by layer group. ``event`` marks the work that was launched so far.

    ``overlap`` is ``--kv-transfer-overlap``: with ``layers`` a group is pushed as soon as its last layer is computed,
    with ``chunk`` all groups after the step, and with ``prompt`` all pages after the prompt's last chunk.
    """

    def __init__(self, sender: KVSender, cache: KVCacheManager, num_groups: int, overlap: TransferOverlap,
                 event: Callable[[], torch.cuda.Event | None]):
        self._sender = sender
        self._cache = cache
        self._num_groups = num_groups
        self._overlap = overlap
        self._event = event

    def push_retained(self, room: int, page_ids: np.ndarray) -> None:
        """Pushes a whole prompt that an earlier attempt has computed."""
        self._push(_Pages(room, 0, page_ids), range(self._num_groups), self._event())

    def push_cached(self, batch: StepInput) -> None:
        """Pushes the pages of this server's prefix cache before the forward pass of a request's first chunk.

        The step in flight may be computing them: they are sent when it has run.
        """
        if self._overlap == "prompt":
            return
        for chunk in batch.chunks:
            page_table = chunk.req.page_table
            assert page_table is not None
            cached = page_table.num_cached_pages
            if cached and chunk.start == cached * self._cache.page_size:
                self._push(_Pages(_room(chunk.req), 0, page_table.ids[:cached].copy()), range(self._num_groups),
                           self._event())

    def callback_for(self, batch: StepInput) -> Callable[[int, torch.cuda.Event | None], None]:
        """Returns a callback that pushes pages, which the forward pass calls after each layer group."""
        to_push = list(self._pages_of(batch))

        def push(group: int, ready: torch.cuda.Event | None) -> None:
            if self._overlap == "layers":
                groups = range(group, group + 1)
            else:
                groups = range(self._num_groups if group == self._num_groups - 1 else 0)
            for pages in to_push:
                self._push(pages, groups, ready)

        return push

    def _pages_of(self, batch: StepInput) -> Iterator[_Pages]:
        for chunk in batch.chunks:
            assert chunk.req.page_table is not None
            first, end = self._span(chunk)
            if end > first:
                yield _Pages(_room(chunk.req), first, chunk.req.page_table.ids[first:end].copy())

    def _span(self, chunk: Chunk) -> tuple[int, int]:
        """Returns the range of the prompt's pages that are pushed with a chunk, first and end."""
        page_size = self._cache.page_size
        # A page that this chunk fills in part is pushed with the chunk that completes it, or with the prompt's last.
        end = self._cache.pages_for(chunk.stop) if chunk.samples else chunk.stop // page_size
        if self._overlap == "prompt":
            return 0, end if chunk.samples else 0
        return chunk.start // page_size, end

    def _push(self, pages: _Pages, groups: range, ready: torch.cuda.Event | None) -> None:
        for group in groups:
            self._sender.push(pages.room, group, pages.first, pages.page_ids, ready)


def _room(req: Req) -> int:
    assert req.bootstrap is not None
    return req.bootstrap.room
