"""Our router beside others, and beside none, in one run: what a request costs in each, and which targets hold.

    python -m baton.tests.bench.router_compare --routerbench DIR --reps 5 --out compare.json --table compare.md

``DIR`` holds the built harness (``bench.py``, ``loadgen``, ``mock_worker``): mock workers and load client in C, one
core for the router and one for them. The peers' programs come from flags or from the harness's own variables:
BENCH_PY (an interpreter with sglang-router, aiohttp, httptools, uvloop), BENCH_VLLM_PY (one with vllm-router) and
BENCH_SMG (the program); a peer without one is left out. All log warnings only. Repetitions go over all routers in
turn, so that a slow minute of the machine meets all of them. Exit status 1 where a target is missed, 2 where one
could not be measured.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

WHOLE, PAIRS = "whole", "pairs"
OURS = "mine"
PEER = {WHOLE: "sglang-warn", PAIRS: "sglang-pd-warn"}
ROUTER = f"{sys.executable} -m baton.router.launch --host 127.0.0.1 --port {{port}} --log-level warning"
WORKERS = {WHOLE: "--worker-urls {sworkers}", PAIRS: "--pd-disaggregation --prefill {prefill} 8998 --decode {decode}"}
TARGETS = {WHOLE: ["direct", "raw", "sglang-warn", "smg-warn", "vllm-warn", "vllm-rr-warn", OURS],
           PAIRS: ["direct", "raw-pd", "sglang-pd-warn", "smg-pd-warn", "vllm-pd-warn", OURS]}
SCENARIOS = {WHOLE: ["json64", "json1", "spaced", "sblast"], PAIRS: ["json64", "spaced"]}
NAMES = {"direct": "none (direct)", "raw": "floor: raw protocol", "raw-pd": "floor: raw protocol",
         "sglang-warn": "sglang-router", "sglang-pd-warn": "sglang-router", "smg-warn": "smg", "smg-pd-warn": "smg",
         "vllm-warn": "vllm-router", "vllm-pd-warn": "vllm-router", "vllm-rr-warn": "vllm-router, round_robin",
         OURS: "ours"}
BENCH = """
import sys
sys.path.insert(0, sys.argv.pop(1))
import bench
bench.TARGETS["smg-pd-warn"] = bench.TARGETS["smg-pd"] + " --log-level warn"
bench.TARGETS["vllm-pd-warn"] = bench.TARGETS["vllm-pd"] + " --log-level error"
bench.main()
"""
"""Runs the harness with two targets more: it has no quiet variant of these peers in pairs."""

Runs = dict[str, dict[tuple[str, str], dict[str, Any]]]
"""Mode -> (target, scenario) -> the harness's row."""


def median(row: dict[str, Any] | None, key: str) -> float | None:
    """The median of a row's figure over the repetitions; None where it was not measured."""
    found = (row or {}).get(key)
    return found[0] if found else None


class Figures(NamedTuple):
    """One router in one mode; None where it was not measured."""

    requests: float | None
    """A second, at 64 connections."""
    cpu: float | None
    """Microseconds a request, at 64 connections."""
    event_cpu: float | None
    """Microseconds an event, 64 streams at full speed."""
    added: float | None
    """Microseconds at the median that the router adds to an answer, at one connection."""
    ttft: float | None
    """Milliseconds at the median, 64 streams of an event each 10 ms."""
    delivery: float | None
    """Milliseconds at the 99th percentile from a worker's event to the client, same streams."""
    memory: float | None
    """MB that the router grew by over 50,000 distinct prompts of 4 KB."""
    errors: int


def figures(rows: dict[tuple[str, str], dict[str, Any]], target: str) -> Figures:
    def of(scenario: str, key: str, scale: float = 1.0) -> float | None:
        value = median(rows.get((target, scenario)), key)
        return None if value is None else value * scale

    alone, direct = of("json1", "p50_us"), median(rows.get(("direct", "json1")), "p50_us")
    return Figures(
        requests=of("json64", "rps"), cpu=of("json64", "cpu_us_per_req") or None,
        event_cpu=of("sblast", "cpu_us_per_event") or None,
        added=alone - direct if alone is not None and direct is not None and target != "direct" else None,
        ttft=of("spaced", "ttft_p50_us", 1e-3), delivery=of("spaced", "deliv_p99_us", 1e-3),
        memory=of("mem50k", "rss_growth_mb"),
        errors=sum(row["bad"] for (name, _), row in rows.items() if name == target))


