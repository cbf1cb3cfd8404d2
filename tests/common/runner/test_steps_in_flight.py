"""Steps of several models and streams in one rank: none changes what another reads."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from baton.common.attention.workspace import AttentionWorkspace
from baton.common.tinychat import CHECKPOINT
from baton.tests.helpers.rank_processes import run_ranks
from baton.tests.helpers.replayed_prompts import record_again
from baton.tests.helpers.small_models import load_runner, save_model, server_config
from baton.tests.helpers.small_moe import save_moe
from baton.tests.helpers.steps_in_flight import (
    MODELS,
    alone,
    batches_of,
    check_two_models,
    check_two_workspaces,
    in_turns,
    runners_of,
    snapshot,
)


@pytest.mark.parametrize("names", [("Llama", "Qwen3Moe"), ("windows", "DeepSeek")])
def test_two_models_compute_in_turns_what_they_compute_alone(tmp_path, names):
    check_two_models(tmp_path, names, "torch")


@pytest.mark.parametrize("name", MODELS)
def test_two_steps_of_a_model_have_a_workspace_each(tmp_path, name):
    check_two_workspaces(*runners_of(tmp_path, [name], "torch"))


def test_a_draft_model_next_to_the_chat_model(tmp_path):
    """Whose steps are as long as it likes, and whose pool has other pages."""
    save_model(tmp_path, "Llama")
    runners = [load_runner(server_config(CHECKPOINT)), load_runner(server_config(tmp_path, page_size=4))]
    want = [alone(runner, seed, 7)[:3] for seed, runner in enumerate(runners)]
    pairs = zip(*(batches_of(runner, seed, 7) for seed, runner in enumerate(runners)))
    for index, pair in enumerate(pairs):
        steps = [runner.plan(batch) for runner, batch in zip(runners, pair)]
        assert len(runners[0]._model.layers) != len(runners[1]._model.layers)
        for found, wanted in zip(in_turns(runners, steps), want):
            assert torch.equal(found, wanted[index])


def test_a_planned_step_replays_graphs_in_the_runners_workspace_alone(tmp_path):
    (runner,) = runners_of(tmp_path, ["Llama"], "torch")
    want = alone(runner, 0, 9)[0]
    replayed = record_again(runner, [16, 64])
    batch = batches_of(runner, 0, 9)[0]
    steps = [runner.plan(batch, workspace=AttentionWorkspace(runner.device)), runner.plan(batch)]
    assert [step.piecewise is None for step in steps] == [True, False]
    for step in steps:
        torch.testing.assert_close(runner.run(step), want, atol=1e-5, rtol=0)
    assert replayed == [16] * len(runner._model.layers)


@pytest.mark.parametrize("name", MODELS)
def test_no_step_changes_what_steps_share(tmp_path, name):
    (runner,) = runners_of(tmp_path, [name], "torch")
    before = snapshot(runner)
    assert len(before) > 100
    for batch in batches_of(runner, 1, 20):
        runner.forward(batch)
        runner.hidden_states(batch)
    assert snapshot(runner) == before


def test_attention_groups_plan_two_steps_before_either_runs(tmp_path):
    """Of other numbers of rows, in one batch and in micro-batches, with experts and without; no rank's groups and
    exchanges change."""
    save_model(tmp_path / "dense", "Qwen2")
    save_moe(tmp_path / "moe", "Qwen3Moe")
    script = Path(__file__).with_name("steps_in_flight_rank.py")
    for rank, cases in enumerate(run_ranks(script, 2, tmp_path, str(tmp_path))):
        assert len(cases) == 4
        for case in cases:
            assert case["changed"] == [], (rank, case["name"])
            assert case["rows"][0] != case["rows"][1]
            for found, wanted in zip(case["found"], case["wanted"]):
                torch.testing.assert_close(found, wanted, atol=1e-5, rtol=0)
