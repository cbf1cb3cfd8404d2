"""Ctrl-C ends a run, not its report."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Coroutine
from typing import Any

EXIT_CODE = 130  # a shell's, of a command that Ctrl-C ended


async def until_interrupted(work: Coroutine[Any, Any, None]) -> bool:
    """Await ``work``; True where Ctrl-C cancelled it. A second Ctrl-C ends the command."""
    loop, task = asyncio.get_running_loop(), asyncio.ensure_future(work)

    def interrupt() -> None:
        loop.remove_signal_handler(signal.SIGINT)
        task.cancel()

    loop.add_signal_handler(signal.SIGINT, interrupt)
    try:
        await task
    except asyncio.CancelledError:
        return True
    finally:
        loop.remove_signal_handler(signal.SIGINT)
    return False