class Target(NamedTuple):
    """A bound on one figure of ours: ``value`` of (ours, sglang-router's), kept where ``most`` or ``least`` holds."""

    mode: str
    name: str
    value: Callable[[Figures, Figures], float | None]
    least: float | None = None
    most: float | None = None

    def verdict(self, value: float | None) -> str:
        if value is None:
            return "not measured"
        kept = value >= self.least if self.least is not None else self.most is not None and value <= self.most
        return "pass" if kept else "FAIL"


def _ratio(a: float | None, b: float | None) -> float | None:
    return a / b if a is not None and b else None


BOUNDS = [
    Target(WHOLE, "req/s over sglang-router's", lambda ours, peer: _ratio(ours.requests, peer.requests), least=2.0),
    Target(WHOLE, "CPU us a request", lambda ours, peer: ours.cpu, most=25.0),
    Target(WHOLE, "added p50 over sglang-router's", lambda ours, peer: _ratio(ours.added, peer.added), most=0.5),
    Target(WHOLE, "TTFT p50, ms", lambda ours, peer: ours.ttft, most=2.0),
    Target(WHOLE, "delivery p99, ms", lambda ours, peer: ours.delivery, most=1.0),
    Target(PAIRS, "req/s over sglang-router's", lambda ours, peer: _ratio(ours.requests, peer.requests), least=2.5),
    Target(PAIRS, "CPU us a request", lambda ours, peer: ours.cpu, most=35.0),
    Target(PAIRS, "TTFT p50, ms", lambda ours, peer: ours.ttft, most=2.0),
    Target(PAIRS, "delivery p99, ms", lambda ours, peer: ours.delivery, most=1.0),
]
MEMORY = Target(WHOLE, "MB after 50,000 distinct 4 KB prompts", lambda ours, peer: ours.memory, most=100.0)
ERRORS = [Target(mode, "failed requests", lambda ours, peer: float(ours.errors), most=0.0) for mode in (WHOLE, PAIRS)]


def present(target: str, environment: dict[str, str]) -> bool:
    """Whether the target's program was named."""
    needed = "BENCH_SMG" if target.startswith("smg") else "BENCH_VLLM_PY" if target.startswith("vllm") else "BENCH_PY"
    return target in ("direct", OURS) or bool(environment.get(needed))


def run(args: argparse.Namespace, mode: str, environment: dict[str, str]) -> list[dict[str, Any]]:
    """The harness's rows for all routers of a mode."""
    targets = [target for target in TARGETS[mode] if present(target, environment)]
    scenarios = [*SCENARIOS[mode], *(["mem50k"] if args.memory and mode == WHOLE else [])]
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "rows.json")
        command = [sys.executable, "-c", BENCH, str(args.routerbench.resolve()), "--targets", ",".join(targets),
                   "--scenarios", ",".join(scenarios), "--reps", str(args.reps), "--json", str(out),
                   "--base-port", str(args.base_port), "--router-cpus", args.router_cpus, "--load-cpus", args.load_cpus,
                   "--wait-quiet", str(args.wait_quiet), "--log", str(args.log),
                   "--extra", f"--seconds {args.seconds}" if args.seconds else "",
                   "--mine-cmd", f"{ROUTER} --policy {args.policy} {WORKERS[mode]} {args.router_flags}"]
        subprocess.run(command, check=True, env=environment, stdout=subprocess.DEVNULL)
        rows: list[dict[str, Any]] = json.loads(out.read_text())
    for target in sorted(set(targets) - {row["target"] for row in rows}):
        print(f"{target} never answered: see {args.log}", file=sys.stderr)
    return rows


def by_mode(rows: dict[str, list[dict[str, Any]]]) -> Runs:
    return {mode: {(row["target"], row["scenario"]): row for row in found} for mode, found in rows.items()}


