"""Reads exams' files."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

from ...api.errors import ConfigError
from .exam import Asked, Question

T = TypeVar("T")


def rows_of_csv(path: Path) -> list[list[str]]:
    """Raises ConfigError."""
    return _read(path, lambda text: [row for row in csv.reader(text.splitlines(keepends=True)) if row])


def objects_of_lines(path: Path) -> list[dict[str, Any]]:
    """The objects of a JSONL file. Raises ConfigError."""
    found = _read(path, lambda text: [json.loads(line) for line in text.splitlines() if line.strip()])
    if any(not isinstance(item, dict) for item in found):
        raise ConfigError(f"{path} must hold a JSON object on each line.")
    return found


def _read(path: Path, parse: Callable[[str], list[T]]) -> list[T]:
    try:
        return parse(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"Cannot read {path}: {error.strerror}.") from None
    except (ValueError, csv.Error) as error:
        raise ConfigError(f"{path} cannot be read: {error}.") from None


def with_shots(questions: Sequence[Question], shots: Sequence[Question] | None, count: int, path: str
               ) -> Iterator[Asked]:
    """Questions after ``count`` examples: of ``shots``, or the file's own first ones, which then are not asked. Raises
    ConfigError where there are too few."""
    source = questions if shots is None else shots
    if count > len(source):
        raise ConfigError(f"{path} holds {len(source)} examples, too few for --num-shots {count}.")
    rest = questions[count:] if shots is None else questions
    if not rest:
        raise ConfigError(f"{path} holds no questions besides the examples: lower --num-shots.")
    return (Asked(question, source[:count]) for question in rest)
