"""An event loop whose clock jumps to the next timer: hours pass in no time, and always the same."""

from __future__ import annotations

import asyncio
import selectors


class _Jumping(selectors.SelectSelector):
    """Waits for no file: where the loop would wait for a timer, time passes."""

    def __init__(self):
        super().__init__()
        self.now = 0.0

    def select(self, timeout=None):
        found = super().select(0)
        if not found:
            assert timeout is not None, "nothing is left that could happen"
            self.now += timeout
        return found


class VirtualLoop(asyncio.SelectorEventLoop):
    def __init__(self):
        self._jumping = _Jumping()
        super().__init__(self._jumping)

    def time(self):
        return self._jumping.now


def run(main):
    """``main(clock)`` is a coroutine function; returns what it returns."""
    loop = VirtualLoop()
    try:
        return loop.run_until_complete(main(loop.time))
    finally:
        loop.close()
