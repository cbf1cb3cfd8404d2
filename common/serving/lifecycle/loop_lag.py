"""How late a front's event loop is."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable


async def note_lateness(observe: Callable[[float], None], period: float = 0.1) -> None:
    """Until it is cancelled, tells every ``period`` seconds how many seconds later than it wanted the loop came to it:
    the tokens of all streams wait as long. What the loop's timers are late by themselves is a millisecond."""
    due = time.monotonic() + period
    while True:
        await asyncio.sleep(max(0.0, due - time.monotonic()))
        now = time.monotonic()
        observe(max(0.0, now - due))
        due = now + period
