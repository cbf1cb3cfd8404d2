"""Figures of a simulation for people."""

from __future__ import annotations

from ...common.bench.report.goodput import Slo
from ...common.bench.report.table import times
from .figures import Figures


def table(figures: Figures, slo: Slo | None = None) -> str:
    """Counts and rates, times, then the servers."""
    return "\n".join([*_counts(figures, slo), "", *times(figures), "", *servers(figures)])


def _counts(figures: Figures, slo: Slo | None) -> list[str]:
    rate = figures.rate
    lines = [_line("cluster", f"{figures.cluster}, {figures.gpus} GPUs"),
             _line("requests", f"{figures.completed:,} of {figures.requests:,} answered in {figures.seconds:,.1f} s"),
             _line("throughput", f"{rate(figures.completed):,.2f} req/s, "
                                 f"input {rate(figures.input_tokens):,.0f} tok/s, "
                                 f"output {rate(figures.output_tokens):,.0f} tok/s "
                                 f"({rate(figures.output_tokens) / figures.gpus:,.0f} a GPU)"),
             _line("cache hits", f"{figures.cached_tokens:,} prompt tokens ({figures.hit_rate:.1%})")]
    if figures.transfer_bytes:
        lines.append(_line("transfers", f"{figures.transfer_bytes / 1e9:,.1f} GB, the busiest link for "
                                        f"{figures.link_busy:.1%} of the time"))
    if figures.retractions:
        lines.append(_line("retractions", f"{figures.retractions:,}"))
    if slo is not None and figures.good is not None:
        lines.append(_line("goodput", f"{rate(figures.good):,.2f} req/s, {figures.attainment:.1%} of the requests "
                                      f"within {slo}"))
    lines += [_line("failed", f"{count:,} x {why}") for why, count in figures.failed.items()]
    lines.append(_line("simulated", f"in {figures.cpu_seconds:.2f} s of CPU time: {figures.speed:,.0f} times as fast"))
    return lines


def _line(name: str, value: str) -> str:
    return f"{name:<12}{value}"


def servers(figures: Figures) -> list[str]:
    """A row for each server: the share of its time that its device computed, and what."""
    rows = [f"{'server':<12}{'busy':>9}{'prefill':>9}{'decode':>9}{'API':>9}{'batch':>9}{'steps':>11}"]
    for server in figures.servers:
        shares = (figures.utilisation(server), figures.rate(server.prefill_seconds),
                  figures.rate(server.decode_seconds), figures.rate(server.api_seconds))
        rows.append(f"{server.name:<12}" + "".join(f"{share:>9.1%}" for share in shares)
                    + f"{server.mean_batch:>9.1f}{server.num_prefill_steps + server.num_decode_steps:>11,}")
    return rows
