"""A child as its parent sees it: a process, a link, and what it has said so far."""

from __future__ import annotations

import asyncio
import os
import random
import socket
import sys
from asyncio.subprocess import Process
from collections.abc import Callable, Sequence
from typing import Any

from .link import Link
from .messages import Begin, Knows, Listens, Refuses, ToParent

_CODE = "import sys; sys.path[:] = {path!r}; from {package}.child import main; main()"
_SEED = str(random.SystemRandom().randrange(1, 2**32))


class ChildProcess:
    """Started once. ``received(child, message)`` gets what it says, from ``begin`` to its end."""

    def __init__(self, index: int, received: Callable[[ChildProcess, Any], None]):
        self.index = index
        self.listens = False
        self.refusal = ""
        self.counted = 0
        """The number of the last question for counts that it answered."""
        self.knows = -1
        """The version of the news that it has taken in."""
        self.ready = asyncio.Event()
        """It listens, or has ended."""
        self._received = received
        self._link: Link | None = None
        self._process: Process | None = None

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    async def start(self, inherited: Sequence[int], begin: Callable[[], Begin]) -> None:
        """Start the process, give it the descriptors, and tell it who it is; raises OSError.

        ``begin`` is called once the process can be told things: what is news from then on, it gets.
        """
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                self._process = await asyncio.create_subprocess_exec(
                    sys.executable, "-c", _CODE.format(path=sys.path, package=__package__), str(theirs.fileno()),
                    str(os.getpid()), env=_environment(), stdin=asyncio.subprocess.DEVNULL,
                    pass_fds=(theirs.fileno(), *inherited))
        except OSError:
            ours.close()
            raise
        self._link = await Link.over(ours, ToParent, self._take, lambda: None)
        self._link.tell(begin())

    def tell(self, message: Any) -> None:
        if self._link is not None:
            self._link.tell(message)

    def kill(self) -> None:
        if self._process is not None and self._process.returncode is None:
            self._process.kill()

    async def ended(self) -> int:
        """Wait for the end of the process and of what it said; returns its exit status."""
        assert self._process is not None and self._link is not None
        status = await self._process.wait()
        await self._link.ended()
        self.listens = False
        self.ready.set()
        return status

    def _take(self, message: Any) -> None:
        if isinstance(message, Listens):
            self.listens = True
            self.ready.set()
        elif isinstance(message, Refuses):
            self.refusal = message.sentence
        elif isinstance(message, Knows):
            self.knows = message.version
        else:
            self._received(self, message)


def _environment() -> dict[str, str]:
    """Hashes of prompts must come out alike in all children, and not be known to clients."""
    seed = os.environ.get("PYTHONHASHSEED", "random")
    return {**os.environ, "PYTHONHASHSEED": _SEED if seed == "random" else seed}
