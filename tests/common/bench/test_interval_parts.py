"""What a traced server's notes tell of the intervals that its clients saw."""

from __future__ import annotations

import gc
import json

import pytest
from aiohttp import web

from baton.common.api.messages import Loading, OutputBatch
from baton.common.bench.client.answer import Answer
from baton.common.bench.workloads.workload import Prompt
from baton.common.engine_client.client import EngineClient
from baton.tests.bench import interval_parts
from baton.tests.bench.step_host import Bench
from baton.tests.bench.step_trace import EngineTrace, FrontTrace

STREAMS = 4


@pytest.fixture(autouse=True)
def collector(monkeypatch):
    """Traces stay among the collector's callbacks as long as their process lives."""
    monkeypatch.setattr(gc, "callbacks", [])


def note(folder, *, late_on_gpu=(), late_in_front=(), steps=12):
    """Steps of 10 ms, the first of prompts, whose tokens are 1 ms on their way to the client; late ones 5 ms more.
    Returns the answers."""
    ready, notes, told, came, reads = 100.0, [], [], [], []
    for step in range(steps):
        took = 0.010 + 0.005 * (step in late_on_gpu)
        ready += took
        notes.append({"decode": step > 0, "gpu": 1e3 * took - 0.1, "idle": 0.1, "ready": ready,
                      "host": {"schedule": 0.2, "wait": 9.0}})
        told.append([ready + 0.0001, STREAMS, step])
        written = ready + 0.0005 + 0.005 * (step in late_in_front)
        came.append([ready + 0.0002, STREAMS, STREAMS * written, written])
        reads.append(written + 0.0005)
    (folder / "engine.json").write_text(json.dumps({"steps": notes, "told": told, "collections": []}))
    (folder / "front.json").write_text(json.dumps({"came": came, "collections": [[reads[6], 0.004, 2]]}))
    gaps = [after - before for before, after in zip(reads, reads[1:])]
    return [Answer(Prompt(8, None, ()), steps, 0.0, first=reads[0], last=reads[-1], gaps=gaps) for _ in range(STREAMS)]


def test_an_interval_is_the_sum_of_its_parts(tmp_path):
    found = interval_parts.read(note(tmp_path, late_on_gpu=[5], late_in_front=[8]), tmp_path)
    assert [one.number for one in found] == list(range(2, 12))
    assert [round(one.length, 3) for one in found] == [10, 10, 10, 15, 10, 10, 15, 5, 10, 10]
    usual = {name: sorted(one.parts[name] for one in found)[5] for name in interval_parts.PARTS}
    assert usual["gpu"] == pytest.approx(9.9) and usual["idle"] == pytest.approx(0.1)
    assert found[3].excess(usual) == "gpu" and found[6].excess(usual) == "front"


def test_what_was_slow_is_told(tmp_path, capsys):
    answers = note(tmp_path, late_on_gpu=[5])
    told = interval_parts.shown(interval_parts.read(answers, tmp_path), 1.25, tmp_path, [])
    assert told["slow"] == 1 and told["of"] == len(told["rows"]) == 10 and told["median"] == pytest.approx(10)
    shown = capsys.readouterr().out
    assert "4 streams, step 5 behind prompts: 15.00 ms, gpu;" in shown and "host 0.20 (schedule 0.20)" in shown


def test_an_engine_notes_its_steps_and_which_it_told_of(tmp_path):
    bench = Bench(3, 32, 6, False)
    trace = EngineTrace(tmp_path)
    scheduler = bench.scheduler
    scheduler.synchronize()
    bench.tracker.flush()
    scheduler._pipeline._executor = trace.executor(scheduler._pipeline._executor)
    trace.watch(scheduler, bench.tracker)
    while not scheduler.idle:
        bench.step()
    scheduler.close()
    noted = json.loads((tmp_path / "engine.json").read_text())
    assert all(step["decode"] and step["rows"] == 3 for step in noted["steps"])
    assert [(count, step) for _, count, step in noted["told"]] == [(3, step) for step in range(len(noted["steps"]))]
    for (sent, _, _), step in zip(noted["told"], noted["steps"]):
        assert step["at"] <= step["launched"] <= step["waited"] <= step["ready"] <= sent


def test_a_front_notes_when_streams_wrote_what_came(tmp_path, monkeypatch):
    monkeypatch.setattr(EngineClient, "dispatch", lambda client, message: None)
    monkeypatch.setattr(web.StreamResponse, "write", lambda response, data: data)
    trace = FrontTrace()
    trace.watch()
    for writes in (2, 1):
        EngineClient.dispatch(None, OutputBatch([], []))
        EngineClient.dispatch(None, Loading("weights", 0.5))  # tells no tokens
        assert [web.StreamResponse.write(None, b"token") for _ in range(writes)] == [b"token"] * writes
    trace.save(tmp_path)
    first, second = json.loads((tmp_path / "front.json").read_text())["came"]
    assert first[1] == 2 and second[1] == 1
    assert first[0] <= first[2] / 2 <= first[3] <= second[0] <= second[2] == second[3]
