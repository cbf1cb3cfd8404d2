"""The lag of the API server's event loop."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable


async def observe_loop_lag(observe: Callable[[float], None], period: float = 0.1) -> None:
    """Calls ``observe`` every ``period`` seconds with the seconds by which the event loop ran it late, until cancelled.

    The tokens of all streams wait as long. The loop's timers alone add up to a millisecond.
    """
    due = time.monotonic() + period
    while True:
        await asyncio.sleep(max(0.0, due - time.monotonic()))
        now = time.monotonic()
        observe(max(0.0, now - due))
        due = now + period
