"""TCP ports for tests.

A port that the kernel gave to ``bind(0)`` and that was let go again is one that the kernel may give to anybody's next
outgoing connection: with a few thousand connections a minute a server that starts on it finds it taken. So ports are
counted out from below the kernel's own range, by all test processes of the machine together.
"""

from __future__ import annotations

import fcntl
import os
import socket
import tempfile
from pathlib import Path

_FIRST, _LAST = 10_000, 29_000
_COUNTER = Path(tempfile.gettempdir()) / f"baton-test-ports-{os.getuid()}"


def free_ports(count: int) -> list[int]:
    """``count`` neighbouring ports that nobody uses and that no other test is given for a long while."""
    with _COUNTER.open("a+") as counter:
        fcntl.flock(counter, fcntl.LOCK_EX)
        counter.seek(0)
        first = int(counter.read() or _FIRST)
        for _ in range(_FIRST, _LAST):
            if first + count > _LAST:
                first = _FIRST
            if all(_unused(port) for port in range(first, first + count)):
                break
            first += 1
        else:
            raise RuntimeError(f"no {count} free ports between {_FIRST} and {_LAST}")
        counter.truncate(0)
        counter.write(str(first + count))
    return list(range(first, first + count))


def free_port() -> int:
    return free_ports(1)[0]


def _unused(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True
