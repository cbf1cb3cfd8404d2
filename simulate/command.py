"""``baton_simulate``: replays a workload against a described cluster."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ..common.bench.report.goodput import Slo
from ..common.bench.report.report import append_line, check_writable, write_text
from ..common.config.cli import parse
from ..common.config.command import command
from .args import OutputArgs, Simulate
from .results.figures import figures
from .results.plots import draw, html, html_page
from .results.records import Run
from .results.table import table
from .validation.compare import compare, read_measured, shipped, validation_table
from .workload.make import make_workload
from .workload.request import SimRequest, rate_of


@command("baton_simulate")
def main(argv: Sequence[str] | None = None) -> None:
    run(parse(Simulate, argv, prog="baton_simulate", description=(
        "Simulate a cluster under a workload: schedulers, router and transfers are the real ones, on a virtual clock; "
        "steps take what was measured.")))


def run(config: Simulate) -> None:
    """Simulate and report. Raises ConfigError."""
    output = config.output
    for path, flag in ((output.output_file, "--output-file"), (output.html, "--html"), (output.plot, "--plot")):
        check_writable(path, flag)
    if output.validate:
        validate(output)
    else:
        replay(config)


def validate(output: OutputArgs) -> None:
    """Simulate measured runs, and print the errors."""
    runs = [read_measured(Path(path)) for path in output.measured_runs] or shipped()
    text = validation_table([each for run in runs for each in compare(run)])
    print(text)
    if output.html is not None:
        sources = "\n".join(f"{run.name}: {run.date}, {run.table().device}, {run.source}" for run in runs)
        write_text(output.html, html_page("Validation", [("", text), ("Runs", sources)], []), "--html")


def replay(config: Simulate) -> None:
    """Simulate the workload, and report."""
    from .world.cluster import ClusterSpec, simulate

    cluster = config.cluster
    costs, prefill_costs = cluster.loaded()
    requests = make_workload(config.workload)
    spec = ClusterSpec(costs, cluster.num_unified, cluster.prefill, cluster.decode, prefill_costs, config.schedule,
                       config.policy, not cluster.disable_radix_cache, cluster.max_total_tokens)
    _report(config, requests, simulate(requests, spec, seed=config.workload.seed))


def _report(config: Simulate, requests: Sequence[SimRequest], done: Run) -> None:
    slo = Slo.parse(config.output.goodput)
    found = figures(done, slo)
    output = config.output
    title = f"{found.cluster}, {describe(config, requests)}"
    print(table(found, slo))
    if output.output_file is not None:
        record = {"workload": describe(config, requests), "costs": config.cluster.costs, **found.keyed()}
        append_line(output.output_file, record | (details(done) if output.output_details else {}))
    if output.plot is not None:
        write_text(output.plot, draw(title, done), "--plot")
    if output.html is not None:
        write_text(output.html, html(title, done, found, slo), "--html")


def describe(config: Simulate, requests: Sequence[SimRequest]) -> str:
    """The workload in a line."""
    args = config.workload
    source = args.trace or f"{args.input_len}/{args.output_len} tokens"
    return f"{len(requests):,} requests of {source}, {rate_of(requests):.2f} a second, costs {config.cluster.costs}"


def details(done: Run) -> dict[str, list[object]]:
    """A list entry a request; seconds, under the keys of ``bench_serving``."""
    return {
        "input_lens": [outcome.request.input_len for outcome in done.outcomes],
        "output_lens": [outcome.num_tokens for outcome in done.outcomes],
        "cached_lens": [outcome.cached for outcome in done.outcomes],
        "sent": [outcome.sent for outcome in done.outcomes],
        "ttfts": [outcome.ttft for outcome in done.outcomes],
        "e2e_latencies": [outcome.e2e for outcome in done.outcomes],
        "errors": [outcome.error for outcome in done.outcomes],
    }


if __name__ == "__main__":
    main()
