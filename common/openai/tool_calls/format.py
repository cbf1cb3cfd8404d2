"""What there is to know of one way to write tool calls."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ..cursor import Cursor, Step
from .calls import Calls

Schema = Mapping[str, Any]


@dataclass(frozen=True)
class Tag:
    """How one call is written around its arguments: as xgrammar's structural tags want it.

    ``content`` is the kind of a structural tag's content that holds the arguments' schema.
    """

    begin: str
    end: str
    content: str = "json_schema"


@dataclass(frozen=True)
class Layout:
    """How calls are written one after the other, where their form can be demanded of the model.

    ``trigger`` begins every ``Tag.begin``; ``before``, ``between`` and ``after`` stand around and between the calls.
    """

    tag: Callable[[str], Tag]
    trigger: str
    before: str = ""
    between: str = ""
    after: str = ""


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
