"""Answers mixed requests by plain decoding, with speculative decoding, and by a pair with it, and counts the requests
whose tokens, ends or logprobs differ: ``python -m baton.tests.bench.speculation_oracle --count 10000``.

With ``--deterministic`` all engines run with --enable-deterministic-inference, and logprobs must be equal bit by bit.
Requests are greedy and seeded, with penalties, biases, grammars, stop tokens, logprobs, of all lengths, and share
prefixes. Exits with status 1 where one differs.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from itertools import zip_longest

from baton.kernels.tuning.policy import set_batch_invariant
from baton.tests.helpers.acceptance_parity import ALGORITHMS, BASE, ROOMY, algorithm_flags, started_pair
from baton.tests.helpers.flag_engine import Answer, FlagEngine, Question
from baton.tests.helpers.mixed_questions import Mixed, chunks, differences

SIZE = 100
"""Requests that are asked at once."""

Answers = Callable[[Sequence[Question]], list[Answer]]


def difference(plain: Answer, found: Answer) -> str:
    """The first place at which tokens or logprobs differ."""
    for name in ("tokens", "logprobs"):
        pairs = list(zip_longest(getattr(plain, name), getattr(found, name)))
        place = next((i for i, (one, other) in enumerate(pairs) if one != other), None)
        if place is not None:
            return f"{name} from {place} on, of {len(pairs)}: {pairs[place][1]}, not {pairs[place][0]}"
    return f"it ends by {found.finish}, not {plain.finish}"


class Tally:
    """Counts and prints the requests that an engine answers otherwise than plain decoding."""

    def __init__(self) -> None:
        self.different: Counter[str] = Counter()
        self.tokens: Counter[str] = Counter()
        self.steps: Counter[str] = Counter()
        self.seconds: Counter[str] = Counter()

    def add(self, name: str, count: int, asked: Sequence[Mixed], plain: Sequence[Answer], found: Sequence[Answer],
            bitwise: bool) -> None:
        """Counts the answers ``found`` to the questions after the first ``count``."""
        for answer in found:
            self.steps[name] += len(answer.verified)
            self.tokens[name] += sum(length for _, _, length in answer.verified)
        for place in differences(plain, found, bitwise):
            self.different[name] += 1
            if self.different[name] <= 5:
                print(f"differs: {name}, request {count + place}, {asked[place].kind}:",
                      difference(plain[place], found[place]), flush=True)

    def report(self, count: int) -> str:
        return "\n".join(f"{name}: {self.different[name]} of {count} differ, acceptance length "
                         f"{self.tokens[name] / max(1, self.steps[name]):.3f}, {self.seconds[name]:.0f} s"
                         for name in self.seconds)


def compare(count: int, seed: int, algorithms: Sequence[str], bitwise: bool,
            budget: float = float("inf")) -> Tally:
    """Answers ``count`` requests by all engines, or as many as ``budget`` seconds allow; they keep their prefix caches
    from one hundred to the next. ``bitwise``: in deterministic mode, logprobs bit by bit."""
    flags = ["--enable-deterministic-inference"] if bitwise else []
    tally, done, begun = Tally(), 0, time.monotonic()
    with ExitStack() as stack:
        stack.callback(set_batch_invariant, False)
        plain = FlagEngine(*BASE, *ROOMY, *flags)
        engines: dict[str, Answers] = {}
        for name in algorithms:
            own = (*flags, *algorithm_flags(name))
            engines[name] = FlagEngine(*BASE, *ROOMY, *own).answers
            engines[f"{name}, pair"] = stack.enter_context(started_pair(flags, algorithm_flags(name))).answers
        for asked in chunks(seed, count, SIZE):
            questions = [mixed.question for mixed in asked]
            expected = plain.answers(questions)
            for name, answers in engines.items():
                started = time.monotonic()
                tally.add(name, done, asked, expected, answers(questions), bitwise)
                tally.seconds[name] += time.monotonic() - started  # type: ignore[assignment]
            done += len(asked)
            print(f"-- {done} requests, {time.monotonic() - begun:.0f} s\n{tally.report(done)}", flush=True)
            if time.monotonic() - begun > budget:
                break
    return tally


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m baton.tests.bench.speculation_oracle")
    parser.add_argument("--count", type=int, default=10_000, help="requests (default: 10000)")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="time budget")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--algorithms", nargs="+", choices=ALGORITHMS, default=("EAGLE3",))
    parser.add_argument("--deterministic", action="store_true", help="and compare logprobs bit by bit")
    args = parser.parse_args(argv)
    tally = compare(args.count, args.seed, args.algorithms, args.deterministic, args.seconds)
    return 1 if tally.different.total() else 0


if __name__ == "__main__":
    sys.exit(main())
