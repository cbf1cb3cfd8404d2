"""``bench_calibrate``: measures a server for about two minutes and writes its cost table."""

from __future__ import annotations

import gc
import json
from collections.abc import Sequence
from dataclasses import asdict

import numpy as np
import uvloop

from ...common.bench.report.report import check_writable, write_text
from ...common.config.cli import parse
from ..costs.model import Costs
from .args import Calibrate
from .fit import Fitted, fit
from .measure import measure_pair, measure_server
from .samples import Samples


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the command. Raises ConfigError."""
    run(parse(Calibrate, argv, prog="bench_calibrate", description=(
        "Measure a server that serves nothing else, and write its cost table for baton_simulate and baton_plan.")))


def run(config: Calibrate) -> None:
    """Measures, fits, and writes. Raises ConfigError."""
    args = config.calibrate
    check_writable(args.output_file, "--output-file")
    check_writable(args.samples_file, "--samples-file")
    samples = Samples()
    gc.collect()
    gc.freeze()
    uvloop.run(measure_server(config, samples))
    if args.pair_url is not None:
        uvloop.run(measure_pair(config, samples))
    if args.samples_file is not None:
        write_text(args.samples_file, json.dumps(asdict(samples), indent=1), "--samples-file")
    fitted = fit(samples, name=args.table_name, gpus=args.gpus, layer_groups=args.layer_groups,
                 description=args.description)
    write_text(args.output_file, fitted.costs.to_json().decode(), "--output-file")
    print(shown(fitted))


def shown(fitted: Fitted) -> str:
    """The table, and how well it fits."""
    lines = [*_rows(fitted.costs), "", "error of the table against its own samples: mean of amounts, largest"]
    for kind, errors in fitted.errors.items():
        if errors:
            amounts = np.abs(errors)
            lines.append(f"{kind:<16}{amounts.mean():>8.1%}{amounts.max():>8.1%}  of {len(errors)}")
    return "\n".join(lines)


def _rows(costs: Costs) -> list[str]:
    steps, requests, transfer = costs.steps, costs.requests, costs.transfer
    base = ", ".join(f"{batch}: {ms:.2f}" for batch, ms in zip(steps.decode_batches, steps.decode_base))
    return [
        f"{costs.name}: {costs.model}, {costs.kv_tokens:,} tokens of KV cache",
        f"prefill   {steps.prefill_step:.2f} ms a step, {steps.prefill_token * 1e3:.2f} us a token, "
        f"{steps.prefill_context * 1e6:.3f} ns a pair of tokens, {steps.host_prefill:.2f} ms to launch one",
        f"decode    ms by requests {base}; {steps.decode_context * 1e6:.1f} ns a token of context",
        f"requests  {requests.request:.2f} + {requests.answer:.2f} ms around the engine, "
        f"{requests.api_request:.2f} ms of the API server, {requests.api_token * 1e3:.0f} us a token",
        f"transfer  {transfer.bandwidth:.1f} GB/s, {transfer.latency:.2f} ms",
    ]
