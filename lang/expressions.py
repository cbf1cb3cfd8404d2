"""Expressions: sequences of parts, which ``+`` joins and the interpreter executes from left to right."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from .choices import ChoicesMethod
from .errors import ProgramError
from .sampling import SamplingParams


@dataclass(frozen=True)
class Text:
    value: str


@dataclass(frozen=True)
class Gen:
    """Generates a text, which variable ``name`` keeps."""

    name: str | None
    params: SamplingParams


@dataclass(frozen=True)
class Select:
    """Appends the choice that the model holds the most likely one by ``method``."""

    name: str | None
    choices: tuple[str, ...]
    method: ChoicesMethod


@dataclass(frozen=True)
class RoleBegin:
    role: str


@dataclass(frozen=True)
class RoleEnd:
    role: str


@dataclass(frozen=True)
class ScopeBegin:
    """The text from here to the ScopeEnd of the same name becomes a variable."""

    name: str


@dataclass(frozen=True)
class ScopeEnd:
    name: str


@dataclass(frozen=True)
class Media:
    kind: Literal["image", "video"]
    source: Any


@dataclass(frozen=True)
class CachePrefix:
    """Has the backend compute the text so far, which forks share."""


class Branch(Protocol):
    """A forked state, as JoinText reads it."""

    def forked_text(self) -> str: ...


@dataclass(frozen=True)
class JoinText:
    """Appends the texts that forks added to their source's."""

    branches: Sequence[Branch]


Part = Text | Gen | Select | RoleBegin | RoleEnd | ScopeBegin | ScopeEnd | Media | CachePrefix | JoinText


@dataclass(frozen=True)
class Expression:
    """``text + gen("a") + text``: an immutable sequence of parts."""

    parts: tuple[Part, ...]

    def __add__(self, other: object) -> Expression:
        return Expression(self.parts + expression(other).parts)

    def __radd__(self, other: object) -> Expression:
        return Expression(expression(other).parts + self.parts)

    def names(self) -> list[str]:
        """The variables that these parts set, in order."""
        return [part.name for part in self.parts if isinstance(part, (Gen, Select, ScopeEnd)) and part.name is not None]


def expression(value: object) -> Expression:
    """An expression of a text, a number or an expression; raises ProgramError for None and anything else."""
    if isinstance(value, Expression):
        return value
    if isinstance(value, (str, int, float)):
        return Expression((Text(str(value)),))
    raise ProgramError(f"A state takes texts and expressions, not {type(value).__name__}: give str(...) of it.")
