"""NVTX ranges, by which Nsight shows what a step's kernels belong to."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import wraps
from typing import Any

import torch

from ..models.decoder.module_calls import ModuleCall


def mark_ranges(calls: Iterable[ModuleCall]) -> None:
    """Runs ``calls`` in ranges of their names from now on; a CUDA graph that replays them has none."""
    for call in calls:
        call.wrap(lambda compute, name=call.names[0]: _in_range(compute, name))  # type: ignore[misc]


def _in_range(compute: Callable[..., Any], name: str) -> Callable[..., Any]:
    @wraps(compute)
    def marked(*args: Any, **options: Any) -> Any:
        with torch.cuda.nvtx.range(name):
            return compute(*args, **options)

    return marked
