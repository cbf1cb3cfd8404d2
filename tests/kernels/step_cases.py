"""Steps of several models and workspaces in flight, with attention by Triton's kernels."""

from __future__ import annotations

import pytest

from baton.common.attention.mla.triton_backend import MLATritonBackend
from baton.common.attention.triton_backend import TritonBackend
from baton.tests.helpers.steps_in_flight import (
    batches_of,
    check_two_models,
    check_two_workspaces,
    runners_of,
    snapshot,
)


def test_two_models_compute_in_turns_what_they_compute_alone(tmp_path):
    check_two_models(tmp_path, ("Llama", "DeepSeek"), "triton", (2, 7))


def test_two_steps_of_a_model_have_a_workspace_each(tmp_path):
    check_two_workspaces(*runners_of(tmp_path, ["Llama"], "triton"), (2, 7))


@pytest.mark.parametrize("name,kind", [("Llama", TritonBackend), ("DeepSeek", MLATritonBackend)])
def test_no_step_changes_what_steps_share(tmp_path, name, kind):
    (runner,) = runners_of(tmp_path, [name], "triton")
    assert type(runner._attention) is kind
    before = snapshot(runner)
    for batch in batches_of(runner, 1, 2):
        runner.forward(batch)
    assert snapshot(runner) == before
