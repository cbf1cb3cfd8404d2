"""Pauses Python's garbage collector while graphs are captured."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collection_paused() -> Iterator[None]:
    """Collects garbage, then pauses the collector for the block. A CUDA graph in a reference cycle that it freed during
    a capture would end the capture: CUDA destroys no graph while a stream is capturing."""
    gc.collect()
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
