"""Python's garbage collector in a process that serves."""

from __future__ import annotations

import atexit
import gc


def settle_collector() -> None:
    """To be called once all is built. What lives as long as the process is not walked again: with torch loaded that is
    half a million objects, 50 ms a full collection. Requests leave no reference cycles behind, and at Python's default
    of 700 objects a step of 256 requests would set off a collection of the young ones, and every hundredth of these a
    full one. Thawed at exit: Triton 3.9's bindings print 40 lines about what was never collected."""
    gc.collect()
    gc.freeze()
    atexit.register(gc.unfreeze)
    gc.set_threshold(50_000, 20, 50)
