"""BurstGPT's traces (arXiv 2401.17644): CSV with seconds, a model, request and response tokens."""

from __future__ import annotations

import csv
import itertools
from pathlib import Path

from ..request import SimRequest
from .base import TRACE_FORMATS, columns_of


class BurstGPT:
    def matches(self, head: str) -> bool:
        return "request tokens" in head.partition("\n")[0].lower()

    def read(self, path: Path, count: int | None) -> list[SimRequest]:
        with path.open(encoding="utf-8-sig", newline="") as file:
            rows = csv.reader(file)
            at, given, generated = columns_of(next(rows), "Timestamp", "Request tokens", "Response tokens")
            return [SimRequest(float(row[at]), int(float(row[given])), int(float(row[generated])))
                    for row in itertools.islice((row for row in rows if row), count)]


TRACE_FORMATS.register("burstgpt")(BurstGPT())
