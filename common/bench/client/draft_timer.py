"""Times the parts of steps with drafts: drafting, verifying, accepting."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any

DRAFT, VERIFY, ACCEPT = "draft", "verify", "accept"


class DraftTimer:
    """Seconds by part, of steps that run within ``timing``. The device is waited for at the end of each part: steps are
    slower than without."""

    def __init__(self, synchronize: Callable[[], None], clock: Callable[[], float] = time.perf_counter):
        self._synchronize = synchronize
        self._clock = clock
        self._seconds = dict.fromkeys((DRAFT, VERIFY, "launch"), 0.0)

    @property
    def seconds(self) -> dict[str, float]:
        """``accept``: sampling of all rows, and what else a step's launch takes."""
        draft, verify, launch = self._seconds.values()
        return {DRAFT: draft, VERIFY: verify, ACCEPT: launch - verify}

    @contextlib.contextmanager
    def timing(self, runner: Any, executor: Any, drafting: Any) -> Iterator[None]:
        """Times calls of these while it is open: the model runner's, the executor's, and the drafter's or the
        proposer's."""
        draft = (drafting, "plan_decode") if runner.drafter is None else (runner.drafter, "run")
        with contextlib.ExitStack() as stack:
            for part, (owner, name) in ((VERIFY, (runner, "step")), (DRAFT, draft), ("launch", (executor, "launch"))):
                stack.enter_context(self._timed(part, owner, name))
            yield

    @contextlib.contextmanager
    def _timed(self, part: str, owner: Any, name: str) -> Iterator[None]:
        function = getattr(owner, name)

        def timed(*args: Any, **options: Any) -> Any:
            begin = self._clock()
            found = function(*args, **options)
            self._synchronize()
            self._seconds[part] += self._clock() - begin
            return found

        setattr(owner, name, timed)
        try:
            yield
        finally:
            delattr(owner, name)
