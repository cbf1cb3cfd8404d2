"""A run's figures as charts: latency distributions, throughput and open requests over time."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from ..client.answer import Answer
from .spread import percentile
from .svg import Chart, Line, page

_POINTS = 200  # of a line
_BINS = 120


def draw(title: str, answers: Sequence[Answer], begin: float, duration: float) -> str:
    """SVG. ``begin``: the clock at the run's beginning."""
    done = [answer for answer in answers if answer.failure is None]
    gaps = [gap for answer in done for gap in answer.gaps]
    charts = [
        Chart("Time to first token", "ms", "% of requests", [cumulative(answer.ttft for answer in done)]),
        Chart("Between events of a stream", "ms", "% of gaps", [cumulative(gaps)]),
        Chart("Time per output token", "ms", "% of requests", [cumulative(answer.tpot for answer in done)]),
        Chart("End-to-end latency", "ms", "% of requests", [cumulative(answer.e2e for answer in done)]),
        Chart("Output tokens", "s", "tok/s", [tokens_a_second(done, begin, duration)]),
        Chart("Open requests", "s", "requests", [open_requests(done, begin)]),
    ]
    return page(title, charts)


def cumulative(seconds: Iterable[float | None]) -> Line:
    """The cumulative distribution: percent of values up to a number of milliseconds."""
    ordered = sorted(value * 1e3 for value in seconds if value is not None)
    if not ordered:
        return Line([])
    return Line([(percentile(ordered, 100 * i / _POINTS), 100 * i / _POINTS) for i in range(_POINTS + 1)])


def tokens_a_second(answers: Sequence[Answer], begin: float, duration: float) -> Line:
    """Each event counts for an equal share of its answer's tokens; the line's points are the middles of equal bins."""
    width = max(duration, 1e-9) / _BINS
    bins = [0.0] * _BINS
    for answer in answers:
        now = answer.first
        for gap in (0.0, *answer.gaps):
            if now is not None:
                now += gap
                bins[min(_BINS - 1, max(0, int((now - begin) / width)))] += answer.num_output_tokens / answer.num_events
    return Line([((i + 0.5) * width, count / width) for i, count in enumerate(bins)])


class Ended(Protocol):
    """A request with the clock when it was sent and when it ended, if it did."""

    @property
    def sent(self) -> float: ...

    @property
    def last(self) -> float | None: ...


def open_requests(answers: Sequence[Ended], begin: float) -> Line:
    """Requests sent and not ended, as a step function."""
    changes = [(answer.sent - begin, 1) for answer in answers if answer.last is not None]
    changes += [(answer.last - begin, -1) for answer in answers if answer.last is not None]
    points, count = [(0.0, 0.0)], 0
    for at, change in sorted(changes):
        points += [(at, float(count)), (at, float(count + change))]
        count += change
    stride = max(1, len(points) // (20 * _POINTS))
    return Line(points[::stride])
