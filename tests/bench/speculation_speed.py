"""What speculation is worth: decode steps of a dummy model, plain and with so many drafts, whose acceptance is drawn.

    python -m baton.tests.bench.speculation_speed [--model llama-8b] [--batches 1,16,32,64,128,256]
        [--drafts 1,2,3,4,5,6,7,adaptive] [--sampled 16] [--context 2048] [--phases 1,64] [--kernels 1:4,64:3]
        [--server-flags "..."] [--out FILE.json]

Two engines one after the other in this process, without drafts and with them, each loaded once: batches decode from
their first step on, and the number of drafts is set for each. Tokens a second are those that the curve of acceptance
promises for the drafts that were verified, in the time that the steps took; what was drawn stands beside them.
``--sampled`` are batches that are measured at temperature 0.8, too. ``--phases`` splits the device's time of a batch's
steps, ``--kernels`` (BATCH:DRAFTS) names the longest kernels.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np

from ...common.api.errors import ConfigError
from ...common.config.cli import parse
from ...common.config.server import ServerConfig
from ...common.runner import chain_steps
from . import ceilings
from .decoding_engine import DecodingEngine
from .speculation_models import CURVE, MODELS, SHARES
from .step_phases import kernel_times, phase_times

WARM_UP, MARKED, PROFILED = 10, 12, 4
"""Steps of a cell beside those that are timed."""
MOST_ROWS = 2048
"""Rows of the largest step that is captured."""
GOAL = {1: 2.5, 16: 2.4, 32: 2.2, 64: 1.9, 128: 1.55, 256: 1.0}
ROOFLINE = {1: 2.77, 16: 2.68, 32: 2.48, 64: 2.10, 128: 1.74}
"""Speedups over plain decoding, of llama-8b at a context of 2,048."""
PLAIN, ADAPTIVE = "plain", "adaptive"


class Cell(NamedTuple):
    """``drafts``: plain, adaptive, or how many."""

    batch: int
    drafts: str
    temperature: float = 0.0

    def __str__(self) -> str:
        return f"{self.batch}:{self.drafts}" + (f":{self.temperature:g}" if self.temperature else "")


class FixedDrafts:
    """Chooses one number of drafts for all requests, in place of a DraftLength."""

    def __init__(self, num_drafts: int, acceptance: Any):
        self.num_drafts = num_drafts
        self.acceptance = acceptance

    def choose(self, keys: Any, limits: np.ndarray, context: int) -> np.ndarray:
        chosen: np.ndarray = np.minimum(limits, self.num_drafts)
        return chosen


class ExpectedTokens:
    """An Acceptance that also sums the tokens that the curve promises for the drafts that it observes."""

    def __init__(self, acceptance: Any = None):
        self._acceptance = acceptance
        self._promised = np.concatenate([[0.0], np.cumsum(SHARES)])
        self.accepted = 0.0
        self.drafted = 0

    def observe(self, keys: Any, drafted: np.ndarray, accepted: np.ndarray) -> None:
        self.accepted += float(self._promised[drafted].sum())
        self.drafted += int(drafted.sum())
        if self._acceptance is not None:
            self._acceptance.observe(keys, drafted, accepted)

    def forget(self, keys: Any) -> None:
        if self._acceptance is not None:
            self._acceptance.forget(keys)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._acceptance, name)


class Speculating:
    """Sets the number of drafts of an engine that was built with --speculative-adaptive."""

    def __init__(self, engine: DecodingEngine):
        self._drafting = engine.drafting
        self._adaptive = engine.drafting._lengths
        self.expected = ExpectedTokens()

    def set(self, drafts: str) -> None:
        if drafts != ADAPTIVE:
            self.expected = ExpectedTokens()
            self._drafting.adapt(FixedDrafts(0 if drafts == PLAIN else int(drafts), self.expected))
            return
        before = self._adaptive.acceptance
        self.expected = self._adaptive.acceptance = ExpectedTokens(getattr(before, "_acceptance", before))
        self._drafting.adapt(self._adaptive)


def steps_of(batch: int, least: int) -> int:
    """Steps that are timed: more of those that are short."""
    return least * (4 if batch == 1 else 2 if batch <= 32 else 1)


def promised(drafts: str) -> float:
    """Tokens of a step, about."""
    return 1.0 if drafts in (PLAIN, "0") else CURVE[-1 if drafts == ADAPTIVE else int(drafts) - 1]


def lengths_of(cell: Cell, args: argparse.Namespace) -> tuple[int, int]:
    """Tokens of the prompts, so that the timed steps have the context in the mean; and the most that are written."""
    steps = steps_of(cell.batch, args.steps)
    most = 0 if cell.drafts == PLAIN else len(CURVE) if cell.drafts == ADAPTIVE else int(cell.drafts)
    begin = args.context - round((WARM_UP + steps / 2) * promised(cell.drafts))
    return max(begin, 2), (WARM_UP + steps + MARKED + PROFILED + 6) * (most + 1)


def measure(engine: DecodingEngine, cell: Cell, args: argparse.Namespace,
            speculating: Speculating | None) -> dict[str, Any]:
    context, most = lengths_of(cell, args)
    if speculating is not None:
        speculating.set(cell.drafts)
    engine.start(cell.batch, context, most, temperature=cell.temperature)
    steps = steps_of(cell.batch, args.steps)
    for _ in range(WARM_UP * (4 if cell.drafts == ADAPTIVE else 1)):
        engine.step()
    engine.synchronize()
    generated, drafted, expected = engine.num_generated, 0, 0.0
    if speculating is not None:
        drafted, expected = speculating.expected.drafted, speculating.expected.accepted
    begin, waited = time.perf_counter(), engine.waited
    for _ in range(steps):
        engine.step()
    engine.synchronize()
    seconds, waited = time.perf_counter() - begin, engine.waited - waited
    rows = cell.batch * steps
    row = {"batch": cell.batch, "drafts": cell.drafts, "temperature": cell.temperature, "steps": steps,
           "step_ms": 1e3 * seconds / steps, "host_ms": 1e3 * (seconds - waited) / steps,
           "drawn_tokens_a_step": (engine.num_generated - generated) / rows, "tokens_a_step": 1.0, "drafts_a_step": 0.0}
    if speculating is not None:
        row["tokens_a_step"] = 1 + (speculating.expected.accepted - expected) / rows
        row["drafts_a_step"] = (speculating.expected.drafted - drafted) / rows
    row["tok_s"] = row["tokens_a_step"] * rows / seconds
    row |= _details(engine, cell, args)
    engine.stop()
    return row


def _details(engine: DecodingEngine, cell: Cell, args: argparse.Namespace) -> dict[str, Any]:
    """Phases and kernels, where they were asked for."""
    found: dict[str, Any] = {}
    if str(cell.batch) in args.phases.split(","):
        found["phases_ms"] = phase_times(engine, MARKED)
    if str(cell) in args.kernels.split(","):
        found["kernels"] = kernel_times(engine, PROFILED)
    return found


def cells_of(args: argparse.Namespace, *, speculating: bool) -> list[Cell]:
    batches = [int(batch) for batch in args.batches.split(",")]
    drafts = args.drafts.split(",") if speculating else [PLAIN]
    sampled = [int(batch) for batch in args.sampled.split(",") if batch]
    return [Cell(batch, number, temperature) for batch in batches for number in drafts
            for temperature in ((0.0, 0.8) if batch in sampled else (0.0,))]


def flags_of(args: argparse.Namespace, cells: list[Cell], folder: str, *, speculating: bool) -> list[str]:
    """Flags of a server that runs the cells."""
    flags, own = MODELS[args.model].with_layers(args.layers).write(Path(folder))
    batches = sorted({cell.batch for cell in cells})
    page = 64
    tokens = max(cell.batch * (sum(lengths_of(cell, args)) + page) for cell in cells)
    flags += ["--max-total-tokens", str(tokens), "--max-running-requests", str(batches[-1]), "--disable-radix-cache",
              "--schedule-conservativeness", "0", "--disable-piecewise-cuda-graph",
              "--cuda-graph-bs", *map(str, batches), "--cuda-graph-max-bs", str(batches[-1])]
    if speculating:
        flags += [*own, "--speculative-num-steps", str(len(SHARES)), "--speculative-adaptive",
                  "--speculative-simulate-acceptance", ",".join(map(str, SHARES))]
    return flags + args.server_flags.split()


@contextlib.contextmanager
def captured_levels(cells: list[Cell], levels: str) -> Iterator[None]:
    """Engines that are built within it capture the flags' levels of drafts (``own``), or those of all cells (``all``),
    which adaptive ones then choose from, too."""
    if levels == "own":
        yield
        return
    sizes: dict[int, list[int]] = {}
    for cell in cells:
        for count in range(1, len(CURVE) + 1) if cell.drafts == ADAPTIVE else [int(cell.drafts)]:
            if count and cell.batch * (count + 1) <= MOST_ROWS and cell.batch not in sizes.setdefault(count, []):
                sizes[count].append(cell.batch)
    with patch.object(chain_steps, "chain_sizes", lambda config: {count: sorted(sizes[count])
                                                                  for count in sorted(sizes)}):
        yield


def run(args: argparse.Namespace, *, speculating: bool, end: float) -> list[dict[str, Any]]:
    """Measures the cells of one engine, as far as there is time."""
    cells = cells_of(args, speculating=speculating)
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        config = parse(ServerConfig, flags_of(args, cells, folder, speculating=speculating), prog="speculation_speed",
                       description="")
        with captured_levels(cells, args.levels if speculating else "own"):
            engine = DecodingEngine(config)
    print(f"{'with drafts' if speculating else 'plain'}: start {engine.stages}", flush=True)
    setting = Speculating(engine) if speculating else None
    for cell in cells:
        if time.monotonic() > end:
            print(f"no time left for {cell} and later ones")
            break
        rows.append(measure(engine, cell, args, setting))
        _print_row(rows[-1])
    engine.close()
    return rows


def _print_row(row: dict[str, Any]) -> None:
    print({name: round(value, 3) if isinstance(value, float) else value for name, value in row.items()
           if name not in ("kernels", "phases_ms")}, flush=True)
    if "phases_ms" in row:
        print(f"    phases ms: {_rounded(row['phases_ms'])}")
    if kernels := row.get("kernels"):
        print(f"    a step in a profile: {kernels['span_ms']:.2f} ms")
        for phase, found in kernels["phases"].items():
            print(f"    {phase}: busy {found['busy_ms']:.3f} ms in {found['launches']:.0f} kernels, "
                  f"{_rounded(found['parts_ms'])}")
            for name, calls, took in found["longest"]:
                if took > 0.01:
                    print(f"      {took:8.3f} ms {calls:7.1f} x {name}")


def _rounded(values: dict[str, float]) -> dict[str, float]:
    return {name: round(value, 3) for name, value in values.items()}


def table(rows: list[dict[str, Any]], *, with_goal: bool) -> str:
    """Speedups over plain decoding by batch and drafts, the best one beside the goal."""
    plain = {(row["batch"], row["temperature"]): row for row in rows if row["drafts"] == PLAIN}
    own = [row for row in rows if row["drafts"] != PLAIN and (row["batch"], row["temperature"]) in plain]
    names = list(dict.fromkeys(row["drafts"] for row in own))
    heads = ["batch", "plain ms", "plain tok/s", *(f"k={name}: ms (x)" for name in names), "best",
             *(("goal", "roofline") if with_goal else ())]
    lines = ["| " + " | ".join(heads) + " |", "|---" * len(heads) + "|"]
    for (batch, temperature), base in plain.items():
        found = {row["drafts"]: row for row in own if (row["batch"], row["temperature"]) == (batch, temperature)}
        gains = {name: row["tok_s"] / base["tok_s"] for name, row in found.items()}
        cells = [f"{found[name]['step_ms']:.2f} ({gains[name]:.2f})" if name in found else "" for name in names]
        best = max(gains, key=gains.__getitem__, default="")
        lines.append("| " + " | ".join([
            f"{batch}" + (f" (t={temperature:g})" if temperature else ""), f"{base['step_ms']:.2f}",
            f"{base['tok_s']:,.0f}", *cells, f"{gains[best]:.2f} (k={best})" if gains else "",
            *((f"{GOAL.get(batch, '')}", f"{ROOFLINE.get(batch, '')}") if with_goal else ())]) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="llama-8b", choices=MODELS)
    parser.add_argument("--batches", default="1,16,32,64,128,256")
    parser.add_argument("--drafts", default="1,2,3,4,5,6,7,adaptive", help="0: plain steps of a server that drafts")
    parser.add_argument("--sampled", default="16", help="batches that are also measured at temperature 0.8")
    parser.add_argument("--levels", choices=("own", "all"), default="own",
                        help="numbers of drafts that are captured: --speculative-adaptive's, or all of --drafts")
    parser.add_argument("--context", type=int, default=2048)
    parser.add_argument("--layers", type=int, help="of the model, in place of all")
    parser.add_argument("--steps", type=int, default=30, help="that are timed, in small batches up to 4 times as many")
    parser.add_argument("--phases", default="", help="batches whose steps are split")
    parser.add_argument("--kernels", default="", help="cells whose kernels are named: 1:plain,1:7,64:3,16:3:0.8")
    parser.add_argument("--server-flags", default="", help="further flags of both engines, in one word")
    parser.add_argument("--seconds", type=float, default=1e9, help="begin no cell later than this")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    end = time.monotonic() + args.seconds
    import torch

    limits = ceilings.measure() if torch.cuda.is_available() else {}
    rows: list[dict[str, Any]] = []
    for speculating in (False, True):
        try:
            rows += run(args, speculating=speculating, end=end)
        except ConfigError as error:
            sys.exit(str(error))
        if args.out:
            args.out.write_text(json.dumps({"model": args.model, "context": args.context, "shares": SHARES,
                                            "command": sys.argv[1:], "ceilings": limits, "rows": rows}, indent=1))
    found = table(rows, with_goal=args.model == "llama-8b" and args.context == 2048)
    print(f"\n{args.model}, context {args.context}, SIMULATED acceptance {CURVE}\n{found}")


if __name__ == "__main__":
    main()
