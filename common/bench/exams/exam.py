"""An exam: questions in a public data set's format, with the examples that are shown before each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from ...registry import Registry

EXAMS: Registry[Callable[[], Exam]] = Registry("task", "baton.common.bench.exams")


@dataclass(frozen=True)
class Question:
    """A question with its right answer.

    ``choices``: texts that may follow ``asked``; the model's likeliest is its answer. Without them it generates a text
    with a number in it. ``right``: the right choice, or number. ``answered``: what follows ``asked`` where the question
    is an example of a prompt. ``group``: the subject, whose questions are also counted alone.
    """

    asked: str
    answered: str
    right: str
    choices: tuple[str, ...] = ()
    group: str = ""
    heading: str = ""
    """Text at the beginning of a prompt that asks it."""
    message: str = ""
    """The question in a chat, where it is not ``asked``."""


@dataclass(frozen=True)
class Asked:
    """A question and its examples."""

    question: Question
    shots: Sequence[Question]


class Exam(Protocol):
    """A data set's format. ``num_shots`` is the usual number of examples in a prompt."""

    num_shots: int

    def read(self, path: str, shots_path: str | None, num_shots: int, *, cloze: bool) -> list[Asked]:
        """Reads all questions; ``cloze`` asks for a choice's text in place of its letter. Raises ConfigError."""
