"""Runs random schedules of the KV transfer protocol, 100,000 by default; no machine but this one's CPU is needed.

    python -m baton.tests.bench.kv_simulation                      # about four minutes on one core
    python -m baton.tests.bench.kv_simulation --first 4711 --schedules 1

A schedule that breaks a promise of the protocol is told by its seed, which is its number, and shown again by the second
form.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import traceback
from pathlib import Path

from baton.tests.kvtransfer.simulation import SHAPES, run_seed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--schedules", type=int, default=100_000)
    parser.add_argument("--first", type=int, default=0, help="the first schedule's seed")
    parser.add_argument("--output", help="write the figures to this JSON file")
    args = parser.parse_args()
    began, completed, failed, broken = time.monotonic(), 0, 0, []
    for seed in range(args.first, args.first + args.schedules):
        try:
            world = run_seed(seed)
        except Exception:
            broken.append(seed)
            traceback.print_exc()
            continue
        completed, failed = completed + world.completed, failed + world.failed
    seconds = time.monotonic() - began
    print(f"{args.schedules} schedules from seed {args.first} on, ranks {SHAPES}, {seconds:.0f} s: "
          f"{completed} transfers done, {failed} failed as they should, broken promises in {len(broken)}: {broken}",
          flush=True)
    if args.output:
        figures = {"schedules": args.schedules, "first": args.first, "seconds": round(seconds, 1), "done": completed,
                   "failed": failed, "broken": broken}
        Path(args.output).write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
