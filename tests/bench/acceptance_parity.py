"""Measures acceptance in every way by which an engine comes to a verify step, and compares it with what each step
should accept: ``python -m baton.tests.bench.acceptance_parity [--algorithms EAGLE3 ...] [--scenarios PD ...]``.

Prints a Markdown table, and exits with status 1 where greedy text differs from plain decoding's, acceptance by more
than 1 %, that of the first verify step by more than 2 %, or ``cached_tokens`` by more than a page.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from contextlib import nullcontext

from baton.tests.helpers.acceptance_parity import ALGORITHMS, SCENARIOS, TREES, Parity, measure, questions
from baton.tests.helpers.chains_on_cpu import chains_on_cpu

COLUMNS = ("scenario", "algorithm", "answers that differ", "verify steps", "acceptance length", "expected",
           "first step: expected", "fewer cached", "seconds", "")


def cells_of(parity: Parity) -> list[str]:
    steps = max(1, parity.steps)
    return [str(parity.different), str(parity.steps), f"{parity.acceptance_length:.3f}",
            f"{parity.expected / steps:.3f}", f"{parity.first[0]}: {parity.first[1]}", str(parity.fewer_cached),
            f"{parity.seconds:.1f}"]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m baton.tests.bench.acceptance_parity")
    parser.add_argument("--algorithms", nargs="+", choices=(*ALGORITHMS, *TREES), default=ALGORITHMS)
    parser.add_argument("--scenarios", nargs="+", choices=tuple(SCENARIOS), default=tuple(SCENARIOS))
    parser.add_argument("--count", type=int, default=36, help="questions (default: 36)")
    parser.add_argument("--chains", action="store_true", help="by chain steps, as they are captured on a GPU")
    parser.add_argument("--grammars", action="store_true", help="answer by JSON schemas")
    args = parser.parse_args(argv)
    asked, failures = questions(args.count, args.grammars), 0
    print(f"| {' | '.join(COLUMNS)} |\n{'|---' * len(COLUMNS)}|", flush=True)
    for name in args.scenarios:
        for algorithm in args.algorithms:
            cells, problem = [""] * (len(COLUMNS) - 3), ""
            try:
                with chains_on_cpu() if args.chains else nullcontext():
                    parity = measure(algorithm, SCENARIOS[name], asked)
                cells = cells_of(parity)
                parity.check()
            except (AssertionError, SystemExit) as error:
                problem, failures = f"FAILED {error}"[:300], failures + 1
            print(f"| {' | '.join([name, algorithm, *cells, problem])} |", flush=True)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
