"""What intervals between tokens consist of: a traced server's notes (step_trace.py) beside the client's clock.

An interval that many streams share is the time between two messages of a step's tokens, from when its mean client has
read the one until it has read the other. It is the sum of

    gpu      the step on the GPU
    idle     the GPU had nothing to do before it
    wake     change of the delay between the step's end there and the engine's thread knowing of it (without a GPU: all
             of the step)
    engine   change of the delay from there until the message has left
    channel  ... until the front has it
    front    ... until the mean stream has written
    client   ... until the mean client has read
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ...common.bench.client.answer import Answer

PARTS = ("gpu", "idle", "wake", "engine", "channel", "front", "client")
_NUMBERS_BEHIND_PROMPTS = (1, 2, 3, 4, 8, 16, 32, 64, 128)


@dataclass(frozen=True)
class Shared:
    """An interval that ``streams`` share; milliseconds. ``number``: of the decode step behind the last prompts.
    ``delays``: from the engine's thread knowing of its tokens until they were sent, there, written, and read."""

    end: float  # on the processes' clock, in seconds
    streams: int
    number: int
    length: float
    parts: dict[str, float]
    delays: dict[str, float]
    step: dict[str, Any]

    def excess(self, usual: dict[str, float]) -> str:
        """The part that is longer than usual by most."""
        return max(self.parts, key=lambda name: self.parts[name] - usual[name])


def read(answers: Sequence[Answer], folder: Path) -> list[Shared]:
    """Those between neighbouring decode steps while ``answers`` came."""
    engine = json.loads((folder / "engine.json").read_text())
    came = json.loads((folder / "front.json").read_text())["came"]
    steps, told = engine["steps"], engine["told"]
    reads = np.sort(np.concatenate([(answer.first or 0.0) + np.cumsum([0.0, *answer.gaps]) for answer in answers]))
    numbers = _numbers(steps)
    count = min(len(told), len(came))
    sent = np.array([time for time, _, _ in told[:count]])
    cuts = np.searchsorted(reads, [*sent, np.inf])
    delays: list[dict[str, float] | None] = []
    for (left, _, step), (there, writes, total, _), begin, end in zip(told, came, cuts, cuts[1:]):
        whole = writes and end > begin and step >= 0 and "ready" in steps[step]
        delays.append(None if not whole else {
            "engine": 1e3 * (left - steps[step]["ready"]), "channel": 1e3 * (there - left),
            "front": 1e3 * (total / writes - there),
            "client": 1e3 * (float(reads[begin:end].mean()) - total / writes)})
    found = []
    for at in range(1, count):
        before, now, step = delays[at - 1], delays[at], told[at][2]
        if before is None or now is None or step != told[at - 1][2] + 1 or not numbers[step] or numbers[step] < 2:
            continue
        note = steps[step]
        parts = {"gpu": note.get("gpu", 0.0), "idle": note.get("idle", 0.0)}
        parts["wake"] = 1e3 * (note["ready"] - steps[step - 1]["ready"]) - sum(parts.values())
        parts |= {name: now[name] - before[name] for name in now}
        found.append(Shared(told[at][0], told[at][1], numbers[step], sum(parts.values()), parts, now, note))
    return found


def _numbers(steps: Sequence[dict[str, Any]]) -> list[int]:
    """Of each step how many decode steps there were since prompts, it among them; 0 of prompts."""
    numbers, number = [], 0
    for step in steps:
        number = number + 1 if step["decode"] else 0
        numbers.append(number)
    return numbers


def shown(found: Sequence[Shared], long: float, folder: Path,
          own_collections: Sequence[Sequence[float]]) -> dict[str, Any]:
    """Prints what the parts are in the median and at worst, the GPU's time behind prompts, and of each interval longer
    than ``long`` medians what made it so; returns all of it."""
    if not found:
        print("    no interval was traced")
        return {}
    length = np.array([one.length for one in found])
    table = {name: np.array([one.parts[name] for one in found]) for name in PARTS}
    delays = {f"{name} delay": np.array([one.delays[name] for one in found]) for name in found[0].delays}
    host = np.array([_host(one.step) for one in found])
    for name, column in {"interval": length, **table, **delays, "host": host}.items():
        print(f"    {name:14}" + "".join(f"{title} {value:8.3f}   " for title, value in zip(
            ("least", "p50", "p99", "most"), (column.min(), *np.percentile(column, (50, 99)), column.max()))))
    usual = {name: float(np.median(column)) for name, column in table.items()}
    middle = float(np.median(length))
    behind = {number: [one.parts["gpu"] for one in found if one.number == number] for number in _NUMBERS_BEHIND_PROMPTS}
    print("    GPU ms by the step's number behind prompts: " + ", ".join(
        f"{number}: {np.median(times):.2f}" for number, times in behind.items() if times))
    slow = [one for one in found if one.length > long * middle]
    begin = found[0].end
    collections = _collections(folder) + [("client", *row) for row in own_collections]
    print(f"    {len(slow)} of {len(found)} intervals are longer than {long:g} medians")
    for one in sorted(slow, key=lambda one: -one.length * one.streams)[:24]:
        parts = sorted(((took, name) for name, took in one.step.get("host", {}).items() if name != "wait"))[-3:]
        print(f"    at {one.end - begin:7.3f} s, {one.streams} streams, step {one.number} behind prompts: "
              f"{one.length:.2f} ms, {one.excess(usual)}; "
              + ", ".join(f"{name} {one.parts[name]:.2f}" for name in PARTS)
              + f"; host {_host(one.step):.2f} (" + ", ".join(f"{name} {took:.2f}" for took, name in parts[::-1]) + ")"
              + "".join(f", {name} {value:.4g}" for name, value in one.step.get("used", {}).items())
              + "".join(f"; {who} collects {1e3 * took:.1f} ms" for who, at, took, _ in collections
                        if one.end - 1.5e-3 * one.length < at < one.end + 5e-3))
    return {"usual": usual, "median": middle, "slow": len(slow), "of": len(found), "rows": [
        [round(value, 4) for value in (one.end - begin, one.streams, one.number, *one.parts.values(),
                                       *one.delays.values(), _host(one.step))] for one in found]}


def _host(step: dict[str, Any]) -> float:
    return sum(took for name, took in step.get("host", {}).items() if name != "wait")


def _collections(folder: Path) -> list[tuple[str, float, float, int]]:
    return [(name, *row) for name in ("engine", "front")
            for row in json.loads((folder / f"{name}.json").read_text())["collections"]]
