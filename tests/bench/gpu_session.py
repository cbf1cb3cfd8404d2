"""Everything that needs GPUs, in one go: the tests, then the measurements, each in a process of its own.

    python3 -m baton.tests.bench.gpu_session one --seconds 560 --out "$OUT"     # what one GPU can tell
    python3 -m baton.tests.bench.gpu_session two --seconds 560 --out "$OUT"     # transfers, collectives
    python3 -m baton.tests.bench.gpu_session one --only moe,fp8                 # steps by part of their names
    python3 -m baton.tests.bench.gpu_session one --list

Every step's output goes to ``OUT/<step>.log``, what it measured to ``OUT/<step>.json`` where it can write that. A step
that fails or runs out of its time ends alone. Steps stand in order of what is missed most; those for which no time is
left are named. The last lines are the table: step, outcome, seconds, and the end of what it printed.
Exit status 1 where a step failed.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

TESTS = Path(__file__).parent.parent
PYTEST = ["-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-o", "addopts=", "--import-mode=importlib"]
LEAST_SECONDS = 20.0
"""A step is not begun with less."""


class Step(NamedTuple):
    name: str
    argv: list[str]
    seconds: float
    """The most that it may take."""
    tail: int = 6
    """Lines of its output for the table."""


def tests(name: str, seconds: float, *more: str) -> Step:
    return Step(f"test-{name}", [*PYTEST, str(TESTS / "gpu" / f"test_{name.replace('-', '_')}.py"), *more], seconds, 1)


def bench(module: str, seconds: float, *argv: str, name: str = "", json: str = "", tail: int = 12) -> Step:
    """``json``: the flag that names the file to write."""
    step = name or module
    wanted = [json, f"{{out}}/{step}.json"] if json else []
    return Step(step, ["-m", f"baton.tests.bench.{module}", *argv, *wanted], seconds, tail)


PLANS: dict[str, list[Step]] = {
    "one": [
        tests("kernels", 120), tests("attention", 150), tests("engine", 180), tests("grammar", 120),
        bench("grammar", 120),
        bench("decode_step", 120, json="--out"), bench("paged_decode", 60, json="--out", tail=20),
        bench("sampling", 60, json="--out"),
        tests("fp8", 120), bench("fp8_gemm", 60, json="--output", tail=24),
        tests("moe", 90), tests("mla", 90), tests("scheduling", 90), tests("one-batch", 90),
        tests("models-sampler", 90), tests("models", 120),
        bench("grouped_gemm", 90, json="--output", tail=30), bench("mla_decode", 90, json="--out", tail=24),
        bench("relay", 240, "--skip-chat", json="--out", tail=16),
        bench("tune_moe", 300),
    ],
    "two": [
        tests("tensor-parallel", 150), tests("dp", 150),
        bench("all_reduce", 60, json="--out", tail=16), bench("token_exchange", 60, json="--out"),
        bench("relay", 300, "--only", "1P1D", "--open-loop", json="--out", tail=16),
    ],
}


def run(step: Step, out: Path, left: float) -> tuple[str, float, list[str]]:
    """``(outcome, seconds, last lines)``."""
    log, began = out / f"{step.name}.log", time.monotonic()
    argv = [sys.executable, *(word.format(out=out) for word in step.argv)]
    with log.open("wb") as file:
        process = subprocess.Popen(argv, stdout=file, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            code = process.wait(min(step.seconds, left))
            outcome = "ok" if code == 0 else f"exit {code}"
        except subprocess.TimeoutExpired:
            subprocess.run(["pkill", "-KILL", "-s", str(process.pid)], check=False)  # it leads a session of its own
            process.wait()
            outcome = "out of time"
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return outcome, time.monotonic() - began, lines[-step.tail if outcome == "ok" else -25:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("plan", choices=PLANS)
    parser.add_argument("--seconds", type=float, default=560.0, help="for all of it")
    parser.add_argument("--out", type=Path, default=Path("gpu-session"))
    parser.add_argument("--only", default="", help="parts of step names, with commas between them")
    parser.add_argument("--list", action="store_true", help="name the steps, run none")
    args = parser.parse_args()
    wanted = [part for part in args.only.split(",") if part]
    steps = [step for step in PLANS[args.plan] if not wanted or any(part in step.name for part in wanted)]
    if args.list:
        print("\n".join(f"{step.name:24} at most {step.seconds:g} s" for step in steps))
        return
    args.out.mkdir(parents=True, exist_ok=True)
    end = time.monotonic() + args.seconds
    failed = False
    told = []
    for step in steps:
        left = end - time.monotonic()
        if left < LEAST_SECONDS:
            told.append(f"== {step.name}: not begun, no time left")
            continue
        outcome, seconds, lines = run(step, args.out, left)
        failed |= outcome != "ok"
        print(f"{step.name:24} {outcome:12} {seconds:6.1f} s", flush=True)
        told += [f"== {step.name}: {outcome}, {seconds:.1f} s", *("   " + line[:160] for line in lines)]
    print("\n".join(["", *told]))
    sys.exit(failed)


if __name__ == "__main__":
    main()
