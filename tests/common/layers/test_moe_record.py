"""Recording which experts compute tokens, by command and over HTTP."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

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


def recording_engine(folder: Path, **flags: Any) -> tuple[Engine, Control]:
    """Two layers of three have experts, three of which compute a token."""
    save_moe(folder, "Qwen3Moe", mlp_only_layers=[1], eos_token_id=None)
    world = TPGroup()
    args = ParallelArgs(**flags)
    engine = Engine(folder, parts=args, parallel=Parallel(world, experts=ExpertParallel.from_args(args, world)))
    return engine, control_of(engine)


def read(path: str | Path) -> dict[str, Any]:
    found: dict[str, Any] = torch.load(path, weights_only=True)
    return found


def test_what_was_recorded_is_written(tmp_path):
    """A prompt of 9 tokens and 4 steps behind it."""
    engine, control = recording_engine(tmp_path / "model", expert_distribution_recorder_mode="stat")
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
    logical = read(written)["logical_count"]
    assert written != so_far and written.suffix == ".pt" and torch.equal(read(so_far)["logical_count"], logical)
    assert logical.shape == (1, 3, 8) and logical.sum(2).tolist() == [[39, 0, 39]] and logical.min() == 0
    with pytest.raises(InvalidRequest, match="Cannot write"):
        control.execute(RecordExperts("dump", str(written)), idle=True)  # a file, no folder


def test_the_last_steps(tmp_path):
    engine, control = recording_engine(tmp_path / "model", expert_distribution_recorder_mode="stat",
                                       expert_distribution_recorder_buffer_size=3)
    control.execute(RecordExperts("start"), idle=False)
    engine.start("a", range(40, 49), max_new_tokens=2)
    engine.run()
    path = control.execute(RecordExperts("dump", str(tmp_path)), idle=False)
    assert read(path)["logical_count"].sum(2).tolist() == [[27, 0, 27], [3, 0, 3]]
    engine.start("b", range(60, 64), max_new_tokens=4)
    engine.run()
    path = control.execute(RecordExperts("dump", str(tmp_path)), idle=False)
    assert read(path)["logical_count"].sum(2).tolist() == [[3, 0, 3]] * 3


def test_each_step_apart(tmp_path):
    engine, control = recording_engine(tmp_path / "model", expert_distribution_recorder_mode="per_pass")
    engine.start("before", range(8, 30))
    engine.run()
    control.execute(RecordExperts("start"), idle=True)
    engine.start("during", range(40, 49), max_new_tokens=3)
    engine.run()
    assert control.execute(RecordExperts("stop"), idle=True) == "Recorded 3 steps."
    found = read(control.execute(RecordExperts("dump", str(tmp_path)), idle=True))
    assert [each["forward_pass_id"] for each in found["records"]] == [0, 1, 2]
    assert {each["rank"] for each in found["records"]} == {0}
    counts = torch.stack([each["global_physical_count"] for each in found["records"]])
    assert counts.shape == (3, 3, 8) and counts.sum(2).tolist() == [[27, 0, 27], [3, 0, 3], [3, 0, 3]]
    assert found["last_physical_to_logical_map"].tolist() == [list(range(8))] * 3
    control.execute(RecordExperts("start"), idle=True)
    found = read(control.execute(RecordExperts("dump", str(tmp_path)), idle=True))
    assert found["records"] == []


def test_the_experts_of_each_token(tmp_path):
    """They are those that the steps' counts have, and a token's are three."""
    engine, control = recording_engine(tmp_path / "model", expert_distribution_recorder_mode="per_token")
    control.execute(RecordExperts("start"), idle=True)
    engine.start("a", range(40, 49), max_new_tokens=3)
    engine.start("b", range(60, 64), max_new_tokens=2)
    engine.run()
    records = read(control.execute(RecordExperts("dump", str(tmp_path)), idle=True))["records"]
    first, *later = records
    assert first["input_ids"] == [*range(40, 49), *range(60, 64)]
    assert first["positions"] == [*range(9), *range(4)]
    assert first["extend_seq_lens"] == [9, 4] and first["forward_mode"] == 1
    assert [each["forward_mode"] for each in later] == [2] * len(later) and later[0]["positions"] == [9, 4]
    for each in records:
        chosen = each["topk_ids_of_layer"]
        assert chosen.shape == (3, len(each["input_ids"]), 3) and chosen.dtype == torch.int32
        assert (chosen[1] == -1).all() and chosen[::2].min() >= 0
        assert all(len(set(token)) == 3 for layer in chosen[::2].tolist() for token in layer)
        counts = torch.stack([torch.bincount(layer.flatten(), minlength=8) for layer in chosen[::2]])
        assert torch.equal(each["global_physical_count"][::2].long(), counts)


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
