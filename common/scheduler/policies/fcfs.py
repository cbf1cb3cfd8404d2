"""First come, first served."""

from __future__ import annotations

from ...request.req import Req


def key(req: Req) -> float:
    """The same key for all: an order leaves equal requests in order of arrival."""
    return 0.0
