"""How a half fails, how that is counted, and a failure that both halves tell."""

from __future__ import annotations

from typing import Protocol

from ..common.api.errors import Conflict, ServingError, TransferFailed
from .protocol.states import Event, Phase, Table, step


class Failing(Protocol):
    phase: Phase
    error: ServingError | None


def fail(half: Failing, table: Table, error: ServingError) -> bool:
    """Returns whether it is news: a half fails once, and not when it is DONE."""
    after = step(table, half.phase, Event.FAIL)
    if half.phase is after:
        return False
    # Readers take no lock: whoever sees the phase must find the error.
    half.error, half.phase = error, after
    return True


def count_failure(counters: dict[str, float], error: ServingError) -> None:
    """By the error's code, and those that are no one's wish also by what broke."""
    names = [f"kv_transfers_failed_{error.code}"]
    if isinstance(error, TransferFailed):
        names.append(f"kv_transfers_broken_{error.cause}")
    for name in names:
        counters[name] = counters.get(name, 0) + 1


def room_in_use(room: int) -> Conflict:
    return Conflict(f"bootstrap_room {room} is in use; every request needs a room of its own.")
