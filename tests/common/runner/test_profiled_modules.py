"""What profilers see: NVTX ranges of modules, and the profile of a capture."""

from __future__ import annotations

import gzip
import json
from contextlib import contextmanager

import numpy as np
import pytest
import torch

from baton.common.api.errors import ConfigError
from baton.common.forward.forward_batch import model_input
from baton.common.runner.cuda_graphs.capture_profile import capture_profile
from baton.common.runner.nvtx_ranges import mark_ranges
from baton.tests.helpers.replayed_prompts import record_again
from baton.tests.helpers.small_models import load_runner, row_of, save_model, scattered_pages, server_config

CPU = torch.device("cpu")


def test_ranges_name_the_modules_of_a_step(tmp_path, monkeypatch):
    save_model(tmp_path, "Llama")
    ranges: list[str] = []
    depth = [0]

    @contextmanager
    def nvtx_range(name):
        ranges.append(f"{depth[0]} {name}")
        depth[0] += 1
        yield
        depth[0] -= 1

    monkeypatch.setattr(torch.cuda.nvtx, "range", nvtx_range)
    plain, marked = load_runner(server_config(tmp_path)), load_runner(server_config(tmp_path))
    mark_ranges(marked._model.module_calls())
    logits = []
    for runner in (plain, marked):
        rows = [row_of(runner, np.arange(20), 0, scattered_pages(runner, 1, 20)[0])]
        logits.append(runner.step(model_input(rows, runner.layout.page_size)).logits)
    assert torch.equal(*logits)
    layers = [f"0 model.layers.{layer}.{part}" for layer in range(3) for part in (
        "input_layernorm", "self_attn.qkv_proj", "self_attn.attn", "self_attn", "post_attention_layernorm", "mlp")]
    assert ranges == ["0 model.embed_tokens", *layers, "0 model.norm", "0 lm_head"]


def test_a_capture_is_profiled_by_size(tmp_path, monkeypatch, caplog):
    save_model(tmp_path / "model", "Llama")
    runner = load_runner(server_config(tmp_path / "model"))
    monkeypatch.setenv("SGLANG_TORCH_PROFILER_DIR", str(tmp_path / "traces"))
    with caplog.at_level("INFO"), capture_profile(0, CPU):
        record_again(runner, [16, 32])
    (trace,) = (tmp_path / "traces").iterdir()
    names = {event.get("name") for event in json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]}
    assert {"capture of prompts, 16", "capture of prompts, 32"} <= names
    for words in (str(trace), "capture of prompts, 16: ", "capture of prompts, 32: ", "aten::"):
        assert words in caplog.text


def test_a_trace_that_cannot_be_written_is_refused(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("SGLANG_TORCH_PROFILER_DIR", str(tmp_path / "file"))
    with pytest.raises(ConfigError, match="Set SGLANG_TORCH_PROFILER_DIR to a folder"), capture_profile(0, CPU):
        pass
