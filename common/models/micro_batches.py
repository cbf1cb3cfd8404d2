"""Two halves of a step: one computes while rows of the other travel between attention groups."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import NamedTuple, TypeVar

from ..attention.base import AttentionPlanner
from ..distributed.token_exchange import TokenExchange

T = TypeVar("T")


class MicroBatch(NamedTuple):
    """Rows ``begin:end`` of the step. ``attention`` has planned them, and ``tokens`` knows how many rows of this half
    every attention group has."""

    begin: int
    end: int
    attention: AttentionPlanner
    tokens: TokenExchange


def in_turns(works: Sequence[Generator[None, None, T]]) -> list[T]:
    """What the works return. Each in turn goes on to where it would wait for what it has sent, so that the others'
    work is enqueued behind its own before it waits."""
    results: dict[int, T] = {}
    while len(results) < len(works):
        for place, work in enumerate(works):
            if place in results:
                continue
            try:
                next(work)
            except StopIteration as ended:
                results[place] = ended.value
    return [results[place] for place in range(len(works))]
