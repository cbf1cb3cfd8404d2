"""What KV tiers cost where nothing is used again: a server with host memory behind its pool beside one without.

    python -m baton.tests.bench.tier_cost --out results.json
    python -m baton.tests.bench.tier_cost --out results.json --shape tinychat    # on a CPU: does the bench itself run?

Both servers stay up, on one GPU; the same workload of random prompts goes to one and the other in turn, so that what
the machine does beside it meets both. With tiers every page is written to host memory (write_through) and none is
loaded. Goal: throughput and the 99th percentile of TTFT within 1 %.
"""

from __future__ import annotations

import argparse
import datetime
import json
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import uvloop

from . import load
from .relay import dummy_flags, unified

FIGURES = ("out_tok_s", "ttft_p50", "ttft_p99", "itl_p50", "itl_p99")


def table(rows: Sequence[dict]) -> str:
    """Medians of the rounds, and the change by tiers; the range of the rounds' changes tells what is noise."""
    found = {tiers: [row for row in rows if row["tiers"] == tiers] for tiers in ("off", "on")}
    lines = ["| | " + " | ".join(FIGURES) + " |", "|" + "---|" * (len(FIGURES) + 1)]
    for tiers, own in found.items():
        lines.append(f"| {tiers} | " + " | ".join(f"{statistics.median(row[name] for row in own):.4g}"
                                                  for name in FIGURES) + " |")
    changes = {name: [100 * (on[name] / off[name] - 1) for off, on in zip(found["off"], found["on"])]
               for name in FIGURES}
    lines.append("| change, % | " + " | ".join(f"{statistics.median(own):+.2f} ({min(own):+.1f} to {max(own):+.1f})"
                                               for own in changes.values()) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--shape", choices=("8b", "tinychat"), default="8b")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--logs", type=Path, default=None)
    args = parser.parse_args()
    logs = args.logs or Path(tempfile.mkdtemp())
    rows: list[dict] = []
    with tempfile.TemporaryDirectory() as folder:
        if args.shape == "8b":
            flags = [*dummy_flags(Path(folder)), "--mem-fraction-static", "0.42", "--max-total-tokens", "150000"]
            work, tiers = load.Workload(1024, 256, 256, 64), ["--hicache-size", "40"]
        else:
            flags = ["--model-path", "tinychat", "--device", "cpu", "--max-total-tokens", "4096"]
            work, tiers = load.Workload(64, 16, 16, 4), ["--hicache-size", "0.1"]
        for name in ("off", "on"):
            (logs / name).mkdir(parents=True, exist_ok=True)
        with unified(flags, logs / "off") as off, \
                unified([*flags, "--enable-hierarchical-cache", *tiers], logs / "on") as on:
            for url in (off, on):
                uvloop.run(load.run(url, load.Workload(work.input_tokens, 16, 64, 16), seed=1000))
            for number in range(args.rounds):
                for name, url in (("off", off), ("on", on)):
                    rows.append({"tiers": name, **uvloop.run(load.run(url, work, seed=number))})
    args.out.write_text(json.dumps({"date": datetime.date.today().isoformat(), "command": " ".join(sys.argv),
                                    "rows": rows}, indent=1))
    print(table(rows))


if __name__ == "__main__":
    main()
