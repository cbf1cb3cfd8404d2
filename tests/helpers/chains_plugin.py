"""The algorithm EAGLE3_CHAINS: EAGLE3 whose ranks, on a CPU, take chain steps as on a GPU; see chains_on_cpu.

Chain steps that followed another in flight are counted in a file of each process, which CHAINS_FILE begins."""

from __future__ import annotations

import multiprocessing
import os
from pathlib import Path
from typing import Any
from unittest.mock import patch

from baton.common.config.server.speculative import SPECULATIVE_ALGORITHMS
from baton.common.speculative.base import Algorithm, DraftContext, DraftModel

_ENTERED: list[object] = []
"""Context managers, which end with the process."""


def _take_chain_steps() -> None:
    """From now on this rank's engine does."""
    from baton.common.engine import rank
    from baton.common.execution.executor import Executor
    from baton.tests.helpers.chains_on_cpu import chains_on_cpu, record_chains

    _ENTERED.append(manager := chains_on_cpu())
    manager.__enter__()
    make_batcher, launch = rank.make_batcher, Executor.launch
    file, following = Path(f"{os.environ['CHAINS_FILE']}.{os.getpid()}"), [0]

    def recorded(config: Any, runner: Any, *args: Any) -> Any:
        record_chains(runner, config)  # its class was loaded before this file
        return make_batcher(config, runner, *args)

    def counted(self: Executor, step: Any, *args: Any) -> Any:
        if step.chains is not None and (step.chains.sources >= 0).any():
            following[0] += 1
            file.write_text(str(following[0]))
        return launch(self, step, *args)

    patch.object(rank, "make_batcher", recorded).start()
    patch.object(Executor, "launch", counted).start()


def load(context: DraftContext) -> DraftModel:
    if multiprocessing.current_process().name.startswith("rank"):
        _take_chain_steps()
    make = SPECULATIVE_ALGORITHMS.get("EAGLE3").load
    assert make is not None
    return make(context)


def num_following(file: str) -> list[int]:
    """The chain steps that followed another, of each rank's process that took any."""
    path = Path(file)
    return [int(each.read_text()) for each in path.parent.glob(f"{path.name}.*")]


SPECULATIVE_ALGORITHMS.register("EAGLE3_CHAINS", traits=("device", "shifted", "draft_path"),
                                hidden=True)(Algorithm(load=load))
