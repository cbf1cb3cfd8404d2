"""Times the parts of steps with drafts: drafting, verifying, accepting."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any

DRAFT, VERIFY, ACCEPT = "draft", "verify", "accept"


class DraftTimer:
    """Seconds by part, of steps that run within ``timing``. The device is waited for at the end of each part: steps are
    slower than without.

    ``accept`` is the sampling of all rows, and what else a step's launch takes. A captured step accepts in the graph
    that drafts.
    """

    def __init__(self, synchronize: Callable[[], None], clock: Callable[[], float] = time.perf_counter):
        self._synchronize = synchronize
        self._clock = clock
        self._within = 0.0  # seconds of the parts that ended within the present one
        self.seconds = dict.fromkeys((DRAFT, VERIFY, ACCEPT), 0.0)

    @contextlib.contextmanager
    def timing(self, runner: Any, executor: Any, drafting: Any) -> Iterator[None]:
        """Times calls of these while it is open: the model runner's, the executor's, and the drafter's or the
        proposer's."""
        timed = [(VERIFY, runner, "step"), (ACCEPT, executor, "launch")]
        if runner.drafter is None:
            timed.append((DRAFT, drafting, "plan_decode"))
        else:
            timed += [(DRAFT, runner.drafter, "run"), (VERIFY, runner, "verify_chains"),
                      (DRAFT, runner, "draft_chains")]
        with contextlib.ExitStack() as stack:
            for part, owner, name in timed:
                stack.enter_context(self._timed(part, owner, name))
            yield

    @contextlib.contextmanager
    def _timed(self, part: str, owner: Any, name: str) -> Iterator[None]:
        function = getattr(owner, name)

        def timed(*args: Any, **options: Any) -> Any:
            begin, before, self._within = self._clock(), self._within, 0.0
            found = function(*args, **options)
            self._synchronize()
            took = self._clock() - begin
            self.seconds[part] += took - self._within
            self._within = before + took
            return found

        setattr(owner, name, timed)
        try:
            yield
        finally:
            delattr(owner, name)
