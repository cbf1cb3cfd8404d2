"""Swapping: retracted requests' keys and values go to host memory or are recomputed, whichever costs less."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from ...request.req import Req, SwappedOut

if TYPE_CHECKING:
    from .copy_rates import PrefillRate
    from .host_kv_cache import HostKVCache


class SwapSpace:
    """Swaps out what is cheaper to copy out and in again than to recompute.

    ``min_reduce`` takes the minimum of each number over the ranks of the group: they measure differently, and have to
    decide alike.
    """

    def __init__(self, host: HostKVCache, page_size: int, link_bandwidth: float, prefill_rate: PrefillRate,
                 min_reduce: Callable[[np.ndarray], np.ndarray], *, shared: bool):
        """``link_bandwidth`` in bytes a second. ``shared``: not only this device writes into free pages (transfers do),
        so that a page may be freed only after it was copied."""
        self.host = host
        self.prefill_rate = prefill_rate
        self.num_swapped_out = 0
        self._page_size = page_size
        self._link_bandwidth = link_bandwidth
        self._min_reduce = min_reduce
        self._shared = shared

    def swap_out(self, req: Req) -> SwappedOut | None:
        """Copy the pages of ``req``'s computed tokens to the host, where that is cheaper and fits. No step may be in
        flight."""
        assert req.page_table is not None
        count = -(-req.num_computed_tokens // self._page_size)
        if not count or count > self.host.num_pages - self.host.num_allocated:
            return None
        if not self._is_cheaper(count, req.num_computed_tokens):
            return None
        slots = self.host.copy_out(req.page_table.ids[:count])
        assert slots is not None
        if self._shared:
            self.host.synchronize()
        self.num_swapped_out += 1
        return SwappedOut(slots, req.num_computed_tokens)

    def swap_in(self, req: Req) -> None:
        """Copy back the pages that ``req``'s new page table did not find in the prefix cache."""
        swapped_out, table = req.swapped_out, req.page_table
        assert swapped_out is not None and table is not None
        first = table.num_cached_pages
        self.host.copy_in(swapped_out.slots[first:], table.ids[first:len(swapped_out.slots)])
        req.num_computed_tokens = max(req.num_computed_tokens, swapped_out.num_tokens)
        self.discard(req)

    def discard(self, req: Req) -> None:
        """Free the host slots of ``req``, if it has any."""
        if req.swapped_out is not None:
            self.host.free(req.swapped_out.slots)
            req.swapped_out = None

    def _is_cheaper(self, num_pages: int, num_tokens: int) -> bool:
        """True without a measured prefill rate (decode servers compute no prompts): a recomputed prompt would delay all
        other requests."""
        bandwidth, prefill = self._min_reduce(
            np.array([self._link_bandwidth, self.prefill_rate.tokens_per_second], np.int64)).tolist()
        return not prefill or 2 * num_pages * self.host.page_bytes * prefill < num_tokens * bandwidth
