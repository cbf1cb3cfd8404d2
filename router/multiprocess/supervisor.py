"""Starting, restarting and ending the processes of one router."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import os
import sys
from collections.abc import Callable

from ...common.api.errors import ConfigError
from ...common.config.shared_port import reserve
from ..config import RouterConfig
from ..config.discovery import DiscoveryArgs
from ..workers.registry import Registry
from .child_process import ChildProcess
from .messages import Shutdown, Start
from .parent import Parent
from .shared_stats import SharedStats

logger = logging.getLogger("baton.router")

_STABLE_SECONDS = 5.0
"""A child that lived for longer is replaced at once; one that did not, after a pause that grows."""
_MIN_PAUSE_SECONDS, _MAX_PAUSE_SECONDS = 0.2, 10.0
_KILL_AFTER_SECONDS = 3.0
"""A child that has not ended this long after ``--shutdown-grace-secs`` is killed."""


class Supervisor:
    """A router of several processes: ``await start()``, requests are served, ``await stop()``."""

    def __init__(self, config: RouterConfig):
        if not sys.platform.startswith("linux"):
            raise ConfigError("--router-workers above 1 needs Linux (memfd, eventfd, SO_REUSEPORT).")
        self._config = config
        self._count = config.http.router_workers
        self._children: dict[int, ChildProcess] = {}
        self._stopping = asyncio.Event()

    async def start(self) -> None:
        """Serves on all processes; raises ConfigError when the address cannot be had, or a process cannot start."""
        http = self._config.http
        self._sockets, self.port = reserve(http.host, http.port)
        self._stats = SharedStats.create(self._count)
        self._signals = tuple(os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC) for _ in range(self._count))
        self._parent = Parent(self._config, self._stats, lambda: [*self._children.values()])
        await self._parent.start()
        loop = asyncio.get_running_loop()
        self._tasks = [loop.create_task(self._keep_running(index)) for index in range(self._count)]
        first = await asyncio.gather(*map(self._first, range(self._count)))
        failed = [child for child in first if not child.listening]
        if failed:
            await self.stop()
            raise ConfigError(next((child.refusal for child in failed if child.refusal),
                                   "A process of the router ended as it started; its log says why."))

    @property
    def registry(self) -> Registry:
        return self._parent.router.registry

    async def stop(self) -> None:
        """Ends all processes, each as a single one would; returns when all are gone."""
        self._stopping.set()
        for child in self._children.values():
            child.send(Shutdown())
        await asyncio.wait(self._tasks, timeout=self._config.http.shutdown_grace_secs + _KILL_AFTER_SECONDS)
        for child in self._children.values():
            child.kill()
        await asyncio.wait(self._tasks)
        await self._parent.stop()
        for sock in self._sockets:
            sock.close()

    async def _first(self, index: int) -> ChildProcess:
        """The first child of its number, once it listens or has ended."""
        while index not in self._children:
            await asyncio.sleep(0)
        child = self._children[index]
        await child.ready.wait()
        return child

    async def _keep_running(self, index: int) -> None:
        """Runs a child, and another one when it ends, until the router stops."""
        loop = asyncio.get_running_loop()
        pause = _MIN_PAUSE_SECONDS
        while not self._stopping.is_set():
            begun = loop.time()
            outcome = await self._run(index)
            if self._stopping.is_set():
                return
            logger.error("Process %d of the router %s; another one starts.", index, outcome)
            if loop.time() - begun > _STABLE_SECONDS:
                pause = _MIN_PAUSE_SECONDS
                continue
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), pause)
            pause = min(2 * pause, _MAX_PAUSE_SECONDS)

    async def _run(self, index: int) -> str:
        """Runs a child until it ends; returns the log's words for its end."""
        child = self._children[index] = ChildProcess(index, self._parent.on_message)
        try:
            await child.start((self._stats.file, *self._signals), lambda: self._begin(index))
        except OSError as error:  # No more processes or descriptors may be had.
            child.ready.set()
            return f"could not start ({error.strerror})"
        if self._stopping.is_set():
            child.send(Shutdown())
        status = await child.ended()
        self._parent.on_child_ended(index)
        for signal in self._signals:  # Its requests have ended: others may run.
            os.eventfd_write(signal, 1)
        return f"(pid {child.pid}) ended with status {status}"

    def _begin(self, index: int) -> Start:
        return Start(self._child_config(), index, self._count, self._stats.file, self._signals, self._parent.snapshot(),
                     self._parent.deaths())

    def _child_config(self) -> RouterConfig:
        """The configuration of a child: workers, discovery and metrics' own port are the parent's."""
        config = self._config
        return dataclasses.replace(
            config, http=dataclasses.replace(config.http, port=self.port),
            workers=dataclasses.replace(config.workers, worker_urls=(), prefill=(), decode=()),
            discovery=DiscoveryArgs(), observe=dataclasses.replace(config.observe, prometheus_port=None),
            logs=dataclasses.replace(config.logs, log_interval=0.0))


async def serve(config: RouterConfig, *, ready: Callable[[Supervisor], None], stop: asyncio.Event) -> None:
    """Runs a router of several processes until ``stop`` is set; ``ready`` is called once all of them accept."""
    supervisor = Supervisor(config)
    await supervisor.start()
    try:
        ready(supervisor)
        await stop.wait()
    finally:
        await supervisor.stop()
