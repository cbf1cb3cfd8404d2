"""Steps that are planned before others have run, on a GPU: each by a workspace of its own."""

from __future__ import annotations

import dataclasses
from importlib.util import find_spec

import pytest
import torch

from baton.common.config.server import KernelArgs
from baton.tests.helpers.small_models import load_runner, save_model, server_config
from baton.tests.helpers.steps_in_flight import batches_of, check_two_workspaces, snapshot

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


@pytest.mark.parametrize("prefill,decode", [("triton", "triton"), ("flashinfer", "triton"),
                                            ("flashinfer", "flashinfer")])
def test_two_steps_of_a_model_have_a_workspace_each(tmp_path, prefill, decode):
    if "flashinfer" in (prefill, decode) and find_spec("flashinfer") is None:
        pytest.skip("flashinfer is not installed")
    save_model(tmp_path, "Qwen3", head_dim=64)
    config = dataclasses.replace(server_config(tmp_path, dtype="bfloat16"), kernels=KernelArgs(
        prefill, decode_attention_backend=decode, disable_cuda_graph=True))
    runner = load_runner(config, device="cuda:0")
    check_two_workspaces(runner)
    before = snapshot(runner)
    for batch in batches_of(runner, 1, 20):
        runner.forward(batch)
    assert snapshot(runner) == before


@pytest.mark.parametrize("decode", ["triton", "flashinfer"])
def test_a_captured_step_survives_steps_of_another_workspace(tmp_path, decode):
    """Decode graphs have plans of their own, which no other step changes."""
    if decode == "flashinfer" and find_spec("flashinfer") is None:
        pytest.skip("flashinfer is not installed")
    save_model(tmp_path, "Qwen3", head_dim=64)
    config = dataclasses.replace(server_config(tmp_path, dtype="bfloat16"), kernels=KernelArgs(
        decode_attention_backend=decode, cuda_graph_bs=(1, 2, 4), disable_piecewise_cuda_graph=True))
    runner = load_runner(config, device="cuda:0")
    first, second, step = batches_of(runner, 0, 9)
    for batch in (first, second):
        runner.forward(batch)
    want = runner.forward(step).clone()
    waiting = runner.plan(second)
    assert torch.equal(runner.forward(step), want)
    runner.run(waiting)
    assert torch.equal(runner.forward(step), want)
