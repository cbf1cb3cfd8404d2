"""MMLU: questions of 57 subjects with four choices (Hendrycks et al., arXiv 2009.03300).

A folder holds ``test/SUBJECT_test.csv`` and, for the examples, ``dev/SUBJECT_dev.csv``: question, four choices, the
right one's letter, without a header. A single file has these columns, or names them in a header with ``Subject``.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from ...api.errors import ConfigError
from .exam import EXAMS, Asked, Question
from .files import rows_of_csv, with_shots

_LETTERS = ("A", "B", "C", "D")
_COLUMNS = ("Question", *_LETTERS, "Answer")


@EXAMS.register("mmlu")
class Mmlu:
    num_shots = 5

    def read(self, path: str, shots_path: str | None, num_shots: int, *, cloze: bool) -> list[Asked]:
        root = Path(path).expanduser()
        if root.is_dir():
            return [asked for name, file in _subjects(root)
                    for asked in _of_subject(root, name, file, num_shots, cloze)]
        shots = None if shots_path is None else list(_questions(Path(shots_path), "", cloze))
        questions = list(_questions(root, "", cloze))
        return list(with_shots(questions, shots, num_shots, path))


def _subjects(root: Path) -> Iterator[tuple[str, Path]]:
    """Names and test files of a folder's subjects. Raises ConfigError."""
    files = sorted((root / "test").glob("*_test.csv"))
    if not files:
        raise ConfigError(f"{root} holds no test/SUBJECT_test.csv.")
    return ((file.name.removesuffix("_test.csv"), file) for file in files)


def _of_subject(root: Path, name: str, file: Path, num_shots: int, cloze: bool) -> Iterator[Asked]:
    examples = list(_questions(root / "dev" / f"{name}_dev.csv", name, cloze)) if num_shots else []
    return with_shots(list(_questions(file, name, cloze)), examples, num_shots, str(root / "dev"))


def _questions(path: Path, subject: str, cloze: bool) -> Iterator[Question]:
    """Raises ConfigError."""
    rows = rows_of_csv(path)
    header = rows[0] if rows and {"Question", "Answer"} <= set(rows[0]) else None
    for number, row in enumerate(rows if header is None else rows[1:], 1 if header is None else 2):
        fields = dict(zip(_COLUMNS if header is None else header, row))
        if any(name not in fields for name in _COLUMNS) or fields["Answer"].strip() not in _LETTERS:
            raise ConfigError(f"Row {number} of {path} is no question: it needs the question, four choices and the "
                              "letter of the right one.")
        yield _question(fields, fields.get("Subject", subject), cloze)


def _question(fields: Mapping[str, str], subject: str, cloze: bool) -> Question:
    text, right = fields["Question"].strip(), fields["Answer"].strip()
    about = f" about {' '.join(subject.split('_'))}" if subject else ""
    if cloze:
        choices = tuple(f" {fields[letter].strip()}" for letter in _LETTERS)
        answer = choices[_LETTERS.index(right)]
        return Question(text, answer, answer, choices, subject)
    listed: Sequence[str] = [f"{letter}. {fields[letter].strip()}" for letter in _LETTERS]
    asked = "\n".join(itertools.chain([text], listed, ["Answer:"]))
    return Question(asked, f" {right}", f" {right}", tuple(f" {letter}" for letter in _LETTERS), subject,
                    f"The following are multiple choice questions (with answers){about}.")
