"""Recording which experts compute tokens, by command and over HTTP."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from baton.common.api.errors import InvalidRequest
from baton.common.commands.expert_record import RecordExperts
from baton.common.config.server import ParallelArgs
from baton.common.distributed.expert_parallel import ExpertParallel
from baton.common.distributed.parallel import Parallel
from baton.common.distributed.tp import TPGroup
from baton.common.engine.control import Control
from baton.tests.helpers.hand_driven import Engine
from baton.tests.helpers.small_models import save_model
from baton.tests.helpers.small_moe import save_moe


def control_of(engine: Engine) -> Control:
    return Control(engine.config, TPGroup(), engine.runner, engine.scheduler.batcher)


def test_what_was_recorded_is_written(tmp_path):
    """Two layers of three have experts; a prompt of 9 tokens and 4 steps behind it, with three experts a token."""
    save_moe(tmp_path / "model", "Qwen3Moe", mlp_only_layers=[1], eos_token_id=None)
    world = TPGroup()
    args = ParallelArgs(expert_distribution_recorder_mode="stat")
    engine = Engine(tmp_path / "model", parallel=Parallel(world, experts=ExpertParallel.from_args(args, world)))
    control = control_of(engine)
    engine.start("before", range(8, 30))
    engine.run()
    control.execute(RecordExperts("start"), idle=False)
    engine.start("during", range(40, 49), max_new_tokens=5)
    engine.run()
    so_far = Path(control.execute(RecordExperts("dump", str(tmp_path)), idle=False))
    assert control.execute(RecordExperts("stop"), idle=True) == f"Recorded {2 * 13 * 3} choices of experts."
    engine.start("after", range(8, 30))
    engine.run()
    written = Path(control.execute(RecordExperts("dump", str(tmp_path / "new" / "folder")), idle=True))
    assert written != so_far and written.read_text() == so_far.read_text()
    content = json.loads(written.read_text())
    assert content["layers"] == [0, 2]
    assert [sum(counts) for counts in content["logical_count"]] == [39, 39]
    assert all(len(counts) == 8 and min(counts) >= 0 for counts in content["logical_count"])
    with pytest.raises(InvalidRequest, match="Cannot write"):
        control.execute(RecordExperts("dump", str(written)), idle=True)  # a file, no folder


def test_out_of_turn(tmp_path):
    save_moe(tmp_path, "Mixtral")
    world = TPGroup()
    experts = dataclasses.replace(ExpertParallel(world), counts_tokens=True)
    control = control_of(Engine(tmp_path, parallel=Parallel(world, experts=experts)))
    for action in ("stop", "dump"):
        with pytest.raises(InvalidRequest, match="call /start_expert_distribution_record first"):
            control.execute(RecordExperts(action, str(tmp_path)), idle=True)


def test_an_engine_that_does_not_count(tmp_path):
    save_model(tmp_path, "Llama")
    control = control_of(Engine(tmp_path))
    with pytest.raises(InvalidRequest, match="with --expert-distribution-recorder-mode stat"):
        control.execute(RecordExperts("start"), idle=True)
