"""First come, first served."""

from __future__ import annotations

from ...request.req import Req


def key(req: Req) -> float:
    """Equal for all: an order keeps equal ones as they came."""
    return 0.0
