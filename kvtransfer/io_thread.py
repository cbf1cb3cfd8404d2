"""Runs the thread that does a sender's or receiver's I/O, and nothing else.

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

# Seconds between polls of waiting writes, and at most of writes in flight: shorter than the writes of a chunk take on
# the fastest link, long enough to leave the interpreter to the scheduler (one poll costs about 5 us).
BUSY_INTERVAL = 100e-6
# Below this the thread only yields the processor: the system call of a sleep takes as long.
_MIN_SLEEP_SECONDS = 5e-6
_PR_SET_TIMERSLACK = 29


def sleep_precisely() -> None:
    """Makes this thread's sleeps as short as requested; Linux makes them 50 us longer otherwise."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, ctypes.c_ulong(1000), 0, 0, 0)


class IOThread:
    """Calls ``work(stalled)`` repeatedly; it returns the seconds until its next call (None: when woken).

    ``stalled`` is the delay of the call in seconds. ZMQ sockets given to ``add_reader`` are read by callbacks in this
    thread, before ``work``. An exception is a bug: it ends the thread, and ``check`` raises in the callers.
    """

    def __init__(self, name: str, work: Callable[[float], float | None]):
        self._work = work
        self._poller = zmq.Poller()
        self._callbacks: dict[Any, Callable[[], None]] = {}
        self._wake_reader, self._wake_writer = socket.socketpair()
        self._wake_reader.setblocking(False)
        self._wake_writer.setblocking(False)
        self._poller.register(self._wake_reader, zmq.POLLIN)
        self._stopping = False
        self._crash: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def wake(self) -> None:
        try:
            self._wake_writer.send(b"\0")
        except BlockingIOError:
            pass  # thousands of wake-ups are unread already

    def add_reader(self, sock: zmq.Socket[bytes], callback: Callable[[], None]) -> None:
        """Calls ``callback`` when ``sock`` is readable. Must be called in this thread, or before ``start``."""
        self._callbacks[sock] = callback
        self._poller.register(sock, zmq.POLLIN)

    def remove_reader(self, sock: zmq.Socket[bytes]) -> None:
        del self._callbacks[sock]
        self._poller.unregister(sock)

    def check(self) -> None:
        """Raises RuntimeError where the thread has died of a bug."""
        if self._crash is not None:
            raise RuntimeError("the KV transfer thread died") from self._crash

    def stop(self) -> None:
        """Ends the thread and waits for its end; ``work`` is not called again."""
        self._stopping = True
        self.wake()
        if self._thread.is_alive():
            self._thread.join()
        self._wake_reader.close()
        self._wake_writer.close()

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
            time.sleep(wait if wait >= _MIN_SLEEP_SECONDS else 0)
        for sock, _ in ready:
            if sock in self._callbacks:
                self._callbacks[sock]()
            elif sock == self._wake_reader.fileno():
                self._drain_wakeups()

    def _drain_wakeups(self) -> None:
        try:
            while len(self._wake_reader.recv(4096)) == 4096:
                pass
        except BlockingIOError:
            pass
