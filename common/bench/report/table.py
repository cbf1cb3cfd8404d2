"""Figures for people."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from .figures import Figures
from .goodput import Slo
from .spread import Spread

_COLUMNS = ("mean", "p50", "p90", "p95", "p99", "max")


def table(figures: Figures, slo: Slo | None = None, *, notes: Iterable[str] = ()) -> str:
    """Counts and rates, then times; ``notes`` last, a line each."""
    return "\n".join([*_counts(figures, slo), "", *times(figures), *notes])


def _counts(figures: Figures, slo: Slo | None) -> list[str]:
    total = figures.completed + figures.num_failed + figures.interrupted
    lines = [_line("requests", f"{figures.completed:,} of {total:,} answered in {figures.duration:.2f} s"),
             _line("throughput", f"{figures.rate(figures.completed):,.2f} req/s, input "
                                 f"{figures.rate(figures.input_tokens):,.1f} tok/s, output "
                                 f"{figures.rate(figures.output_tokens):,.1f} tok/s"),
             _line("tokens", f"{figures.input_tokens:,} in, {figures.output_tokens:,} out"),
             _line("concurrency", f"{figures.concurrency:.2f}")]
    if figures.late.count:
        lines.append(_line("sent late", f"by {figures.late.p50:,.2f} ms at p50, {figures.late.p99:,.2f} ms at p99"))
    if figures.cached is not None:
        lines.append(_line("cache hits", f"{figures.cached:,} prompt tokens ({figures.hit_rate or 0:.1%})"))
    if figures.drafted is not None:
        lines.append(_line("drafts", str(figures.drafted)))
    if slo is not None and figures.good is not None:
        lines.append(_line("goodput", f"{figures.rate(figures.good):,.2f} req/s, {figures.good:,} of {total:,} "
                                      f"within {slo}"))
    lines += [_line("failed", f"{count:,} x {kind}") for kind, count in figures.failed.items()]
    if figures.interrupted:
        lines.append(_line("interrupted", f"{figures.interrupted:,} requests have no answer"))
    if figures.short:
        lines.append(_line("short", f"{figures.short:,} answers have fewer tokens than asked for"))
    return lines


def _line(name: str, value: str) -> str:
    return f"{name:<12}{value}"


class Latencies(Protocol):
    """Spreads in milliseconds."""

    @property
    def ttft(self) -> Spread: ...

    @property
    def tpot(self) -> Spread: ...

    @property
    def itl(self) -> Spread: ...

    @property
    def e2e(self) -> Spread: ...


def times(figures: Latencies) -> list[str]:
    """Rows of milliseconds, of what was seen."""
    rows = [f"{'ms':<12}" + "".join(f"{column:>11}" for column in _COLUMNS)]
    for name in ("ttft", "tpot", "itl", "e2e"):
        spread: Spread = getattr(figures, name)
        if spread.count:
            rows.append(f"{name.upper():<12}" + "".join(f"{getattr(spread, column):>11,.2f}" for column in _COLUMNS))
    return rows
