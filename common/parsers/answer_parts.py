"""The parts of a model's answer, and the interface of the parsers that find them in its text."""

from __future__ import annotations

from typing import NamedTuple, Protocol


class Thought(NamedTuple):
    """A delta of the reasoning that precedes (or interrupts) the content."""

    text: str


class CallBegun(NamedTuple):
    """The beginning of a tool call; its arguments follow as deltas."""

    name: str


class Arguments(NamedTuple):
    """A delta of the latest call's arguments, which together are JSON as far as the model wrote JSON."""

    text: str


Part = str | Thought | CallBegun | Arguments
"""A delta of an answer; plain strings are content."""


class Reader(Protocol):
    """Parses an answer's text incrementally. The joined output does not depend on how the text was split."""

    def push(self, text: str) -> list[Part]: ...

    def finish(self) -> list[Part]:
        """The buffered rest, at the end of the text."""

    @property
    def reasoning_spans(self) -> list[tuple[int, int]]:
        """The spans of reasoning and its markup in the text, in characters."""


def joined(parts: list[Part]) -> list[Part]:
    """The parts with neighbours of one kind joined, and without empty ones."""
    merged: list[Part] = []
    for part in parts:
        if isinstance(part, CallBegun):
            merged.append(part)
        elif not (part if isinstance(part, str) else part.text):
            continue
        elif merged and type(merged[-1]) is type(part):
            last = merged[-1]
            merged[-1] = last + part if isinstance(last, str) else type(part)(last.text + part.text)  # type: ignore
        else:
            merged.append(part)
    return merged
