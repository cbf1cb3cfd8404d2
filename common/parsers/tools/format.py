"""What there is to know of one way to write tool calls."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from ..cursor import Cursor, Step
from .calls import Calls


@dataclass(frozen=True)
class Tag:
    """What stands around one call's arguments; they are JSON, or xgrammar's ``style`` of writing an object."""

    begin: str
    end: str
    style: str = "json"


@dataclass(frozen=True)
class Layout:
    """How calls are written one after the other, where their form can be demanded of the model.

    ``before``, ``between`` and ``after`` stand around and between the calls. ``trigger``: free text must not hold it
    unless calls follow, None where text may be anything. ``single``: one call ends the answer.
    """

    tag: Callable[[str], Tag]
    before: str = ""
    between: str = ""
    after: str = ""
    trigger: str | None = None
    single: bool = False


@dataclass(frozen=True)
class ToolFormat:
    """``script`` reads answers of this format.

    ``markers`` are the format's own words, which must survive detokenizing even where they are special tokens.
    ``signs``: a chat template that has all the words of one of these sets is of this format.
    """

    script: Callable[[Cursor, Calls], Step[None]]
    markers: tuple[str, ...] = ()
    signs: tuple[frozenset[str], ...] = field(default=())
    layout: Layout | None = None
