"""Page servers of a cluster, by the addresses at which other ranks read a rank's host memory (kvtransfer/pages/)."""

from __future__ import annotations

import threading
from collections.abc import Iterable


class PageServers:
    """The page servers that a rank has heard of, those of them that it has ``reached``, and ``own``, its own one (""
    while it has none). Safe for threads."""

    def __init__(self) -> None:
        self.own = ""
        self.reached: tuple[str, ...] = ()
        self._lock = threading.Lock()
        self._known: dict[str, None] = {}

    def __repr__(self) -> str:
        return f"PageServers({self.own or 'none'}, knows {', '.join(self._known) or 'nobody'})"

    def add(self, endpoints: Iterable[str]) -> None:
        with self._lock:
            self._known.update(dict.fromkeys(each for each in endpoints if each and each != self.own))

    def forget(self, endpoint: str) -> None:
        with self._lock:
            self._known.pop(endpoint, None)

    @property
    def known(self) -> list[str]:
        with self._lock:
            return list(self._known)
