"""Profiles the capture of CUDA graphs: where a start's seconds go, and which kernels a graph has."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from ...api.errors import ConfigError
from ...commands.profile import default_folder

log = logging.getLogger("baton.capture")

_PREFIX = "capture of "
_NUM_ROWS = 10
"""Rows of each table, as SGLang's."""


@contextmanager
def capture_profile(rank: int, device: torch.device) -> Iterator[None]:
    """Records the context by torch.profiler. Logs where its time goes, by batch size (``captured_size``) and operator,
    and writes a trace to the default folder of /start_profile; raises ConfigError where that cannot be made."""
    folder = Path(default_folder())
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--enable-profile-cuda-graph writes a trace to {folder}, which cannot be made: "
                          f"{error.strerror}. Set SGLANG_TORCH_PROFILER_DIR to a folder.") from None
    kinds = [torch.profiler.ProfilerActivity.CPU]
    if device.type == "cuda":
        kinds.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=kinds, record_shapes=True) as profile:
        yield
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    path = folder / f"baton-capture-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}-rank{rank}.trace.json.gz"
    profile.export_chrome_trace(str(path))
    log.info("The profile of the CUDA graphs' capture is in %s.\n%s", path, _tables(profile))


def captured_size(what: str, size: int) -> Any:
    """Returns the context of the capture of one size, by which traces and tables name it."""
    return torch.profiler.record_function(f"{_PREFIX}{what}, {size}")


def _tables(profile: torch.profiler.profile) -> str:
    lines = [f"{each.key}: {each.cpu_time_total / 1000:.1f} ms on the host, {each.device_time_total / 1000:.1f} ms on "
             "the device" for each in profile.key_averages() if each.key.startswith(_PREFIX)]
    by_shape = profile.key_averages(group_by_input_shape=True)
    return "\n".join([*lines, *(by_shape.table(sort_by=order, row_limit=_NUM_ROWS)
                                for order in ("device_time_total", "cpu_time_total"))])
