"""GSM8K: word problems of grade school, answered by a number (Cobbe et al., arXiv 2110.14168).

JSONL with ``question`` and ``answer``, which works it out and ends with ``#### 72``.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from ...api.errors import ConfigError
from .exam import EXAMS, Asked, Question
from .files import objects_of_lines, with_shots
from .numbers import number_in


@EXAMS.register("gsm8k")
class Gsm8k:
    num_shots = 5

    def read(self, path: str, shots_path: str | None, num_shots: int, *, cloze: bool) -> list[Asked]:
        if cloze:
            raise ConfigError("--cloze is for tasks with choices, not for gsm8k.")
        shots = None if shots_path is None else list(_questions(Path(shots_path).expanduser()))
        return list(with_shots(list(_questions(Path(path).expanduser())), shots, num_shots, shots_path or path))


def _questions(path: Path) -> Iterator[Question]:
    for number, item in enumerate(objects_of_lines(path), 1):
        question, answer = item.get("question"), item.get("answer")
        right = number_in(answer) if isinstance(answer, str) and "####" in answer else None
        if not isinstance(question, str) or right is None:
            raise ConfigError(f"Line {number} of {path} is no question: it needs question, and an answer that ends "
                              "with #### and a number.")
        yield Question(f"Question: {question}\nAnswer:", f" {answer}", right, message=question)
