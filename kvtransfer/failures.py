"""How failed transfers are counted."""

from __future__ import annotations

from ..common.api.errors import ServingError, TransferFailed


def count_failure(counters: dict[str, float], error: ServingError) -> None:
    """By the error's code, and those that are no one's wish also by what broke."""
    names = [f"kv_transfers_failed_{error.code}"]
    if isinstance(error, TransferFailed):
        names.append(f"kv_transfers_broken_{error.cause}")
    for name in names:
        counters[name] = counters.get(name, 0) + 1
