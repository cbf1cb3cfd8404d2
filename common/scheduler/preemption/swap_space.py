"""Swapping: retracted requests' keys and values go to host memory or are recomputed, whichever costs less."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from ...request.req import Req, SwappedOut

if TYPE_CHECKING:
    from ...kvcache.tiers.base import KVTier
    from .copy_rates import PrefillRate


class SwapSpace:
    """Swaps out to a tier what is cheaper to copy out and in again than to recompute. The tier is its own, and never
    has to make room: a request's pages stay there until it returns.

    ``min_reduce`` takes the minimum of each number over the ranks of the group: they measure differently, and have to
    decide alike.
    """

    def __init__(self, tier: KVTier, page_size: int, link_bandwidth: float, prefill_rate: PrefillRate,
                 min_reduce: Callable[[np.ndarray], np.ndarray], *, shared: bool):
        """``link_bandwidth`` in bytes a second. ``shared``: not only this device writes into free pages (transfers do),
        so that a page may be freed only after it was copied."""
        self.tier = tier
        self.prefill_rate = prefill_rate
        self.num_swapped_out = 0
        self._page_size = page_size
        self._link_bandwidth = link_bandwidth
        self._min_reduce = min_reduce
        self._shared = shared

    def swap_out(self, req: Req) -> SwappedOut | None:
        """Copy the pages of ``req``'s computed tokens to the tier, where that is cheaper and fits. No step may be in
        flight."""
        assert req.page_table is not None
        count = -(-req.num_computed_tokens // self._page_size)
        if not count or count > self.tier.capacity - self.tier.num_pages:
            return None
        if not self._is_cheaper(count, req.num_computed_tokens):
            return None
        keys = [f"{req.rid} {page}".encode() for page in range(count)]  # by name, as its last page is not full
        task = self.tier.store(keys, req.page_table.ids[:count])
        assert task.num_pages == count
        if self._shared:
            task.wait()
        self.num_swapped_out += 1
        return SwappedOut(keys, req.num_computed_tokens)

    def swap_in(self, req: Req) -> None:
        """Copy back the pages that ``req``'s new page table did not find in the prefix cache."""
        swapped_out, table = req.swapped_out, req.page_table
        assert swapped_out is not None and table is not None
        first = table.num_cached_pages
        self.tier.load(swapped_out.keys[first:], table.ids[first:len(swapped_out.keys)])
        req.num_computed_tokens = max(req.num_computed_tokens, swapped_out.num_tokens)
        self.discard(req)

    def discard(self, req: Req) -> None:
        """Drop the swapped-out pages of ``req``, if it has any."""
        if req.swapped_out is not None:
            self.tier.free(req.swapped_out.keys)
            req.swapped_out = None

    def _is_cheaper(self, num_pages: int, num_tokens: int) -> bool:
        """True without a measured prefill rate (decode servers compute no prompts): a recomputed prompt would delay all
        other requests."""
        bandwidth, prefill = self._min_reduce(
            np.array([self._link_bandwidth, self.prefill_rate.tokens_per_second], np.int64)).tolist()
        return not prefill or 2 * num_pages * self.tier.page_bytes * prefill < num_tokens * bandwidth
