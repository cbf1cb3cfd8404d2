"""The description of one format of tool calls."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from ..cursor import Cursor, Step
from .call_emitter import CallEmitter


@dataclass(frozen=True)
class Tag:
    """The text around one call's arguments; they are JSON, or xgrammar's ``style`` of writing an object."""

    begin: str
    end: str
    style: str = "json"


@dataclass(frozen=True)
class Layout:
    """The layout of consecutive calls, for formats that a grammar can enforce.

    ``before``, ``between`` and ``after`` surround and separate the calls. ``trigger``: free text must not hold it
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
    """One format of tool calls; ``script`` parses answers of this format.

    ``markers`` are the format's own markup, which must survive detokenizing even where it consists of special tokens.
    ``signs``: a chat template that holds all the strings of one of these sets is of this format. Templates of a special
    format may hold the signs of a general one, too: the format of the least ``generality`` is taken.
    """

    script: Callable[[Cursor, CallEmitter], Step[None]]
    markers: tuple[str, ...] = ()
    signs: tuple[frozenset[str], ...] = field(default=())
    layout: Layout | None = None
    generality: int = 0
