"""The thread that does a sender's or receiver's I/O, and nothing else.

Other threads only change state under their lock and then ``wake`` this one, so a scheduler never waits for a
socket. The thread sleeps in poll(2) while nothing happens.
"""

from __future__ import annotations

import ctypes
import logging
import socket
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import zmq

logger = logging.getLogger(__name__)

# Between two looks at writes that wait, and at most at writes in flight: shorter than those of a chunk on the fastest
# link, long enough to leave the interpreter to the scheduler (one look costs about 5 us).
BUSY_INTERVAL = 100e-6
# Below this, the thread only lets others run: a system call takes as long.
_SHORTEST_SLEEP = 5e-6
_SET_TIMER_SLACK = 29


def sleep_precisely() -> None:
    """From now on this thread's sleeps last as long as was asked for; Linux makes them 50 us longer otherwise."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_SET_TIMER_SLACK, ctypes.c_ulong(1000), 0, 0, 0)


class IOThread:
    """Calls ``work(stalled)`` again and again; it returns the seconds until it must be called next (None: when woken).

    ``stalled`` is how much later than asked for the call comes. ZMQ sockets given to ``watch`` are read by callbacks
    in this thread, before ``work``. An exception is a bug: it ends the thread, and ``check`` raises in the callers.
    """

    def __init__(self, name: str, work: Callable[[float], float | None]):
        self._work = work
        self._poller = zmq.Poller()
        self._callbacks: dict[Any, Callable[[], None]] = {}
        self._awake, self._alarm = socket.socketpair()
        self._awake.setblocking(False)
        self._alarm.setblocking(False)
        self._poller.register(self._awake, zmq.POLLIN)
        self._stopping = False
        self._crash: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def wake(self) -> None:
        try:
            self._alarm.send(b"\0")
        except BlockingIOError:
            pass  # it has thousands of wake-ups to read already

    def watch(self, sock: zmq.Socket[bytes], callback: Callable[[], None]) -> None:
        """In this thread, or before ``start``."""
        self._callbacks[sock] = callback
        self._poller.register(sock, zmq.POLLIN)

    def unwatch(self, sock: zmq.Socket[bytes]) -> None:
        del self._callbacks[sock]
        self._poller.unregister(sock)

    def check(self) -> None:
        """Raises RuntimeError when the thread has died of a bug."""
        if self._crash is not None:
            raise RuntimeError("the KV transfer thread died") from self._crash

    def stop(self) -> None:
        """Returns when the thread has ended; ``work`` is not called again."""
        self._stopping = True
        self.wake()
        if self._thread.is_alive():
            self._thread.join()
        self._awake.close()
        self._alarm.close()

    def _run(self) -> None:
        sleep_precisely()
        try:
            due: float | None = None
            while not self._stopping:
                now = time.monotonic()
                wait = self._work(0.0 if due is None else max(0.0, now - due))
                due = None if wait is None else now + wait
                self._read(wait)
        except BaseException as error:
            self._crash = error
            logger.exception("the KV transfer thread died")

    def _read(self, wait: float | None) -> None:
        # poll(2) counts in milliseconds; shorter waits sleep, so that writes in flight do not cost a whole core.
        ready = self._poller.poll(None if wait is None else int(wait * 1000))
        if not ready and wait is not None and wait < 1e-3:
            time.sleep(wait if wait >= _SHORTEST_SLEEP else 0)
        for sock, _ in ready:
            if sock in self._callbacks:
                self._callbacks[sock]()
            elif sock == self._awake.fileno():
                self._drain_alarm()

    def _drain_alarm(self) -> None:
        try:
            while len(self._awake.recv(4096)) == 4096:
                pass
        except BlockingIOError:
            pass
