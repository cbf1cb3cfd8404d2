"""A plan as text, JSON, and a page with the frontier."""

from __future__ import annotations

from typing import Any

from ...common.bench.report.svg import Chart, Line, page
from ..results.plots import html_page
from .commands import commands, helm_values
from .search import Found, Result

_MOST_ROWS = 24


def text(found: Found, model: str) -> str:
    """The candidates, then the chosen cluster with its commands."""
    return "\n".join([_objective(found), "", *rows(found), "", *_check(found), "", *_chosen(found, model)])


def _objective(found: Found) -> str:
    traffic = found.traffic
    return (f"{traffic.rate:.2f} requests a second of {traffic.input_len:,.0f} (cv {traffic.input_cv:.2f}) and "
            f"{traffic.output_len:,.0f} (cv {traffic.output_cv:.2f}) tokens; objective: {found.objective}")


def rows(found: Found) -> list[str]:
    """The simulated clusters, the nearest to the objective first in each number of GPUs."""
    lines = [f"{'cluster':<14}{'GPUs':>5}{'within':>8}{'TTFT p99':>10}{'TPOT p99':>10}{'tok/s/user':>12}"
             f"{'tok/s/GPU':>11}{'hits':>7}  flags"]
    shown = sorted(found.results, key=lambda each: (each.figures.gpus, found.objective.distance(each.figures)))
    for result in shown[-_MOST_ROWS:]:
        figures = result.figures
        within = "-" if figures.attainment is None else f"{figures.attainment:.1%}"
        mark = "*" if result is found.chosen else " "
        lines.append(f"{result.candidate.name:<13}{mark}{figures.gpus:>5}{within:>8}{figures.ttft.p99:>10,.0f}"
                     f"{figures.tpot.p99:>10,.2f}{result.interactivity:>12,.1f}{result.throughput_per_gpu:>11,.0f}"
                     f"{figures.hit_rate:>7.0%}  {result.candidate.flags}")
    if len(shown) > _MOST_ROWS:
        lines.append(f"({len(shown) - _MOST_ROWS} smaller ones are not shown)")
    lines.append(f"{len(found.ruled_out)} clusters were ruled out by the closed form")
    return lines


def _check(found: Found) -> list[str]:
    """The closed form and the simulation, for the clusters that the former calls stable."""
    lines = [f"closed form (Kingman, Erlang, Little)  {'TTFT mean':>12}{'simulated':>11}{'error':>8}{'TPOT mean':>12}"
             f"{'simulated':>11}{'error':>8}"]
    stable = [each for each in found.results if each.candidate.predicted.stable]
    for result in stable[-6:]:
        predicted, figures = result.candidate.predicted, result.figures
        ttft, tpot = figures.ttft.mean, figures.tpot.mean
        lines.append(f"{result.candidate.name:<39}{predicted.ttft_mean:>12,.1f}{ttft:>11,.1f}"
                     f"{predicted.ttft_mean / ttft - 1:>+8.1%}{predicted.tpot_mean:>12,.2f}{tpot:>11,.2f}"
                     f"{predicted.tpot_mean / tpot - 1:>+8.1%}")
    if not stable:
        lines.append("none of them is stable by the closed form")
    return lines


def _chosen(found: Found, model: str) -> list[str]:
    if found.chosen is None:
        return ["No cluster within --max-gpus meets the objective: allow more GPUs, relax the objective, or name other "
                "cost tables."]
    result = found.chosen
    candidate = result.candidate
    lines = [f"Cheapest: {candidate.name}, {result.figures.gpus} GPUs ({candidate.flags})"]
    if found.capacity is not None:
        lines.append(f"It meets the objective up to {found.capacity:.1f} requests a second.")
    return [*lines, "", commands(candidate, model), "", "# values of deploy/helm/baton", helm_values(candidate, model)]


def record(found: Found, model: str) -> dict[str, Any]:
    """The plan for machines."""
    chosen = found.chosen
    return {
        "objective": str(found.objective), "rate": found.traffic.rate, "capacity": found.capacity,
        "chosen": None if chosen is None else _keyed(chosen),
        "commands": None if chosen is None else commands(chosen.candidate, model),
        "helm_values": None if chosen is None else helm_values(chosen.candidate, model),
        "frontier": [_keyed(each) for each in found.frontier()], "results": [_keyed(each) for each in found.results],
        "ruled_out": [each.name for each in found.ruled_out],
    }


def _keyed(result: Result) -> dict[str, Any]:
    predicted, candidate = result.candidate.predicted, result.candidate
    return {"flags": candidate.flags, "costs": candidate.costs, "prefill_costs": candidate.prefill_costs,
            "interactivity": result.interactivity, "closed_form": {
                "ttft_mean_ms": predicted.ttft_mean, "tpot_mean_ms": predicted.tpot_mean,
                "prefill_usage": predicted.prefill_usage, "stable": predicted.stable}, **result.figures.keyed()}


def frontier(found: Found) -> str:
    """SVG: throughput a GPU against interactivity, and the objective's latencies against GPUs."""
    points = [(each.interactivity, each.throughput_per_gpu) for each in found.frontier()]
    lines = [Line(points, "frontier")]
    lines += [Line([(each.interactivity, each.throughput_per_gpu)], each.candidate.name)
              for each in ([found.chosen] if found.chosen is not None else [])]
    by_gpus: dict[int, Result] = {}
    for result in found.results:
        best = by_gpus.get(result.figures.gpus)
        if best is None or found.objective.distance(result.figures) < found.objective.distance(best.figures):
            by_gpus[result.figures.gpus] = result
    sizes = [(gpus, by_gpus[gpus].figures.ttft.p99) for gpus in sorted(by_gpus)]
    return page("", [
        Chart("Throughput and interactivity", "tokens a second and user (90 % of them)", "output tok/s and GPU", lines),
        Chart("Best cluster of each size", "GPUs", "TTFT p99, ms", [Line(sizes)]),
    ])


def html(found: Found, model: str) -> str:
    return html_page("Plan", [("", text(found, model))], [frontier(found)])
