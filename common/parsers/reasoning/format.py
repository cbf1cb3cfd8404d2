"""The description of one format of reasoning."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ReasoningFormat:
    """One format of reasoning; ``opener`` and ``closer`` surround the reasoning at the beginning of an answer.

    ``always``: the model reasons without an opener (its template has opened the reasoning). ``interrupters`` end
    reasoning as the closer does, but belong to what follows. ``harmony``: written on channels, without a closer.
    """

    opener: str = "<think>"
    closer: str = "</think>"
    always: bool = False
    interrupters: tuple[str, ...] = ()
    harmony: bool = False
