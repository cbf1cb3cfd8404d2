"""The ranks of a stepped engine: a process each, all of which run the same steps."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import sys
import threading
from collections.abc import Callable, Iterator
from multiprocessing.process import BaseProcess
from typing import TypeVar

from ...config.addresses import find_free_ports
from ...config.server import ServerConfig
from ...engine.rank import join_groups
from ...engine.rank_spec import RankSpec
from ...process import die_with
from .stepped_engine import SteppedEngine

C = TypeVar("C")

_PORTS = 24_000  # the first that is tried for the ranks' meeting
_HOST = "127.0.0.1"


@contextlib.contextmanager
def stepped_ranks(config: ServerConfig, rest: Callable[[C, RankSpec], None], argument: C) -> Iterator[SteppedEngine]:
    """Rank 0's engine. The other ranks call ``rest(argument, spec)``, a function of a module, in processes of their own
    that end with this one; where one fails, this process ends, too. Raises ConfigError."""
    size = config.parallel.world_size
    meeting = "" if size == 1 else f"tcp://{_HOST}:{find_free_ports(_HOST, _PORTS, 1)[0]}"
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=_run, args=(rest, argument, RankSpec(config, rank, size, "", "", meeting, rank),
                                                    os.getpid())) for rank in range(1, size)]
    for process in processes:
        process.start()
        threading.Thread(target=_end_with, args=(process,), daemon=True).start()
    engine = stepped_engine(RankSpec(config, 0, size, "", "", meeting))
    try:
        yield engine
    finally:
        engine.close()
        for process in processes:
            process.join()


def stepped_engine(spec: RankSpec) -> SteppedEngine:
    """One rank's engine. Raises ConfigError."""
    return SteppedEngine(spec.config, join_groups(spec))


def _run(rest: Callable[[C, RankSpec], None], argument: C, spec: RankSpec, parent: int) -> None:
    die_with(parent)
    rest(argument, spec)


def _end_with(process: BaseProcess) -> None:
    """Ends this process where a rank's fails: others would wait for it in an exchange of tensors."""
    process.join()
    if process.exitcode:
        print("bench_one_batch: error: a rank has failed; its error is above.", file=sys.stderr, flush=True)
        os._exit(1)
