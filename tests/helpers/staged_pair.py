"""A prefill or decode server that stands still at a named stage of its requests, so that a test can act right there.

    BATON_STAGES=FOLDER python -m baton.tests.helpers.staged_pair prefill|decode FLAGS...

A test writes a stage's name into ``FOLDER/armed``. When the server gets there it writes ``FOLDER/reached`` and waits,
with its engine's thread only, until ``FOLDER/go`` exists; connections and leases are kept meanwhile.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

from baton.common.engine.rank_spec import RankSpec

PREFILL_STAGES = ("bootstrapping", "before the first chunk", "mid-chunk", "last chunk")
STAGES = (*PREFILL_STAGES, "first tokens")
ARRIVED = "arrived"  # at decode, which has not told anybody yet
BEFORE = 5  # times that a stage is passed by, so that requests of all stages are under way when it stands still
NUM_ARRIVED = 5  # requests whose pages have arrived when the server stops at ARRIVED, on a machine of any speed
LONGEST = 120.0


class Stages:
    """The test's side: ``arm`` a stage, see that it is ``reached``, and let the server ``go`` on."""

    def __init__(self, folder: Path):
        self._armed, self._reached, self._go = (folder / name for name in ("armed", "reached", "go"))

    def arm(self, stage: str) -> None:
        assert stage in (*STAGES, ARRIVED)
        self._reached.unlink(missing_ok=True)
        self._go.unlink(missing_ok=True)
        self._armed.write_text(stage)

    @property
    def reached(self) -> bool:
        return self._reached.exists()

    def go(self) -> None:
        self._armed.unlink(missing_ok=True)
        self._go.touch()


class Gate:
    """The server's side."""

    def __init__(self, folder: Path):
        self._armed, self._reached, self._go = (folder / name for name in ("armed", "reached", "go"))
        self._passed = 0

    def is_armed(self, stage: str) -> bool:
        """True while the server is to stop at ``stage`` and has not yet."""
        try:
            return self._armed.read_text() == stage and not self._reached.exists()
        except FileNotFoundError:
            self._passed = 0
            return False

    def reach(self, stage: str, passes: int = BEFORE) -> None:
        """Stop here, if the stage is armed, after it was passed ``passes`` times."""
        if not self.is_armed(stage):
            return
        self._passed += 1
        if self._passed > passes:
            self._passed = 0
            self._reached.touch()
            end = time.monotonic() + LONGEST
            while not self._go.exists() and time.monotonic() < end:
                time.sleep(0.005)


def _watch_prefill(scheduler: Any, gate: Gate) -> None:
    add, launch = scheduler.add, scheduler.executor.launch

    def staged_add(req: Any) -> None:
        add(req)
        gate.reach("bootstrapping")

    def staged_launch(batch: Any, after_group: Any = None) -> Any:
        if any(chunk.start == chunk.req.num_cached_tokens for chunk in batch.chunks):
            gate.reach("before the first chunk")

        def staged_group(group: int, event: Any) -> None:
            after_group(group, event)
            if group == 0 and not all(chunk.samples for chunk in batch.chunks):
                gate.reach("mid-chunk")
            if group == 0 and any(chunk.samples for chunk in batch.chunks):
                gate.reach("last chunk")

        return launch(batch, staged_group)

    scheduler.add, scheduler.executor.launch = staged_add, staged_launch


def _watch_decode(scheduler: Any, gate: Gate) -> None:
    close_started = scheduler._close_started

    def staged_close() -> None:
        started = len(scheduler._started)
        close_started()
        if started:
            gate.reach("first tokens")

    poll = scheduler.transfers.poll

    def staged_poll() -> Any:
        """Withholds what has arrived until so much has that prefill retains several prompts, then stops."""
        progress = poll()
        if gate.is_armed(ARRIVED):
            if sum(each.settled for each in progress) < NUM_ARRIVED:
                return [each for each in progress if not each.settled]
            gate.reach(ARRIVED, passes=0)
        return progress

    scheduler._close_started, scheduler.transfers.poll = staged_close, staged_poll


def _run_rank(rank: Any, spec: RankSpec, watch: Any) -> None:
    make = rank._make_scheduler

    def make_staged(parts: Any) -> Any:
        scheduler = make(parts)
        watch(scheduler, Gate(Path(os.environ["BATON_STAGES"])))
        return scheduler

    rank._make_scheduler = make_staged
    rank.main(spec)


def run_prefill_rank(spec: RankSpec) -> None:
    from baton.prefill import rank
    _run_rank(rank, spec, _watch_prefill)


def run_decode_rank(spec: RankSpec) -> None:
    from baton.decode import rank
    _run_rank(rank, spec, _watch_decode)


def main() -> None:
    from baton.decode import launch as decode
    from baton.prefill import launch as prefill
    from baton.tests.helpers import staged_pair  # by its own name, under which a rank's process finds it
    role, argv = sys.argv[1], sys.argv[2:]
    prefill.run_rank, decode.run_rank = staged_pair.run_prefill_rank, staged_pair.run_decode_rank
    {"prefill": prefill, "decode": decode}[role].main(argv)


if __name__ == "__main__":
    main()
