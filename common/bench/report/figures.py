"""The figures of a run."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..client.answer import Answer
from .draft_figures import DraftFigures
from .goodput import Slo
from .spread import Spread


@dataclass(frozen=True)
class Figures:
    """Figures over the answered requests, except ``failed`` and ``interrupted``. Spreads are in milliseconds.

    ``concurrency``: requests that were open, on average. ``good``: those within the SLO; None without one.
    ``cached``: prompt tokens from a prefix cache; None where the server does not report them.
    ``short``: answers with fewer tokens than asked for. ``late``: seconds from a request's arrival time to its sending,
    because of the concurrency limit or the client's own delays; only of runs whose requests have arrival times.
    ``drafted``: of a server that drafts.
    """

    duration: float
    completed: int
    failed: dict[str, int]
    interrupted: int
    input_tokens: int
    output_tokens: int
    cached: int | None
    short: int
    concurrency: float
    good: int | None
    ttft: Spread
    tpot: Spread
    itl: Spread
    e2e: Spread
    late: Spread
    drafted: DraftFigures | None = None

    @property
    def num_failed(self) -> int:
        return sum(self.failed.values())

    def rate(self, count: float) -> float:
        """``count`` per second."""
        return count / self.duration if self.duration > 0 else math.nan

    @property
    def hit_rate(self) -> float | None:
        """Share of the prompt tokens that a prefix cache had."""
        return None if self.cached is None or not self.input_tokens else self.cached / self.input_tokens

    def keyed(self) -> dict[str, Any]:
        """SGLang's keys, then ours."""
        return {
            "duration": self.duration, "completed": self.completed, "total_input_tokens": self.input_tokens,
            "total_output_tokens": self.output_tokens, "request_throughput": self.rate(self.completed),
            "input_throughput": self.rate(self.input_tokens), "output_throughput": self.rate(self.output_tokens),
            "total_throughput": self.rate(self.input_tokens + self.output_tokens),
            **self.e2e.keyed("e2e_latency_ms"), **self.ttft.keyed("ttft_ms"), **self.tpot.keyed("tpot_ms"),
            **self.itl.keyed("itl_ms"), "concurrency": self.concurrency,
            "failed": self.failed, "interrupted": self.interrupted, "short_answers": self.short,
            "total_cached_tokens": self.cached, "cache_hit_rate": self.hit_rate,
            "request_goodput": None if self.good is None else self.rate(self.good),
            **self.late.keyed("send_lag_ms"), **({} if self.drafted is None else self.drafted.keyed()),
        }


def figures(answers: Sequence[Answer], duration: float, *, interrupted: int = 0, slo: Slo | None = None,
            timed: bool = False) -> Figures:
    """``interrupted``: requests that were planned and have no answer, not even a failed one. ``timed``: requests were
    due at times of their own."""
    done = [answer for answer in answers if answer.failure is None]
    cached = [answer.num_cached for answer in done if answer.num_cached is not None]
    e2e = [answer.e2e for answer in done if answer.e2e is not None]
    return Figures(
        duration=duration, completed=len(done), interrupted=interrupted,
        failed=dict(Counter(answer.failure.kind for answer in answers if answer.failure is not None).most_common()),
        input_tokens=sum(answer.num_input_tokens for answer in done),
        output_tokens=sum(answer.num_output_tokens for answer in done),
        cached=sum(cached) if cached else None,
        short=sum(answer.num_output_tokens < answer.output_len for answer in done),
        concurrency=math.fsum(e2e) / duration if duration > 0 else math.nan,
        good=None if slo is None else sum(map(slo.kept_by, answers)),
        ttft=_ms([answer.ttft for answer in done]), tpot=_ms([answer.tpot for answer in done]),
        itl=_ms([gap for answer in done for gap in answer.gaps]), e2e=_ms(e2e),
        late=_ms([answer.sent - answer.due for answer in answers if timed and answer.sent]),
        drafted=DraftFigures.of((answer.drafted, answer.num_output_tokens) for answer in done))


def _ms(seconds: Sequence[float | None]) -> Spread:
    return Spread.of([value * 1e3 for value in seconds if value is not None])
