"""Flags of KV tiers for tests."""

from __future__ import annotations

from typing import Any


def in_host(gigabytes: float, tier: str = "host", **flags: Any) -> dict[str, Any]:
    """Fields of TierArgs that keep pages in that much host memory."""
    return {"enable_hierarchical_cache": True, "hicache_size": gigabytes, "kv_tier": tier} | flags
