"""Mooncake's traces (arXiv 2407.00079): JSONL with milliseconds, lengths, and ids of blocks that prompts share."""

from __future__ import annotations

from pathlib import Path

from ....common.bench.workloads import trace
from ..request import SimRequest
from .base import TRACE_FORMATS


class Mooncake:
    def matches(self, head: str) -> bool:
        return head.lstrip().startswith("{") and '"input_length"' in head

    def read(self, path: Path, count: int | None) -> list[SimRequest]:
        return [SimRequest(line.timestamp / 1e3, line.input_length, line.output_length, tuple(line.hash_ids),
                           trace.BLOCK) for line in trace.read(str(path), -1 if count is None else count)]


TRACE_FORMATS.register("mooncake")(Mooncake())
