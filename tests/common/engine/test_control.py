"""Commands that change an engine as a whole, and the routes that give them."""

from __future__ import annotations

import gzip
import json
import shutil
from types import SimpleNamespace
from unittest.mock import Mock

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file

from baton.common.api import messages
from baton.common.api.errors import Conflict, InvalidRequest, WorkerUnavailable
from baton.common.api.sampling import SamplingParams
from baton.common.commands import freeze_gc
from baton.common.commands.flush_cache import FlushCache
from baton.common.commands.limits import SchedulerLimits
from baton.common.commands.memory import ReleaseMemory, ResumeMemory
from baton.common.commands.profile import StartProfile, StopProfile
from baton.common.commands.slow_down import SlowDown
from baton.common.commands.update_weights import UpdateWeights
from baton.common.engine import loop
from baton.common.engine.control import Control
from baton.common.tinychat import CHECKPOINT
from baton.tests.helpers.hand_driven import Engine, tokens_of

PROMPT = [3, 7, 11, 19, 23]


@pytest.fixture
def engine():
    return Engine(CHECKPOINT)


@pytest.fixture
def control(engine):
    return Control(engine.config, engine.parallel.tp, engine.runner, engine.scheduler.batcher)


def answer(engine, rid):
    engine.start(rid, PROMPT)
    return tokens_of(engine.run())[rid]


def other_checkpoint(folder, change):
    shutil.copytree(CHECKPOINT, folder)
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return str(folder)


def test_other_weights_answer_otherwise_and_back(engine, control, tmp_path):
    before = answer(engine, "a")
    torch.manual_seed(0)
    path = other_checkpoint(tmp_path / "other", lambda w: w.update(
        {name: torch.randn_like(t) for name, t in w.items() if "embed" in name}))
    control.execute(UpdateWeights(path), idle=True)
    assert engine.cache.num_cached == 0
    changed = answer(engine, "b")
    control.execute(UpdateWeights(str(CHECKPOINT)), idle=True)
    assert changed != before and answer(engine, "c") == before


@pytest.mark.parametrize("change, named", [
    (lambda w: w.pop(next(iter(w))), "lacks"),
    (lambda w: w.update({next(iter(w)): torch.zeros(3, 3)}), "shape"),
])
def test_weights_that_do_not_fit_change_nothing(engine, control, tmp_path, change, named):
    before = answer(engine, "a")
    path = other_checkpoint(tmp_path / "other", change)
    with pytest.raises(InvalidRequest, match=named):
        control.execute(UpdateWeights(path), idle=True)
    assert answer(engine, "b") == before


def test_another_model_is_refused(control, tmp_path):
    folder = tmp_path / "other"
    shutil.copytree(CHECKPOINT, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": config["num_hidden_layers"] + 1}))
    with pytest.raises(InvalidRequest, match="num_layers"):
        control.execute(UpdateWeights(str(folder)), idle=True)


@pytest.mark.parametrize("kinds", [("weights",), ("kv_cache",), ("weights", "kv_cache")])
def test_released_memory_comes_back(engine, control, kinds):
    before = answer(engine, "a")
    storages = {"weights": [slot.target.untyped_storage() for slot in engine.runner._model.slots()],
                "kv_cache": [group.untyped_storage() for group in engine.runner.pool.groups]}
    control.execute(ReleaseMemory(kinds), idle=True)
    assert {kind for kind, held in storages.items() if not any(s.nbytes() for s in held)} == set(kinds)
    with pytest.raises(WorkerUnavailable, match="resume_memory_occupation"):
        control.check_serving()
    control.execute(ReleaseMemory(kinds), idle=True)  # again: nothing more to give
    control.execute(ResumeMemory(("weights", "kv_cache")), idle=True)
    control.check_serving()
    assert answer(engine, "b") == before


def test_a_profile_is_written_after_its_steps(control, tmp_path):
    control.execute(StartProfile(str(tmp_path / "new"), num_steps=1), idle=False)
    with pytest.raises(Conflict):
        control.execute(StartProfile(str(tmp_path)), idle=False)
    torch.ones(3).sum()
    control.profiler.step()
    assert not control.profiler.active
    [trace] = (tmp_path / "new").iterdir()
    events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    assert any("aten::sum" in str(event.get("name")) for event in events)
    with pytest.raises(Conflict):
        control.execute(StopProfile(), idle=False)


def test_a_profile_by_stage_has_a_file_of_each(engine, control, tmp_path):
    control.execute(StartProfile(str(tmp_path), num_steps=2, by_stage=True, prefix="mine", profile_id="one"),
                    idle=False)
    for num_prefill in (1, 0, 0, 1, 1):  # decode ends prefill; what comes after both is no part
        if control.profiler.active:
            engine.runner.before_step(num_prefill)
        torch.ones(3).prod() if num_prefill else torch.ones(3).sum()
        control.profiler.step()
    assert not control.profiler.active and engine.runner.before_step is None
    found = {}
    for trace in tmp_path.iterdir():
        events = {str(event.get("name")) for event in json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]}
        found[trace.name] = events & {"aten::sum", "aten::prod"}
    assert found == {"mine-one-rank0-decode.trace.json.gz": {"aten::sum"},
                     "mine-one-rank0-prefill.trace.json.gz": {"aten::prod"}}


