"""Figures of ``bench_kvtransfer``, and charts of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ...common.bench.report.svg import Chart, Line, page


@dataclass(frozen=True)
class Figure:
    """One case. Seconds run from the first push to the receiver's DONE; ``gb_s`` is 1e9 bytes over the median."""

    tp: str
    page_size: int
    descriptor_kib: float
    prompt_tokens: int
    mib: float
    order: str
    gb_s: float
    best_gb_s: float
    p50_ms: float
    p99_ms: float
    right: bool


def draw(figures: Sequence[Figure], ceiling: dict[str, float]) -> str:
    """Draws an SVG: a chart for each pair of sizes, page size and order, a line for each size of descriptors; what the
    machine can copy (GB/s by its name) is drawn across."""
    charts = []
    for tp, page_size, order in dict.fromkeys((figure.tp, figure.page_size, figure.order) for figure in figures):
        of_case = [f for f in figures if (f.tp, f.page_size, f.order) == (tp, page_size, order)]
        lines = [Line(sorted((f.mib, f.gb_s) for f in of_case if f.descriptor_kib == kib), f"{kib:g} KiB")
                 for kib in dict.fromkeys(f.descriptor_kib for f in of_case)]
        longest = max(f.mib for f in of_case)
        lines += [Line([(0.0, rate), (longest, rate)], name) for name, rate in ceiling.items()]
        charts.append(Chart(f"{tp}, pages of {page_size} tokens, {order}", "MiB of a prompt", "GB/s", lines))
    return page("KV pages between processes, by size of descriptors", charts)
