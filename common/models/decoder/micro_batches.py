"""Micro-batches of a step for two-batch overlap: one computes while rows of the other travel between attention
groups."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import NamedTuple, TypeVar

from ...attention.base import AttentionPlanner
from ...distributed.token_exchange import TokenExchange

T = TypeVar("T")


class MicroBatch(NamedTuple):
    """Rows ``start:stop`` of the step. ``attention`` has planned them, and ``token_exchange`` has the number of rows of
    this micro-batch in every attention group."""

    start: int
    stop: int
    attention: AttentionPlanner
    token_exchange: TokenExchange


def run_interleaved(works: Sequence[Generator[None, None, T]]) -> list[T]:
    """Runs generators round-robin, and returns their results.

    Each runs until it would wait for a collective, so that the others' work is enqueued before it waits.
    """
    results: dict[int, T] = {}
    while len(results) < len(works):
        for index, work in enumerate(works):
            if index in results:
                continue
            try:
                next(work)
            except StopIteration as ended:
                results[index] = ended.value
    return [results[index] for index in range(len(works))]
