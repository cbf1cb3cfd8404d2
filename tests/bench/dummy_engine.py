"""An engine of an 8B-shaped dummy model in this process, as a server on one GPU has it."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

from ...common.bench.hand_engine import HandEngine
from ...common.config.server import (
    CacheArgs,
    DisaggregationArgs,
    HttpArgs,
    KernelArgs,
    ModelArgs,
    ParallelArgs,
    ScheduleArgs,
    ServerConfig,
)
from .relay import LLAMA_8B


def make(tokens: int, max_running: int) -> HandEngine:
    """With a KV pool of ``tokens`` and no prefix cache."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(LLAMA_8B))
        return HandEngine(ServerConfig(
            ModelArgs(folder, dtype="bfloat16", device="cuda", load_format="dummy"),
            CacheArgs(max_total_tokens=tokens, disable_radix_cache=True),
            ScheduleArgs(max_running_requests=max_running), ParallelArgs(), KernelArgs(), DisaggregationArgs(),
            HttpArgs()))
