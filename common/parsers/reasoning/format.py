"""What there is to know of one way to write reasoning."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ReasoningFormat:
    """``opener`` and ``closer`` stand around the reasoning that begins an answer.

    ``always``: the model reasons without saying so (its template has opened the reasoning). ``interrupters`` end
    reasoning as the closer does, but belong to what follows. ``harmony``: written on channels, without a closer.
    """

    opener: str = "<think>"
    closer: str = "</think>"
    always: bool = False
    interrupters: tuple[str, ...] = ()
    harmony: bool = False
