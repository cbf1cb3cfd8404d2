"""A run as charts, and as a page: both are one file without scripts, which needs no network."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

from ...common.bench.report.goodput import Slo
from ...common.bench.report.plot import cumulative, open_requests
from ...common.bench.report.svg import Chart, Line, page
from .figures import Figures
from .records import Outcome, Run
from .table import table

_BINS = 120
_STYLE = ("body{font-family:sans-serif;max-width:960px;margin:2em auto;color:#222}"
          "pre{background:#f5f5f5;padding:1em;overflow-x:auto}")


def charts(run: Run) -> list[Chart]:
    done = [outcome for outcome in run.outcomes if not outcome.error]
    return [
        Chart("Time to first token", "ms", "% of requests", [cumulative(outcome.ttft for outcome in done)]),
        Chart("Time per output token", "ms", "% of requests", [cumulative(outcome.tpot for outcome in done)]),
        Chart("Time to first token over time", "s", "ms", [_means(done)]),
        Chart("Open requests", "s", "requests", [open_requests(done, 0.0)]),
        Chart("Requests sent", "s", "a second", [_rate(outcome.sent for outcome in done)]),
        Chart("End-to-end latency", "ms", "% of requests", [cumulative(outcome.e2e for outcome in done)]),
    ]


def draw(title: str, run: Run) -> str:
    """SVG."""
    return page(title, charts(run))


def html(title: str, run: Run, figures: Figures, slo: Slo | None, notes: Iterable[tuple[str, str]] = (),
         drawings: Sequence[str] | None = None) -> str:
    """A page: the table, the plots (``drawings`` in place of the run's own), and ``notes``, each a heading and a
    text."""
    shown = [draw("", run)] if drawings is None else drawings
    return html_page(title, [("", table(figures, slo)), *notes], shown)


def html_page(title: str, texts: Iterable[tuple[str, str]], drawings: Sequence[str]) -> str:
    """``texts``: a heading, which may be empty, and a text each; the drawings follow the first of them."""
    parts = [f"<!doctype html><html><head><meta charset='utf-8'><title>{escape(title)}</title><style>{_STYLE}</style>"
             f"</head><body><h1>{escape(title)}</h1>"]
    for number, (heading, text) in enumerate(texts):
        parts += [f"<h2>{escape(heading)}</h2>"] if heading else []
        parts.append(f"<pre>{escape(text)}</pre>")
        parts += drawings if not number else []
    return "\n".join([*parts, "</body></html>", ""])


def _means(outcomes: Sequence[Outcome]) -> Line:
    """The mean TTFT of the requests that were sent within each bin."""
    bins: dict[int, list[float]] = {}
    width = max((outcome.sent for outcome in outcomes), default=0.0) / _BINS or 1.0
    for outcome in outcomes:
        bins.setdefault(int(outcome.sent / width), []).append(outcome.ttft * 1e3)
    return Line([((number + 0.5) * width, sum(values) / len(values)) for number, values in sorted(bins.items())])


def _rate(times: Iterable[float]) -> Line:
    at = list(times)
    width = max(at, default=0.0) / _BINS or 1.0
    counts = [0] * (_BINS + 1)
    for time in at:
        counts[int(time / width)] += 1
    return Line([((number + 0.5) * width, count / width) for number, count in enumerate(counts[:_BINS])])
