"""``baton_plan``: the cheapest cluster for a workload and an objective."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace

from ...common.api.errors import ConfigError
from ...common.bench.report.report import append_line, check_writable, write_text
from ...common.config.cli import parse
from ...common.config.command import command
from ..workload.make import make_workload
from .args import DEFAULT_REQUESTS, Plan

_LEAST_REQUESTS = 20


@command("baton_plan")
def main(argv: Sequence[str] | None = None) -> None:
    run(parse(Plan, argv, prog="baton_plan", description=(
        "Find the cheapest cluster that serves a workload within an objective, by simulation, and print its commands "
        "and Helm values.")))


def run(config: Plan) -> None:
    """Search and report; exits with 1 where no cluster of the budget meets the objective. Raises ConfigError."""
    from .commands import helm_values
    from .report import frontier, html, record, text
    from .search import search

    args = config.plan
    for path, flag in ((args.output_file, "--output-file"), (args.html, "--html"), (args.plot, "--plot"),
                       (args.helm_values, "--helm-values")):
        check_writable(path, flag)
    requests = make_workload(replace(config.workload, num_requests=config.workload.num_requests or DEFAULT_REQUESTS))
    if len(requests) < _LEAST_REQUESTS:
        raise ConfigError(f"A plan takes {_LEAST_REQUESTS} requests or more, this workload has {len(requests)}.")
    found = search(config, requests, lambda line: print(line, file=sys.stderr, flush=True))
    print(text(found, args.model_path))
    if args.output_file is not None:
        append_line(args.output_file, record(found, args.model_path))
    if args.html is not None:
        write_text(args.html, html(found, args.model_path), "--html")
    if args.plot is not None:
        write_text(args.plot, frontier(found), "--plot")
    if args.helm_values is not None and found.chosen is not None:
        write_text(args.helm_values, helm_values(found.chosen.candidate, args.model_path), "--helm-values")
    if found.chosen is None:
        sys.exit(1)


if __name__ == "__main__":
    main()
