"""The parts of a model's answer, and the interface of the parsers that find them in its text."""

from __future__ import annotations

from typing import NamedTuple, Protocol


class ReasoningDelta(NamedTuple):
    """A delta of the reasoning that precedes (or interrupts) the content."""

    text: str


class ToolCallStart(NamedTuple):
    """The beginning of a tool call; its arguments follow as deltas."""

    name: str


class ToolArgumentsDelta(NamedTuple):
    """A delta of the latest call's arguments, which together are JSON as far as the model wrote JSON."""

    text: str


OutputDelta = str | ReasoningDelta | ToolCallStart | ToolArgumentsDelta
"""A delta of an answer; plain strings are content."""


class OutputParser(Protocol):
    """Parses an answer's text incrementally. The joined output does not depend on how the text was split."""

    def push(self, text: str) -> list[OutputDelta]: ...

    def finish(self) -> list[OutputDelta]:
        """The buffered rest, at the end of the text."""

    @property
    def reasoning_spans(self) -> list[tuple[int, int]]:
        """The spans of reasoning and its markup in the text, in characters."""


def joined(parts: list[OutputDelta]) -> list[OutputDelta]:
    """The parts with neighbours of one kind joined, and without empty ones."""
    merged: list[OutputDelta] = []
    for part in parts:
        if isinstance(part, ToolCallStart):
            merged.append(part)
        elif not (part if isinstance(part, str) else part.text):
            continue
        elif merged and type(merged[-1]) is type(part):
            last = merged[-1]
            merged[-1] = last + part if isinstance(last, str) else type(part)(last.text + part.text)  # type: ignore
        else:
            merged.append(part)
    return merged
