"""Double sparsity over the triton backend: a whole model's steps, eager and as decode graphs capture them; collected by
test_kernels_interpreted.py and tests/gpu/kernels/test_double_sparsity.py."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from baton.common.attention.workspace import AttentionWorkspace
from baton.common.config.server import SparsityArgs
from baton.common.forward.forward_batch import ForwardBatch, Row, build_forward_batch
from baton.common.forward.step_context import StepContext
from baton.common.runner.model_runner import ModelRunner
from baton.tests.helpers.channel_files import save_random_channels, sparsity
from baton.tests.helpers.small_models import load_runner, save_model, scattered_pages, server_config

LENGTHS = (40, 3, 25, 60)


def runner_of(folder, args: SparsityArgs | None = None, **flags) -> ModelRunner:
    config = server_config(folder, page_size=8, backend="triton", **flags)
    return load_runner(config if args is None else dataclasses.replace(config, sparsity=args))


def decoded(runner: ModelRunner, *kinds: str) -> list[torch.Tensor]:
    """Computes prompts of ``LENGTHS`` but their last tokens, and then these in one step: "eager", and as "captured"."""
    prompts = [np.random.default_rng(count).integers(0, 97, count) for count in LENGTHS]
    pages = scattered_pages(runner, len(LENGTHS), 64)
    for prompt, own in zip(prompts, pages):
        runner.forward(build_forward_batch([Row(prompt[:-1], 0, own)], 8, runner.device))
    rows = [Row(prompt[-1:], len(prompt) - 1, own) for prompt, own in zip(prompts, pages)]
    return [(_captured if kind == "captured" else ModelRunner.forward)(
        runner, build_forward_batch(rows, 8, runner.device)) for kind in kinds]


def _captured(runner: ModelRunner, batch: ForwardBatch) -> torch.Tensor:
    """A graph's host copies are those of padding, and its tensors change after the plan."""
    rows = len(LENGTHS)
    batch.kv_indptr_cpu, batch.kv_last_page_len_cpu = np.arange(rows + 1, dtype=np.int32), np.ones(rows, np.int32)
    true_lens = batch.kv_last_page_len.clone()
    batch.kv_last_page_len.fill_(1)
    with torch.inference_mode():
        plan = runner._attention.plan(batch, AttentionWorkspace(runner.device), max_length=256)
        batch.kv_last_page_len.copy_(true_lens)
        return runner.run(StepContext(batch, plan))


@pytest.mark.parametrize("family,dim", [("Qwen3", 16), ("Qwen2", 12)])
def test_nothing_left_out_equals_dense_attention(tmp_path, family, dim):
    save_model(tmp_path, family, num_hidden_layers=2)
    args = sparsity(save_random_channels(tmp_path, 2, 2, dim), ds_heavy_channel_num=dim, ds_sparse_decode_threshold=20)
    dense, = decoded(runner_of(tmp_path), "eager")
    for sparse in decoded(runner_of(tmp_path, args), "captured", "eager"):
        torch.testing.assert_close(sparse, dense, atol=1e-4, rtol=0)


def test_captured_steps_select_as_eager_ones(tmp_path):
    save_model(tmp_path, "Qwen3", num_hidden_layers=2)
    args = sparsity(save_random_channels(tmp_path, 2, 4, 16), ds_heavy_channel_num=5, ds_heavy_token_num=7,
                    ds_sparse_decode_threshold=25)
    captured, eager = decoded(runner_of(tmp_path, args), "captured", "eager")
    dense, = decoded(runner_of(tmp_path), "eager")
    torch.testing.assert_close(captured, eager, atol=1e-4, rtol=0)
    changed = (eager - dense).abs().amax(-1) > 1e-3
    assert changed.tolist() == [True, False, False, True]
