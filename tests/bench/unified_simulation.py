"""What the unified scheduler does with its time, on a virtual clock: closed and open loops in seconds, without a GPU.

    python -m baton.tests.bench.unified_simulation [--rules now,hold16,hold32,ends8] [--mixed]

Scheduler, batcher and pipeline are the server's; steps take what an H200 takes for a Llama-3-8B shape
(tests/helpers/simulated_server.py). Beside the rule that is (``now``: a prompt is computed in the next step) stand such
that hold prompts back while requests decode:

- ``holdN``: until those that wait have done so, taken together, for as many steps as an Nth of those that decode;
- ``endsN``: up to N steps, while those that reach their limit meanwhile are spared more than those that wait lose.

``steps``: how often prompts came between decode steps. Times in milliseconds.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np

from ...common.config.server import ScheduleArgs
from ...common.request.req import Req
from ...common.request.step_input import StepInput
from ...common.scheduler.batcher import Batcher
from ..helpers.simulated_server import H200, SimulatedServer

Rule = Callable[[Batcher, list[Req], int], bool]
"""Whether so many prompts, for which there are places, wait for the next step of those that decode."""

COLUMNS = ("req_s", "ttft_p50", "ttft_p99", "tpot_p50", "itl_p50", "itl_p99", "itl_max")
CLOSED = ((768, 256, 1024, 256), (256, 64, 1024, 256), (128, 64, 8192, 256), (1024, 512, 1024, 256))
OPEN = ((4.0, 400, 1024, 256), (12.0, 400, 1024, 256), (20.0, 400, 1024, 256), (8.0, 400, 4096, 256))


class Hold:
    def __init__(self, part: int):
        self._part = part
        self._waited = 0

    def __call__(self, batcher: Batcher, decoding: list[Req], places: int) -> bool:
        self._waited += places
        if self._waited > len(decoding) / self._part:
            self._waited = 0
        return self._waited > 0


class Ends:
    def __init__(self, most: int):
        self._most = most
        self._held = 0

    def __call__(self, batcher: Batcher, decoding: list[Req], places: int) -> bool:
        left = np.sort([req.max_tokens - req.length for req in decoding])
        prompts = sum(req.length for req in batcher.waiting) * H200.prompt
        step = H200.decode(len(decoding), sum(req.length for req in decoding))
        steps = np.arange(1, self._most - self._held + 1)
        spared = np.searchsorted(left, steps, side="right") * prompts
        self._held = self._held + 1 if np.any(spared > places * steps * step) else 0
        return self._held > 0


def rule_of(name: str) -> Rule:
    kinds = {"now": lambda _: lambda *_: False, "hold": Hold, "ends": Ends}
    kind = name.rstrip("0123456789")
    return kinds[kind](int(name[len(kind):] or 0))


def held_back(server: SimulatedServer, rule: Rule) -> None:
    """Ask ``rule`` before each step that could begin a prompt."""
    scheduler, batcher = server.scheduler, server.batcher
    inner = scheduler._next_batch

    def next_batch() -> StepInput | None:
        decoding = [req for req in batcher.running if not req.complete]
        places = min(len(batcher.waiting), batcher.args.max_running_requests - len(batcher.running))
        if places and decoding and not batcher.prefilling and rule(batcher, decoding, places):
            assert batcher.allocate_running()
            return batcher.next_decode()
        return inner()

    scheduler._next_batch = next_batch  # type: ignore[method-assign]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rules", default="now,hold16,hold32,ends8")
    parser.add_argument("--mixed", action="store_true", help="with --enable-mixed-chunk")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    rows = []
    print(f"| rule | load | {' | '.join(COLUMNS)} | steps |\n|{'---|' * (len(COLUMNS) + 3)}")
    for name in args.rules.split(","):
        for closed in (True, False):
            for count, many, input_len, output_len in CLOSED if closed else [(n, r, i, o) for r, n, i, o in OPEN]:
                server = SimulatedServer(ScheduleArgs(enable_mixed_chunk=args.mixed))
                if name != "now":
                    held_back(server, rule_of(name))
                (server.closed_loop if closed else server.open_loop)(count, many, input_len, output_len)
                load = f"{input_len}/{output_len}, {f'c={many}' if closed else f'{many:g} req/s'}"
                found = server.figures() | {"steps": len(list(server.interruptions()))}
                rows.append({"rule": name, "load": load, **found})
                told = " | ".join(f"{found[column]:,.1f}" for column in COLUMNS)
                print(f"| {name} | {load} | {told} | {found['steps']} |", flush=True)
    if args.out:
        args.out.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
