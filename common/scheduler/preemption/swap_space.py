"""Retracted requests' keys and values: kept in host memory, or computed again, whichever costs less."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from ...request.req import Req
from ...request.swapped_out import SwappedOut

if TYPE_CHECKING:
    from .copy_rates import PrefillRate
    from .host_kv_cache import HostKVCache


class SwapSpace:
    """Saves what is cheaper to copy out and in again than to compute again.

    ``agree`` takes the least of each number over the ranks of the group: they measure differently, and have to
    decide alike.
    """

    def __init__(self, host: HostKVCache, page_size: int, link_rate: float, prefill_rate: PrefillRate,
                 agree: Callable[[np.ndarray], np.ndarray], *, shared: bool):
        """``link_rate`` in bytes a second. ``shared``: others than this device write into free pages (transfers do), so
        that a page may be freed only when it has been copied."""
        self.host = host
        self.prefill_rate = prefill_rate
        self.num_saved = 0
        self._page_size = page_size
        self._link_rate = link_rate
        self._agree = agree
        self._shared = shared

    def save(self, req: Req) -> SwappedOut | None:
        """Copy the pages of what ``req`` has computed, where that pays and fits. No step is in flight."""
        assert req.hold is not None
        count = -(-req.num_computed_tokens // self._page_size)
        if not count or count > self.host.num_pages - self.host.num_held:
            return None
        if not self._pays(count, req.num_computed_tokens):
            return None
        slots = self.host.save(req.hold.ids[:count])
        assert slots is not None
        if self._shared:
            self.host.wait()
        self.num_saved += 1
        return SwappedOut(slots, req.num_computed_tokens)

    def restore(self, req: Req) -> None:
        """Copy back what ``req``'s new hold has not found in the prefix cache."""
        saved, hold = req.saved, req.hold
        assert saved is not None and hold is not None
        first = hold.num_cached_pages
        self.host.restore(saved.slots[first:], hold.ids[first:len(saved.slots)])
        req.num_computed_tokens = max(req.num_computed_tokens, saved.num_tokens)
        self.drop(req)

    def drop(self, req: Req) -> None:
        if req.saved is not None:
            self.host.free(req.saved.slots)
            req.saved = None

    def _pays(self, num_pages: int, num_tokens: int) -> bool:
        """Without a measured prefill rate (decode servers compute no prompts) it does: what is computed again keeps
        all others waiting."""
        link, prefill = self._agree(np.array([self._link_rate, self.prefill_rate.tokens_per_second], np.int64)).tolist()
        return not prefill or 2 * num_pages * self.host.page_bytes * prefill < num_tokens * link
