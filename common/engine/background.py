"""Work that a rank does in a thread beside its steps, and that ends on all ranks with one outcome."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from datetime import timedelta

import numpy as np
import torch
import torch.distributed as dist

from ..api.errors import InvalidRequest, ServingError, WorkerUnavailable, from_code
from ..distributed.tp import TPGroup

log = logging.getLogger("baton.engine")

_REASON_BYTES = 2048
_SEPARATOR = "\0"

Task = Callable[[], str]


class BackgroundTasks:
    """Runs tasks of all ranks in order, one at a time. All ranks call ``start`` alike, from their loops."""

    def __init__(self, world: TPGroup, device: torch.device, timeout: float):
        """``timeout``: seconds that a rank may be later than another."""
        self._world = world
        self._device = device
        self._timeout = timeout
        self._agreement: TPGroup | None = None  # the loops use ``world`` meanwhile
        self._tasks: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def start(self, task: Task, undo: Callable[[], None]) -> Future[str]:
        """Runs ``task``; the result is its sentence, once all ranks have one. Where it failed on one of them, ``undo``
        is called on all, and the result is the ServingError of the first that failed."""
        if self._thread is None:
            self._agreement = self._new_group()
            self._thread = threading.Thread(target=self._run, name="weights", daemon=True)
            self._thread.start()
        result: Future[str] = Future()
        self._tasks.put(lambda: self._execute(task, undo, result))
        return result

    def _new_group(self) -> TPGroup:
        if self._world.size == 1:
            return TPGroup()
        group = dist.new_group(backend="gloo", timeout=timedelta(seconds=self._timeout))
        return TPGroup(self._world.rank, self._world.size, host_group=group)

    def _run(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
            torch.cuda.set_stream(torch.cuda.Stream(self._device))  # type: ignore[no-untyped-call]
        while True:
            self._tasks.get()()

    def _execute(self, task: Task, undo: Callable[[], None], result: Future[str]) -> None:
        try:
            result.set_result(self._agreed(task, undo))
        except Exception as error:
            if not isinstance(error, ServingError):
                log.exception("a task beside the steps failed")
                error = WorkerUnavailable(f"The ranks of the engine could not agree: {error}")
            result.set_exception(error)

    def _agreed(self, task: Task, undo: Callable[[], None]) -> str:
        assert self._agreement is not None
        reason, sentence = "", ""
        try:
            with torch.no_grad():
                sentence = task()
            if self._device.type == "cuda":
                torch.cuda.current_stream(self._device).synchronize()
        except Exception as error:
            reason = _encoded(error)
        failed = self._first_reason(reason)
        if failed is None:
            return sentence
        undo()
        self._agreement.barrier()  # whoever hears of the failure finds all ranks as they were before
        raise failed

    def _first_reason(self, reason: str) -> ServingError | None:
        """Returns the error of the first rank that has one."""
        assert self._agreement is not None
        padded = reason.encode()[:_REASON_BYTES].ljust(_REASON_BYTES, b" ")
        rows = self._agreement.gather_ints(np.frombuffer(padded, np.uint8))
        for row in rows:
            if text := row.astype(np.uint8).tobytes().decode(errors="ignore").strip():
                code, _, message = text.partition(_SEPARATOR)
                return from_code(code, message)
        return None


def _encoded(error: Exception) -> str:
    if isinstance(error, ServingError):
        return f"{error.wire_code}{_SEPARATOR}{error.message}"
    log.warning("a task beside the steps failed", exc_info=error)
    first = (str(error).splitlines() or [repr(error)])[0]
    return f"{InvalidRequest.code}{_SEPARATOR}{type(error).__name__}: {first}"
