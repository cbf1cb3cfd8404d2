"""HellaSwag: which of four endings continues a text (Zellers et al., arXiv 1905.07830).

JSONL with ``ctx`` (or ``ctx_a`` and ``ctx_b``), ``endings``, ``label`` (the right one's index) and, where there is one,
``activity_label``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ...api.errors import ConfigError
from .exam import EXAMS, Asked, Question
from .files import objects_of_lines, with_shots


@EXAMS.register("hellaswag")
class HellaSwag:
    num_shots = 10

    def read(self, path: str, shots_path: str | None, num_shots: int, *, cloze: bool) -> list[Asked]:
        if cloze:
            raise ConfigError("--cloze is for mmlu: hellaswag's choices are texts anyway.")
        shots = None if shots_path is None else list(_questions(Path(shots_path).expanduser()))
        return list(with_shots(list(_questions(Path(path).expanduser())), shots, num_shots, shots_path or path))


def _questions(path: Path) -> Iterator[Question]:
    for number, item in enumerate(objects_of_lines(path), 1):
        try:
            endings = tuple(" " + _cleaned(ending) for ending in item["endings"])
            right = endings[int(item["label"])]
            asked = _cleaned(_context(item))
        except (KeyError, TypeError, ValueError, IndexError, AttributeError):
            raise ConfigError(f"Line {number} of {path} is no question: it needs ctx, endings and the label of the "
                              "right one (the public test file has none; take the validation file).") from None
        yield Question(asked, right, right, endings)


def _context(item: Mapping[str, Any]) -> str:
    text: str = item["ctx"] if "ctx_b" not in item else f"{item['ctx_a']} {item['ctx_b'].capitalize()}"
    activity = item.get("activity_label")
    return f"{activity}: {text}" if activity else text


def _cleaned(text: str) -> str:
    """Without the marks of the texts that it was made of: ``[header]``, ``[title]``, ``[step]``, which ends a
    sentence."""
    text = re.sub(r"\s*\[.*?\]\s*", " ", text.replace(" [title]", ". "))
    return re.sub(r"\s+", " ", text).strip()
