"""Azure's traces of LLM inference (AzurePublicDataset): CSV with a time, context and generated tokens."""

from __future__ import annotations

import csv
import itertools
from datetime import datetime
from pathlib import Path

from ..request import SimRequest
from .base import TRACE_FORMATS, columns_of


class Azure:
    def matches(self, head: str) -> bool:
        return "contexttokens" in head.partition("\n")[0].lower()

    def read(self, path: Path, count: int | None) -> list[SimRequest]:
        with path.open(encoding="utf-8-sig", newline="") as file:
            rows = csv.reader(file)
            at, given, generated = columns_of(next(rows), "TIMESTAMP", "ContextTokens", "GeneratedTokens")
            return [SimRequest(_seconds(row[at]), int(row[given]), int(row[generated]))
                    for row in itertools.islice((row for row in rows if row), count)]


def _seconds(text: str) -> float:
    """The files have seven digits of a second, Python reads six."""
    whole, _, fraction = text.strip().partition(".")
    digits = fraction.partition("+")[0].rstrip("Z")
    return datetime.fromisoformat(whole).timestamp() + float(f"0.{digits or 0}")


TRACE_FORMATS.register("azure")(Azure())
