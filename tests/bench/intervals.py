"""Which intervals between tokens are long: by their place in the answer, and by the step that they belong to.

    python -m baton.tests.bench.intervals                 # a unified server on this machine's GPU
    python -m baton.tests.bench.intervals --paced [--pace 4]    # paced_server.py on a CPU, steps that much slower
    python -m baton.tests.bench.intervals --trace               # and why

``--trace`` also tells what intervals consist of, from the GPU to the client (interval_parts.py), which slows a step by
some 0.05 ms.

A closed loop as in ``relay``. Of each workload: percentiles of the intervals, how long the first, the second and the
last of an answer are, and all others; how many are longer than 1.25 medians; and the steps (tokens that came within
half a median) that most of these others belong to.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import uvloop

from ...common.bench.client.answer import Answer
from ...common.bench.workloads.dataset_args import DatasetArgs
from ..helpers.harness import Server
from ..helpers.ports import free_port
from . import interval_parts, load, relay
from .step_trace import FOLDER, note_collections

LONG = 1.25


def of_answers(answers: Sequence[Answer]) -> dict[str, object]:
    """Figures of those with three intervals or more; milliseconds."""
    whole = [answer for answer in answers if answer.failure is None and len(answer.gaps) > 2]
    rows = [1e3 * np.array(answer.gaps) for answer in whole]
    gaps = np.concatenate(rows)
    middle = float(np.median(gaps))
    places = {"first": np.array([row[0] for row in rows]), "second": np.array([row[1] for row in rows]),
              "others": np.concatenate([row[2:-1] for row in rows]), "last": np.array([row[-1] for row in rows])}
    return {
        "intervals": len(gaps), **{f"p{q:g}": float(np.percentile(gaps, q)) for q in (50, 90, 98, 98.5, 99, 99.5)},
        "places": {name: {"p50": float(np.median(some)), "p90": float(np.percentile(some, 90)),
                          "p99": float(np.percentile(some, 99)), "long": int((some > LONG * middle).sum())}
                   for name, some in places.items()},
        "long steps": _long_steps(whole, rows, middle)}


def _long_steps(answers: Sequence[Answer], rows: Sequence[np.ndarray], middle: float) -> list[dict[str, object]]:
    """Those that brought the most streams a long interval which is no first, second or last one."""
    found = [(1e3 * (answer.first or 0.0) + float(row[:place + 1].sum()), place, float(row[place]))
             for answer, row in zip(answers, rows)
             for place in (np.flatnonzero(row[2:-1] > LONG * middle) + 2).tolist()]
    found.sort()
    times = np.array([time for time, _, _ in found])
    begin = 1e3 * min(answer.first or 0.0 for answer in answers)
    cuts = np.flatnonzero(np.diff(times) > middle / 2) + 1
    steps = [found[some[0]:some[-1] + 1] for some in np.split(np.arange(len(found)), cuts) if len(some)]
    return [{"at_ms": round(step[0][0] - begin, 1), "streams": len(step), "places": [step[0][1], step[-1][1]],
             "ms": round(float(np.median([ms for _, _, ms in step])), 2)}
            for step in sorted(steps, key=len, reverse=True)[:12]]


def shown(found: dict[str, object]) -> None:
    print("  " + ", ".join(f"{name} {value:.2f}" for name, value in found.items() if isinstance(value, (int, float))))
    for name in ("places", "long steps"):
        rows = found[name]
        for row in rows.items() if isinstance(rows, dict) else rows:  # type: ignore[attr-defined]
            print(f"    {row}")


async def ask(url: str, work: load.Workload) -> list[Answer]:
    data = DatasetArgs(dataset_name="random-ids", num_prompts=work.requests, random_input_len=work.input_tokens,
                       random_output_len=work.output_tokens, random_range_ratio=1.0, seed=0)
    return (await load.ask(url, data, concurrency=work.concurrency)).answers


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--paced", action="store_true")
    parser.add_argument("--pace", type=float, default=1.0)
    parser.add_argument("--trace", action="store_true")
    parser.add_argument("--workloads", default="1024/256/256/64", help="input/output/requests/clients, commas between")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    report: dict[str, dict[str, object]] = {}
    answers: dict[str, list[Answer]] = {}
    collections = note_collections()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        flags = [*relay.dummy_flags(folder), "--disable-radix-cache"]
        environment = {"PACE": str(args.pace), **({FOLDER: name} if args.trace else {})}
        module, argv = "baton.launch", ["server", *flags]
        if args.paced or args.trace:
            module, argv = f"baton.tests.bench.{'paced' if args.paced else 'traced'}_server", flags
        server = Server(module, argv, free_port(), folder / "log", **environment).start()
        try:
            server.wait_ready(300)
            uvloop.run(load.run(server.url, load.Workload(512, 32, 8, 8)))  # warm-up
            for text in args.workloads.split(","):
                given, made, requests, clients = map(int, text.split("/"))
                answers[text] = uvloop.run(ask(server.url, load.Workload(given, made, requests, clients)))
                report[text] = of_answers(answers[text])
                print(text)
                shown(report[text])
        finally:
            server.stop(40)
        for text, some in answers.items() if args.trace else ():
            print(f"{text}, parts of intervals, ms")
            report[text]["parts"] = interval_parts.shown(interval_parts.read(some, folder), LONG, folder, collections)
    if args.out:
        args.out.write_text(json.dumps(report))


if __name__ == "__main__":
    main()
