"""What a worker says of its KV memory."""

from __future__ import annotations

from typing import NamedTuple


class MemoryReport(NamedTuple):
    """Tokens of its KV pool, and the requests that it has, waiting ones too."""

    used_tokens: int
    total_tokens: int
    num_requests: int = 0
