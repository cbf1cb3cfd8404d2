"""Requests that wait in the router while the weights of its workers are replaced."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import Protocol

from ..workers.registry import Registry

TAKES_BACK = frozenset(("retract", "in_place"))
"""The modes of updates that begin prompts anew which prefill workers still compute."""


class Held(Protocol):
    """A relay that can wait before an attempt."""

    def start(self) -> None: ...


class Running(Protocol):
    """A relay whose attempt may run."""

    def take_back(self) -> None:
        """Gives up an attempt whose prompt a prefill worker still computes, and begins it anew after the wait."""


class RequestHold:
    """Lets relays wait as long as ``registry.hold`` is set. ``running`` gives the requests of this process that run."""

    def __init__(self, registry: Registry, running: Callable[[], Iterable[Running]]):
        self._registry = registry
        self._running = running
        self._waiting: dict[Held, None] = {}
        self._mode = ""
        self._wake: asyncio.Handle | None = None
        registry.listeners.append(self._changed)

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, relay: Held) -> None:
        """Lets a relay wait; its ``start`` is called at the end of the update."""
        self._waiting[relay] = None

    def leave(self, relay: Held) -> None:
        """Forgets a relay that is over; harmless where it does not wait."""
        self._waiting.pop(relay, None)

    def _changed(self) -> None:
        if self._registry.hold != self._mode and self._wake is None:
            self._wake = asyncio.get_running_loop().call_soon(self._follow)

    def _follow(self) -> None:
        self._wake = None
        before, self._mode = self._mode, self._registry.hold
        if self._mode in TAKES_BACK and self._mode != before:
            for running in list(self._running()):
                running.take_back()
        if not self._mode:
            waiting, self._waiting = self._waiting, {}
            for relay in waiting:
                relay.start()
