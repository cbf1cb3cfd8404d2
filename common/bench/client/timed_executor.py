"""Times how long the host waits for the results of steps."""

from __future__ import annotations

import dataclasses
import time
from typing import Any

from ...execution.chain_launch import LaunchedChains
from ...execution.executor import Executor


class TimedExecutor:
    """An Executor; ``waited`` sums the seconds of waiting for its steps' results."""

    def __init__(self, executor: Executor):
        self._executor = executor
        self.waited = 0.0

    def launch(self, *args: Any, **options: Any) -> Any:
        launched: Any = self._executor.launch(*args, **options)
        name = "result" if isinstance(launched, LaunchedChains) else "sample"
        return dataclasses.replace(launched, **{name: _TimedSample(getattr(launched, name), self)})

    def __getattr__(self, name: str) -> Any:
        return getattr(self._executor, name)


class _TimedSample:
    """A step's ``Sample`` that times the wait for its tokens."""

    def __init__(self, pending: Any, watch: TimedExecutor):
        self._pending = pending
        self._timer = watch

    def token_ids(self) -> Any:
        begin = time.perf_counter()
        found = self._pending.token_ids()
        self._timer.waited += time.perf_counter() - begin
        return found

    def __getattr__(self, name: str) -> Any:
        return getattr(self._pending, name)
