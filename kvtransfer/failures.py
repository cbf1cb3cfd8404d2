"""Failures of transfers: their transition, their counters, and the error of a room that is in use."""

from __future__ import annotations

from typing import Protocol

from ..common.api.errors import Conflict, ServingError, TransferFailed
from .protocol.states import Event, Phase, Table, step


class Failing(Protocol):
    phase: Phase
    error: ServingError | None


def fail(transfer: Failing, table: Table, error: ServingError) -> bool:
    """Fails a transfer. Returns False where it changes nothing: the transfer failed before, or is DONE."""
    after = step(table, transfer.phase, Event.FAIL)
    if transfer.phase is after:
        return False
    # Readers take no lock: a thread that sees the phase must see the error.
    transfer.error, transfer.phase = error, after
    return True


def count_failure(counters: dict[str, float], error: ServingError) -> None:
    """Counts a failure by the error's code; one that neither client nor operator asked for also by its cause."""
    names = [f"kv_transfers_failed_{error.code}"]
    if isinstance(error, TransferFailed):
        names.append(f"kv_transfers_broken_{error.cause}")
    for name in names:
        counters[name] = counters.get(name, 0) + 1


def room_in_use(room: int) -> Conflict:
    return Conflict(f"bootstrap_room {room} is in use; every request needs a room of its own.")
