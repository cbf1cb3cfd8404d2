"""Answers mixed requests by plain decoding, with speculative decoding, and by a pair with it, and counts the requests
whose tokens, ends or logprobs differ: ``python -m baton.tests.bench.speculation_oracle --count 10000``.

With ``--deterministic`` all engines run with --enable-deterministic-inference, and logprobs must be equal bit by bit.
Requests are greedy and seeded, with penalties, biases, grammars, stop tokens, logprobs, of all lengths, and share
prefixes. They are shared among processes of one thread each, with engines of their own. Exits with status 1 where one
differs.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, nullcontext
from itertools import zip_longest

import torch

from baton.kernels.tuning.policy import set_batch_invariant
from baton.tests.helpers.acceptance_parity import ALGORITHMS, BASE, algorithm_flags, started_pair
from baton.tests.helpers.chains_on_cpu import chains_on_cpu
from baton.tests.helpers.flag_engine import Answer, FlagEngine, Question
from baton.tests.helpers.mixed_questions import Mixed, chunks, differences

SIZE = 100
"""Requests that are asked at once."""
POOL = ("--max-total-tokens", "32768")
"""Room for most of these; the others wait, or are retracted."""

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
        self.count = 0
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

    def merge(self, other: Tally) -> None:
        """Adds the counts of another process, which ran at the same time."""
        for own, more in ((self.different, other.different), (self.tokens, other.tokens), (self.steps, other.steps)):
            own.update(more)
        self.seconds |= other.seconds
        self.count += other.count

    def report(self) -> str:
        return "\n".join(f"{name}: {self.different[name]} of {self.count} differ, acceptance length "
                         f"{self.tokens[name] / max(1, self.steps[name]):.3f}, {self.seconds[name]:.0f} s"
                         for name in self.seconds)


def compare(count: int, seed: int, algorithms: Sequence[str], bitwise: bool,
            budget: float = float("inf"), device: str = "cpu", chains: bool = False) -> Tally:
    """Answers ``count`` requests by all engines, or as many as ``budget`` seconds allow; they keep their prefix caches
    from one part to the next. ``bitwise``: in deterministic mode, logprobs bit by bit. Pairs are compared on a CPU
    alone. ``chains``: by chain steps on a CPU."""
    flags = [*POOL, "--device", device, *(["--enable-deterministic-inference"] if bitwise else [])]
    tally, begun = Tally(), time.monotonic()
    with ExitStack() as stack:
        stack.callback(set_batch_invariant, False)
        stack.enter_context(chains_on_cpu() if chains else nullcontext())
        plain = FlagEngine(*BASE, *flags)
        engines: dict[str, Answers] = {}
        for name in algorithms:
            own = (*flags, *algorithm_flags(name))
            engines[name] = FlagEngine(*BASE, *own).answers
            if device == "cpu":
                engines[f"{name}, pair"] = stack.enter_context(started_pair(flags, algorithm_flags(name))).answers
        for asked in chunks(seed, count, SIZE):
            questions = [mixed.question for mixed in asked]
            expected = plain.answers(questions)
            for name, answers in engines.items():
                started = time.monotonic()
                tally.add(name, tally.count, asked, expected, answers(questions), bitwise)
                tally.seconds[name] += time.monotonic() - started  # type: ignore[assignment]
            tally.count += len(asked)
            print(f"-- seed {seed}: {tally.count} requests, {time.monotonic() - begun:.0f} s\n{tally.report()}",
                  flush=True)
            if time.monotonic() - begun > budget:
                break
    return tally


def compare_in_processes(num_processes: int, count: int, seed: int, algorithms: Sequence[str], bitwise: bool,
                         budget: float, device: str, chains: bool) -> Tally:
    """``compare`` in processes that each answer a part of the requests, by seeds of their own."""
    shares = [count // num_processes + (index < count % num_processes) for index in range(num_processes)]
    tally = Tally()
    with ProcessPoolExecutor(num_processes, multiprocessing.get_context("spawn"), torch.set_num_threads, (1,)) as pool:
        parts = [pool.submit(compare, share, seed * num_processes + index, algorithms, bitwise, budget, device,
                             chains) for index, share in enumerate(shares) if share]
        for part in parts:
            tally.merge(part.result())
    return tally


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m baton.tests.bench.speculation_oracle")
    parser.add_argument("--count", type=int, default=10_000, help="requests (default: 10000)")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="time budget")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--processes", type=int, help="default: one for each CPU, or one for a GPU")
    parser.add_argument("--algorithms", nargs="+", choices=ALGORITHMS, default=("EAGLE3",))
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--chains", action="store_true", help="by chain steps on a CPU, as they are captured on a GPU")
    parser.add_argument("--deterministic", action="store_true", help="and compare logprobs bit by bit")
    args = parser.parse_args(argv)
    begun, processes = time.monotonic(), args.processes or (1 if args.device == "cuda" else os.cpu_count() or 1)
    tally = compare_in_processes(processes, args.count, args.seed, args.algorithms, args.deterministic,
                                 args.seconds, args.device, args.chains)
    print(f"== {tally.count} requests in {time.monotonic() - begun:.0f} s\n{tally.report()}")
    return 1 if tally.different.total() else 0


if __name__ == "__main__":
    sys.exit(main())
