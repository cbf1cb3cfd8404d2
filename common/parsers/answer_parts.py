"""What a model's answer is made of, and who finds it out while the text arrives."""

from __future__ import annotations

from typing import NamedTuple, Protocol


class Thought(NamedTuple):
    """A piece of the reasoning before (or between) what is meant for the user."""

    text: str


class CallBegun(NamedTuple):
    """A tool call begins; its arguments follow in pieces."""

    name: str


class Arguments(NamedTuple):
    """A piece of the latest call's arguments, which together are JSON as far as the model wrote JSON."""

    text: str


Part = str | Thought | CallBegun | Arguments
"""Plain strings are content."""


class Reader(Protocol):
    """Takes an answer's text in pieces. What has come out after a text does not depend on how that was cut."""

    def push(self, text: str) -> list[Part]: ...

    def finish(self) -> list[Part]:
        """What was held back, now that no more will come."""

    @property
    def thought_spans(self) -> list[tuple[int, int]]:
        """Where in the text, in characters, reasoning and its markup stand."""


def joined(parts: list[Part]) -> list[Part]:
    """The same with neighbours of one kind made one, and without empty ones: what the pieces come to."""
    found: list[Part] = []
    for part in parts:
        if isinstance(part, CallBegun):
            found.append(part)
        elif not (part if isinstance(part, str) else part.text):
            continue
        elif found and type(found[-1]) is type(part):
            last = found[-1]
            found[-1] = last + part if isinstance(last, str) else type(part)(last.text + part.text)  # type: ignore
        else:
            found.append(part)
    return found
