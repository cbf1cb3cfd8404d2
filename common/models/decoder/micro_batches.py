"""Interleaves the micro-batches of a step: one computes while rows of the other travel between attention groups."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import TypeVar

T = TypeVar("T")


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
