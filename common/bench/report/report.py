"""Figures for machines: a line of JSON a run, appended, as SGLang's benchmark writes it."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ...api.errors import ConfigError
from ..client.answer import Answer


def append_line(path: str, record: Mapping[str, Any]) -> None:
    """Raises ConfigError."""
    line = json.dumps(_plain(record), allow_nan=False) + "\n"
    try:
        with open(path, "a", encoding="utf-8") as file:
            file.write(line)
    except OSError as error:
        raise ConfigError(f"Cannot write --output-file {path}: {error.strerror}.") from None


def write_text(path: str, text: str, flag: str) -> None:
    """Raises ConfigError."""
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"Cannot write {flag} {path}: {error.strerror}.") from None


def check_writable(path: str | None, flag: str) -> None:
    """Raises ConfigError now, not when an hour has been measured."""
    if path is None:
        return
    try:
        with open(path, "a", encoding="utf-8"):
            pass
    except OSError as error:
        raise ConfigError(f"Cannot write {flag} {path}: {error.strerror}.") from None


def details(answers: Sequence[Answer]) -> dict[str, list[Any]]:
    """A list entry a request; seconds, under SGLang's keys."""
    return {
        "input_lens": [answer.num_input_tokens for answer in answers],
        "output_lens": [answer.num_output_tokens for answer in answers],
        "cached_lens": [answer.num_cached for answer in answers],
        "ttfts": [answer.ttft for answer in answers], "itls": [answer.gaps for answer in answers],
        "e2e_latencies": [answer.e2e for answer in answers],
        "generated_texts": [answer.text for answer in answers],
        "errors": ["" if answer.failure is None else f"{answer.failure.kind}: {answer.failure.message}"
                   for answer in answers],
    }


def _plain(value: Any) -> Any:
    """JSON has no numbers for infinite and undefined."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value
