"""What a worker says of its KV memory and tiers."""

from __future__ import annotations

from typing import NamedTuple


class MemoryReport(NamedTuple):
    """Tokens of its KV pool, and the requests that it has, waiting ones too. The time to load a page from host memory
    and from storage, as a share of that to compute it; None where it does not say."""

    used_tokens: int
    total_tokens: int
    num_requests: int = 0
    host_page_cost: float | None = None
    storage_page_cost: float | None = None
