"""Swapping: retracted requests' keys and values go to host memory or are recomputed, whichever costs less."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from ...request.req import Req, SwappedOut

if TYPE_CHECKING:
    from ...kvcache.manager import KVCacheManager
    from ...kvcache.tiers.base import KVTier
    from .copy_rates import AgreedRates


class SwapSpace:
    """Swaps out to tiers, one for each cache group, what is cheaper to copy out and in again than to recompute. The
    tiers are its own, and never have to make room: a request's pages stay there until it returns.
    """

    def __init__(self, tiers: Sequence[KVTier], cache: KVCacheManager, rates: AgreedRates, *, shared: bool):
        """``shared``: not only this device writes into free pages (transfers do), so that a page may be freed only
        after it was copied."""
        self.tiers = tiers
        self.num_swapped_out = 0
        self._cache = cache
        self._rates = rates
        self._shared = shared

    @property
    def num_pages(self) -> int:
        """Pages in the tiers."""
        return sum(tier.num_pages for tier in self.tiers)

    def swap_out(self, req: Req) -> SwappedOut | None:
        """Copy the pages of ``req``'s computed tokens to the tiers, of further groups those that later tokens read,
        where that is cheaper and fits. No step may be in flight."""
        spans = self._spans(req)
        if not len(spans[0][1]) or any(len(ids) > tier.capacity - tier.num_pages
                                       for tier, (_, ids) in zip(self.tiers, spans)):
            return None
        if not self._is_cheaper(sum(tier.page_bytes * len(ids) for tier, (_, ids) in zip(self.tiers, spans)),
                                req.num_computed_tokens):
            return None
        pages = []
        for tier, (first, ids) in zip(self.tiers, spans):
            keys = [f"{req.rid} {first + i}".encode() for i in range(len(ids))]  # by name: the last page is not full
            task = tier.store(keys, ids)
            assert task.num_pages == len(keys)
            if self._shared:
                task.wait()
            else:
                task.wait_on_device()
            pages.append((first, keys))
        self.num_swapped_out += 1
        assert req.page_table is not None
        return SwappedOut(pages, req.num_computed_tokens, req.page_table.draft_gap)

    def _spans(self, req: Req) -> list[tuple[int, np.ndarray]]:
        """By cache group the first page and the page ids of ``req``'s computed tokens."""
        table, num_tokens = req.page_table, req.num_computed_tokens
        assert table is not None
        count = self._cache.pages_for(num_tokens)
        spans = [(0, table.ids[:count])]
        for group, own in zip(self._cache.groups, table.groups):
            first = group.first_page(num_tokens)
            spans.append((first, own.span(first, count)))
        return spans

    def swap_in(self, req: Req) -> None:
        """Copy back the pages that ``req``'s new page table did not find in the prefix cache."""
        swapped_out, table = req.swapped_out, req.page_table
        assert swapped_out is not None and table is not None
        if swapped_out.num_tokens > req.num_computed_tokens:
            req.num_computed_tokens = swapped_out.num_tokens
            gaps = [gap for gap in (swapped_out.draft_gap, table.draft_gap) if gap is not None]
            table.draft_gap = min(gaps, default=None)
            found = [table.num_cached_pages, *(own.cached_end for own in table.groups)]
            for tier, (first, keys), cached, (_, ids) in zip(self.tiers, swapped_out.pages, found, self._spans(req)):
                missing = max(0, cached - first)
                task = tier.load(keys[missing:], ids[missing:])
                task.wait_on_device()
                tier.finish(task)
        self.discard(req)

    def discard(self, req: Req) -> None:
        """Drop the swapped-out pages of ``req``, if it has any."""
        if req.swapped_out is not None:
            for tier, (_, keys) in zip(self.tiers, req.swapped_out.pages):
                tier.free(keys)
            req.swapped_out = None

    def _is_cheaper(self, num_bytes: int, num_tokens: int) -> bool:
        """True without a measured prefill rate (decode servers compute no prompts): a recomputed prompt would delay all
        other requests."""
        return self._rates.copy_is_cheaper(2 * num_bytes, num_tokens)
