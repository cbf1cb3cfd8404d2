"""What KV tiers cost where nothing is used again: a server with host memory behind its pool beside one without.

    python -m baton.tests.bench.tier_cost --out results.json
    python -m baton.tests.bench.tier_cost --out results.json --shape tinychat    # on a CPU: does the bench itself run?

Both servers stay up, on one GPU; the same workload of random prompts goes to one and the other in turn, so that what
the machine does besides meets both. With tiers every page is written to host memory (write_through) and none is
loaded. Goal: throughput and the 99th percentile of TTFT within 1 %. Rounds that began before all host memory was pinned
are a row of their own. ``--first on`` asks in the other order: run both orders, on two GPUs at once if there are two.
"""

from __future__ import annotations

import argparse
import datetime
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import uvloop

from ..helpers.harness import Server
from ..helpers.ports import free_port
from . import load
from .relay import dummy_flags

FIGURES = ("out_tok_s", "ttft_p50", "ttft_p99", "itl_p50", "itl_p99")


def table(rows: Sequence[dict]) -> str:
    """Medians of the rounds, and the change by tiers; the range of the rounds' changes shows what is noise."""
    lines = ["| | rounds | " + " | ".join(FIGURES) + " |", "|" + "---|" * (len(FIGURES) + 2)]
    for pinning in (True, False):
        own = [row for row in rows if row["pinning"] == pinning]
        found = {tiers: [row for row in own if row["tiers"] == tiers] for tiers in ("off", "on")}
        for tiers, each in found.items():
            if each:
                lines.append(f"| {tiers}{', while memory is pinned' * pinning} | {len(each)} | " + " | ".join(
                    f"{statistics.median(row[name] for row in each):.4g}" for name in FIGURES) + " |")
        changes = {name: [100 * (on[name] / off[name] - 1) for off, on in zip(found["off"], found["on"])]
                   for name in FIGURES}
        if own:
            lines.append("| change, % | | " + " | ".join(
                f"{statistics.median(each):+.2f} ({min(each):+.1f} to {max(each):+.1f})"
                for each in changes.values()) + " |")
    return "\n".join(lines)


def host_tokens(server: Server) -> float:
    """Tokens that the server's pinned memory can hold by now."""
    gauge: float = server.state()["gauges"]["hicache_host_total_tokens"]
    return gauge


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--shape", choices=("8b", "tinychat"), default="8b")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--first", choices=("off", "on"), default="off", help="which is asked first in a round")
    parser.add_argument("--server-flags", default="", help="more flags of both servers")
    parser.add_argument("--seconds", type=float, default=600.0, help="begin no round after this time")
    parser.add_argument("--logs", type=Path, default=None)
    args = parser.parse_args()
    logs = args.logs or Path(tempfile.mkdtemp())
    rows: list[dict] = []
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        if args.shape == "8b":
            flags = [*dummy_flags(Path(folder)), "--mem-fraction-static", "0.45", "--max-total-tokens", "120000"]
            work, tiers = load.Workload(1024, 256, 256, 64), ["--hicache-size", "40"]
        else:
            flags = ["--model-path", "tinychat", "--device", "cpu", "--max-total-tokens", "4096"]
            work, tiers = load.Workload(64, 16, 16, 4), ["--hicache-size", "0.1"]
        flags += args.server_flags.split()
        more = {"off": [], "on": ["--enable-hierarchical-cache", *tiers]}
        names = ("off", "on") if args.first == "off" else ("on", "off")
        logs.mkdir(parents=True, exist_ok=True)
        servers = {name: Server("baton.launch", ["server", *flags, *more[name]], free_port(), logs / f"{name}.log")
                   for name in names}
        try:
            for server in servers.values():
                server.start()
            for server in servers.values():
                server.wait_ready(300)
                uvloop.run(load.run(server.url, load.Workload(work.input_tokens, 16, 64, 16), seed=1000))
            for number in range(args.rounds):
                if time.monotonic() - began > args.seconds:
                    break
                pinned, own = host_tokens(servers["on"]), []
                for name in names:
                    own.append({"tiers": name, **uvloop.run(load.run(servers[name].url, work, seed=number))})
                pinning = host_tokens(servers["on"]) > pinned
                rows += [{"pinning": pinning, **row} for row in own]
                args.out.write_text(json.dumps({"date": datetime.date.today().isoformat(),
                                                "command": " ".join(sys.argv), "rows": rows}, indent=1))
        finally:
            for server in servers.values():
                server.stop(40)
    print(table(rows))


if __name__ == "__main__":
    main()
