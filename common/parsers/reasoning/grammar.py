"""Grammars of answers that may begin with reasoning."""

from __future__ import annotations

from ..harmony import CHANNEL, END, MESSAGE, START
from ..structural_tags import ANY_TEXT, Node, const, optional, sequence, tag
from .format import ReasoningFormat


def reasoning_before(reasoning: ReasoningFormat, inside: bool) -> list[Node]:
    """The reasoning that may precede an answer; its rest, where the prompt has opened it (``inside``)."""
    if reasoning.harmony:
        return [optional(tag(f"{CHANNEL}analysis{MESSAGE}", ANY_TEXT, f"{END}{START}assistant"))]
    space: Node = {"type": "regex", "pattern": r"\n{0,2}"}
    reasoning_text = sequence([tag("" if inside else reasoning.opener, ANY_TEXT, reasoning.closer), space])
    return [reasoning_text if inside else optional(reasoning_text)]


def answer_head(harmony: bool) -> Node | None:
    """The markup between reasoning and an answer that is no call."""
    return const(f"{CHANNEL}final{MESSAGE}") if harmony else None
