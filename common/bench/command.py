"""The end of a bench command: exit codes, error sentences, and Ctrl-C, which ends the run but not its report."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Callable, Coroutine
from typing import Any

from ..api.errors import ConfigError, ServingError
from ..config.command import INTERRUPTED


def reported(name: str, run: Callable[[], int]) -> int:
    """The exit code of ``run``; 2, with a sentence, for an error that the user can mend."""
    try:
        return run()
    except (ConfigError, ServingError) as error:
        print(f"{name}: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"{name}: interrupted", file=sys.stderr)
        return INTERRUPTED


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
