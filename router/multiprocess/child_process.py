"""A child as its parent sees it: a process, a link, and the last that it reported."""

from __future__ import annotations

import asyncio
import os
import random
import socket
import sys
from asyncio.subprocess import Process
from collections.abc import Callable, Sequence
from typing import Any

from ...common.api.link import Link
from .messages import Listening, Start, StartupFailed, ToParent, UpdatesApplied

_CODE = "import sys; sys.path[:] = {path!r}; from {package}.child import main; main()"
_SEED = str(random.SystemRandom().randrange(1, 2**32))


class ChildProcess:
    """A process that is started once. ``received(child, message)`` gets what it sends, from ``begin`` to its end."""

    def __init__(self, index: int, received: Callable[[ChildProcess, Any], None]):
        self.index = index
        self.listening = False
        self.refusal = ""
        self.counted = 0
        """Number of the last request for counters that it answered."""
        self.applied_version = -1
        """Version of the last update that it has applied."""
        self.ready = asyncio.Event()
        """Set once it listens, or has ended."""
        self._received = received
        self._link: Link | None = None
        self._process: Process | None = None

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    async def start(self, inherited: Sequence[int], begin: Callable[[], Start]) -> None:
        """Starts the process with the descriptors and sends it its first message; raises OSError.

        ``begin`` is called once messages reach the process: it gets each update from then on.
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
        self._link = await Link.over(ours, ToParent, self._on_message, lambda: None)
        self._link.send(begin())

    def send(self, message: Any) -> None:
        if self._link is not None:
            self._link.send(message)

    def kill(self) -> None:
        if self._process is not None and self._process.returncode is None:
            self._process.kill()

    async def ended(self) -> int:
        """Waits for the end of the process and of its messages; returns its exit status."""
        assert self._process is not None and self._link is not None
        status = await self._process.wait()
        await self._link.ended()
        self.listening = False
        self.ready.set()
        return status

    def _on_message(self, message: Any) -> None:
        if isinstance(message, Listening):
            self.listening = True
            self.ready.set()
        elif isinstance(message, StartupFailed):
            self.refusal = message.sentence
        elif isinstance(message, UpdatesApplied):
            self.applied_version = message.version
        else:
            self._received(self, message)


def _environment() -> dict[str, str]:
    """The child's environment. Hashes of prompts must be equal in all children, and unknown to clients."""
    seed = os.environ.get("PYTHONHASHSEED", "random")
    return {**os.environ, "PYTHONHASHSEED": _SEED if seed == "random" else seed}
