"""Decides when the pages that a step computes are pushed to decode: during the following layers, or the next chunk."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ..common.config.server.disaggregation import TransferOverlap
from ..common.forward.forward_batch import AfterGroup
from ..common.kvcache.manager import KVCacheManager
from ..common.request.req import Req
from ..common.request.step_input import Chunk
from ..kvtransfer.sender.kv_sender import KVSender

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class _Span:
    """Prompt pages ``first`` onwards in one cache group."""

    first: int
    page_ids: np.ndarray


@dataclass(frozen=True)
class _Pages:
    """Pages of one request to push; ``spans`` has those of each cache group, None for a group without any."""

    room: int
    spans: list[_Span | None]


class KVPush:
    """Pushes pages to ``sender``, layer group by layer group. ``event`` marks the work that was launched so far.
    ``layer_groups`` has the number of layer groups of each cache group; the ``draft_groups`` of the draft's pool, whose
    pages are the first cache group's, are numbered after them, and computed after the model's. In further cache groups
    only the pages are pushed that tokens after the prompt read; these the request keeps while it has any pages.

    ``overlap`` is ``--kv-transfer-overlap``: with ``layers`` a group is pushed as soon as its last layer is computed,
    with ``chunk`` all groups after the step, and with ``prompt`` all pages after the prompt's last chunk.
    """

    def __init__(self, sender: KVSender, cache: KVCacheManager, layer_groups: Sequence[int], overlap: TransferOverlap,
                 event: Callable[[], torch.cuda.Event | None], draft_groups: int = 0):
        self._sender = sender
        self._cache = cache
        self._cache_groups = [index for index, count in enumerate(layer_groups) for _ in range(count)]
        self._cache_groups += [0] * draft_groups
        self._overlap = overlap
        self._event = event

    def push_retained(self, req: Req) -> None:
        """Pushes a whole prompt that an earlier attempt has computed."""
        self._push(self._pages(req, 0, self._cache.pages_for(req.num_prompt_tokens)), self._all_groups, self._event())

    def push_cached(self, chunks: Sequence[Chunk]) -> None:
        """Pushes the pages of this server's prefix cache before the forward pass of a request's first chunk.

        The step in flight may be computing them: they are sent when it has run.
        """
        if self._overlap == "prompt":
            return
        for chunk in chunks:
            page_table = chunk.req.page_table
            assert page_table is not None
            cached = page_table.num_cached_pages
            if cached and chunk.start == cached * self._cache.page_size:
                self._push(self._pages(chunk.req, 0, cached), self._all_groups, self._event())

    def callback_for(self, chunks: Sequence[Chunk]) -> AfterGroup:
        """Returns a callback that pushes the pages of ``chunks``, which the executor calls after each layer group."""
        to_push = list(self._pages_of(chunks))
        computed: set[int] = set()

        def push(group: int, ready: torch.cuda.Event | None) -> None:
            computed.add(group)
            if self._overlap == "layers":
                groups: Sequence[int] = (group,)
            else:
                groups = self._all_groups if len(computed) == len(self._cache_groups) else ()
            for pages in to_push:
                self._push(pages, groups, ready)

        return push

    @property
    def _all_groups(self) -> range:
        return range(len(self._cache_groups))

    def _pages_of(self, chunks: Sequence[Chunk]) -> Iterator[_Pages]:
        for chunk in chunks:
            first, end = self._span(chunk)
            if end > first:
                yield self._pages(chunk.req, first, end)

    def _pages(self, req: Req, first: int, end: int) -> _Pages:
        """Returns the prompt's pages ``first`` to ``end``."""
        assert req.page_table is not None
        spans: list[_Span | None] = [_Span(first, req.page_table.ids[first:end].copy())]
        for group, own in zip(self._cache.groups, req.page_table.groups):
            begin = max(first, group.first_page(req.num_prompt_tokens))
            spans.append(_Span(begin, own.span(begin, end).copy()) if begin < end else None)
        return _Pages(_room(req), spans)

    def _span(self, chunk: Chunk) -> tuple[int, int]:
        """Returns the range of the prompt's pages that are pushed with a chunk, first and end."""
        page_size = self._cache.page_size
        # A page that this chunk fills in part is pushed with the chunk that completes it, or with the prompt's last.
        end = self._cache.pages_for(chunk.stop) if chunk.samples else chunk.stop // page_size
        if self._overlap == "prompt":
            return 0, end if chunk.samples else 0
        return chunk.start // page_size, end

    def _push(self, pages: _Pages, groups: Sequence[int], ready: torch.cuda.Event | None) -> None:
        for group in groups:
            if (span := pages.spans[self._cache_groups[group]]) is not None:
                self._sender.push(pages.room, group, span.first, span.page_ids, ready)


def _room(req: Req) -> int:
    assert req.bootstrap is not None
    return req.bootstrap.room