def judge(runs: Runs, bounds: list[Target]) -> list[dict[str, Any]]:
    """Each target beside its value and verdict."""
    judged = []
    for bound in bounds:
        rows = runs[bound.mode]
        value = bound.value(figures(rows, OURS), figures(rows, PEER[bound.mode]))
        limit = f">= {bound.least:g}" if bound.least is not None else f"<= {bound.most:g}"
        judged.append({"mode": bound.mode, "target": bound.name, "bound": limit,
                       "value": None if value is None else round(value, 2), "verdict": bound.verdict(value)})
    return judged


def table(runs: Runs, judged: list[dict[str, Any]], command: str) -> str:
    """Markdown."""
    lines = [f"# Routers side by side, {datetime.date.today().isoformat()}", "", f"`{command}`", "",
             "| mode | router | req/s | CPU us/request | CPU us/event | added p50 us | TTFT p50 ms | delivery p99 ms "
             "| MB grown | errors | foreign cores |", "|" + "---|" * 11]
    for mode, rows in runs.items():
        for target in dict.fromkeys(name for name, _ in rows):
            found = figures(rows, target)
            cells = [_cell(found.requests, 0), _cell(found.cpu, 1), _cell(found.event_cpu, 2), _cell(found.added, 0),
                     _cell(found.ttft, 2), _cell(found.delivery, 2), _cell(found.memory, 0), str(found.errors),
                     _cell(max(row["foreign"][0] for (name, _), row in rows.items() if name == target), 2)]
            lines.append(f"| {mode} | {NAMES[target]} | " + " | ".join(cells) + " |")
    lines += ["", "| mode | target | bound | value | |", "|---|---|---|---|---|"]
    lines += [f"| {row['mode']} | {row['target']} | {row['bound']} | {_cell(row['value'], 2)} | {row['verdict']} |"
              for row in judged]
    return "\n".join(lines) + "\n"


def _cell(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:,.{digits}f}"


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--routerbench", type=Path, required=True, help="folder of the built harness")
    parser.add_argument("--reps", type=int, default=5)
    parser.add_argument("--seconds", type=float, help="of a closed-loop scenario; the harness's own is 4")
    parser.add_argument("--peer-python", default=os.environ.get("BENCH_PY", ""), help="has sglang-router")
    parser.add_argument("--vllm-python", default=os.environ.get("BENCH_VLLM_PY", ""), help="has vllm-router")
    parser.add_argument("--smg", default=os.environ.get("BENCH_SMG", ""), help="the program smg")
    parser.add_argument("--policy", default="cache_aware", help="ours")
    parser.add_argument("--router-flags", default="", help="more flags of ours")
    parser.add_argument("--router-cpus", default="0")
    parser.add_argument("--load-cpus", default="1")
    parser.add_argument("--base-port", type=int, default=9300)
    parser.add_argument("--wait-quiet", type=float, default=0.0, help="wait until others use less than this many cores")
    parser.add_argument("--memory", action="store_true", help="also 50,000 distinct prompts of 4 KB")
    parser.add_argument("--log", type=Path, default=Path("/dev/null"), help="what the routers write")
    parser.add_argument("--out", type=Path, help="JSON")
    parser.add_argument("--table", type=Path, help="markdown")
    return parser.parse_args()


def main() -> None:
    args = arguments()
    named = {"BENCH_PY": args.peer_python, "BENCH_VLLM_PY": args.vllm_python, "BENCH_SMG": args.smg}
    environment = {**os.environ, **{name: value for name, value in named.items() if value}}
    rows = {mode: run(args, mode, environment) for mode in (WHOLE, PAIRS)}
    runs = by_mode(rows)
    judged = judge(runs, [*BOUNDS, *ERRORS, *([MEMORY] if args.memory else [])])
    command = " ".join(["python -m baton.tests.bench.router_compare", *sys.argv[1:]])
    shown = table(runs, judged, command)
    print(shown)
    if args.table:
        args.table.write_text(shown)
    if args.out:
        report = {"date": datetime.date.today().isoformat(), "command": command, "python": platform.python_version(),
                  "targets": judged, "rows": rows}
        args.out.write_text(json.dumps(report, indent=1) + "\n")
    verdicts = {found["verdict"] for found in judged}
    sys.exit(1 if "FAIL" in verdicts else 2 if "not measured" in verdicts else 0)


if __name__ == "__main__":
    main()
