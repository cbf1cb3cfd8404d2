"""Captures that may fail: a server without some of its CUDA graphs is only slower."""

from __future__ import annotations

import logging
from collections.abc import Callable

from ...distributed.parallel import Parallel

log = logging.getLogger("baton.engine")


def try_capture(record: Callable[[], None], parallel: Parallel, what: str, others: str) -> bool:
    """Calls ``record`` on all ranks together; returns whether it succeeded on all of them. Else a warning says why
    ``what`` ("Prompts") run without CUDA graphs; ``others``: what another rank cannot capture."""
    failure = None
    try:
        record()
    except Exception as error:  # torch refuses a capture by errors of many kinds
        failure = f"{type(error).__name__}: {error}"
        log.debug("why %s are not captured", what, exc_info=True)
    if parallel.world.all_true(failure is None):
        return True
    log.warning("%s run without CUDA graphs: %s.", what, failure or f"another rank cannot capture {others}")
    return False
