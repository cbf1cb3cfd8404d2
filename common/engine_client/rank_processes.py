"""Processes of the engine's ranks, started and watched by the API server."""

from __future__ import annotations

import asyncio
import logging
import multiprocessing
import os
import sys
import time
from collections.abc import Callable
from multiprocessing.process import BaseProcess

from ..config.server import ServerConfig
from ..engine.rank_spec import RankSpec
from ..process import die_with

_POLL_SECONDS = 0.02


def rank_specs(config: ServerConfig, to_engine: str, from_engine: str, dist_init: str) -> list[RankSpec]:
    """The ranks of this host."""
    size = config.parallel.world_size
    here = size // config.nodes.nnodes
    return [RankSpec(config, config.nodes.node_rank * here + i, size, to_engine, from_engine, dist_init, i)
            for i in range(here)]


RankTarget = Callable[[RankSpec], None]
"""A module-level function, so that a spawned process can import it."""


class RankProcesses:
    """Starts one process a rank, reports the end of any, and ends them all.

    The processes die with the API server, however that ends. ``on_exit(rank, exit code)`` is called on the event loop
    for each that ends before ``stop``. Must be used from the event loop.
    """

    def __init__(self, target: RankTarget, specs: list[RankSpec], on_exit: Callable[[int, int], None]):
        self._target = target
        self._specs = specs
        self._on_exit = on_exit
        self._processes: list[BaseProcess] = []
        self._watched: dict[int, int] = {}  # sentinel -> index of the process

    def start(self) -> None:
        context = multiprocessing.get_context("spawn")
        loop = asyncio.get_running_loop()
        for spec in self._specs:
            process = context.Process(target=_run_rank, args=(self._target, spec, os.getpid()), name=f"rank{spec.rank}",
                                      daemon=False)
            process.start()
            self._processes.append(process)
            self._watched[process.sentinel] = len(self._processes) - 1
            loop.add_reader(process.sentinel, self._ended, process.sentinel)

    @property
    def alive(self) -> int:
        return sum(process.is_alive() for process in self._processes)

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self._processes if process.pid is not None]

    def _ended(self, sentinel: int) -> None:
        index = self._watched.pop(sentinel)
        asyncio.get_running_loop().remove_reader(sentinel)
        process = self._processes[index]
        process.join()
        self._on_exit(self._specs[index].rank, process.exitcode or 0)

    async def stop(self, grace: float) -> None:
        """Give the processes ``grace`` seconds to end by themselves, then terminate, then kill.

        Returns when all have ended.
        """
        loop = asyncio.get_running_loop()
        for sentinel in self._watched:
            loop.remove_reader(sentinel)
        self._watched.clear()
        if not await self._gone(grace):
            for process in self._processes:
                process.terminate()
            if not await self._gone(1.0):
                for process in self._processes:
                    process.kill()
        for process in self._processes:
            process.join()

    async def _gone(self, seconds: float) -> bool:
        end = time.monotonic() + seconds
        while self.alive:
            if time.monotonic() >= end:
                return False
            await asyncio.sleep(_POLL_SECONDS)
        return True


def _run_rank(target: RankTarget, spec: RankSpec, parent: int) -> None:
    """Entry of the child process."""
    die_with(parent)
    target(spec)
    # Only destructors of libraries are left, and not all of them work: with the system's RDMA libraries installed,
    # those of NIXL 1.5.1 end in a segmentation fault.
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