def test_a_profile_begins_at_its_step(control, tmp_path):
    for _ in range(3):
        control.profiler.step()
    control.execute(StartProfile(str(tmp_path), num_steps=1, start_step=5), idle=False)
    torch.ones(3).prod()
    control.profiler.step()
    assert not list(tmp_path.iterdir()) and control.profiler.active
    control.profiler.step()
    torch.ones(3).sum()
    control.profiler.step()
    [trace] = tmp_path.iterdir()
    assert {"aten::sum", "aten::prod"} & {str(event.get("name")) for event in json.loads(
        gzip.decompress(trace.read_bytes()))["traceEvents"]} == {"aten::sum"}
    control.execute(StartProfile(str(tmp_path), start_step=100), idle=False)
    assert "there is no trace" in control.execute(StopProfile(), idle=False)


@pytest.mark.parametrize("fields, why", [
    ({"by_stage": True}, "needs num_steps"), ({"num_steps": 0}, "num_steps must"),
    ({"start_step": -1}, "start_step must"),
    ({"prefix": "../x"}, "cannot be named"), ({"activities": ("CUDA_PROFILER",)}, "needs a GPU")])
def test_profiles_that_are_refused(control, tmp_path, fields, why):
    with pytest.raises(InvalidRequest, match=why):
        control.execute(StartProfile(str(tmp_path), **fields), idle=False)
    assert not control.profiler.active


def test_limits(engine, control):
    control.execute(SchedulerLimits(max_running_requests=1), idle=False)
    for rid in "ab":
        engine.start(rid, PROMPT)
    for _ in range(3):
        engine.scheduler.step(0.0)
    assert engine.scheduler.num_running == 1
    engine.run()
    for wrong in (SchedulerLimits(max_running_requests=65), SchedulerLimits(schedule_policy="best")):
        with pytest.raises(InvalidRequest):
            control.execute(wrong, idle=True)


def test_steps_are_slowed_down_and_no_longer(engine, control, monkeypatch):
    """By the loop, after each step that ran a batch."""
    slept = []
    monkeypatch.setattr(loop.time, "sleep", slept.append)

    def tick(*given):
        return SimpleNamespace(now=0.0, messages=given)

    def slow_down(seconds):
        return tick(messages.Control(1, "slow_down", msgspec.Raw(msgspec.msgpack.encode(SlowDown(seconds)))))

    ticks = iter([slow_down(0.25), tick(messages.Generate("a", PROMPT, SamplingParams(max_new_tokens=4))), tick(),
                  slow_down(0.0), tick(), tick(messages.Shutdown())])
    said = []
    loop.EngineLoop(SimpleNamespace(next=lambda wait: next(ticks)), engine.tracker, engine.scheduler, engine.cache,
                    control, said.append).run()
    assert slept == [0.25, 0.25]
    assert [message.message for message in said if isinstance(message, messages.Done)] == [
        "Each step is followed by 0.25 s of sleep.", "Steps are not delayed."]


def test_the_garbage_collector_is_frozen_by_a_command(control, monkeypatch):
    freeze = Mock()
    monkeypatch.setattr(freeze_gc, "freeze_collector", freeze)
    assert control.execute(freeze_gc.FreezeGC(), idle=False) == "The garbage collectors are frozen."
    freeze.assert_called_once_with()


def test_a_command_that_a_rank_does_not_know_is_refused(control):
    assert control.command("flush_cache").struct is FlushCache
    with pytest.raises(InvalidRequest, match="has no command polish: install the package"):
        control.command("polish")


def test_nothing_changes_under_running_requests(control):
    for command in (FlushCache(), UpdateWeights("x"), ReleaseMemory(("weights",))):
        with pytest.raises(Conflict, match="while requests run"):
            control.execute(command, idle=False)
