"""Settings of Python's garbage collector in a serving process."""

from __future__ import annotations

import atexit
import gc
import logging
import time

log = logging.getLogger("baton.gc")


def warn_of_collections(seconds: float) -> None:
    """Log a warning for each collection of this process that takes longer than ``seconds``, unless these are 0: all
    streams wait for it."""
    if not seconds:
        return
    began = 0.0

    def notice(phase: str, facts: dict[str, int]) -> None:
        nonlocal began
        if phase == "start":
            began = time.perf_counter()
        elif (took := time.perf_counter() - began) > seconds:
            log.warning("a garbage collection of generation %d took %.3f s", facts["generation"], took,
                        extra={"fields": {"collected": facts["collected"], "frozen": gc.get_freeze_count()}})

    gc.callbacks.append(notice)


def freeze_collector() -> None:
    """Freeze the garbage collector once all is built. Objects that live as long as the process are not walked again:
    with torch loaded these are half a million, 50 ms a full collection. Requests create no reference cycles, and at
    Python's default threshold of 700 objects a step of 256 requests would trigger a collection of the young generation,
    and every hundredth of these a full one. Thawed at exit: Triton 3.9's bindings print 40 lines about what was never
    collected."""
    gc.collect()
    gc.freeze()
    atexit.register(gc.unfreeze)
    gc.set_threshold(50_000, 20, 50)
