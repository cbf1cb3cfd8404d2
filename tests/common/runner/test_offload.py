"""Models with layers in host memory: the tokens of models without, whatever computes them and however weights came, and
the bytes that they take on the device."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from baton.common.api.errors import ConfigError
from baton.common.config.server import OffloadArgs
from baton.common.forward.forward_batch import Row, build_forward_batch
from baton.common.runner.model_runner import ModelRunner
from baton.common.weights.files import checkpoint_files
from baton.tests.helpers.deepseek_models import save_deepseek
from baton.tests.helpers.fp8_checkpoints import SIZES as FLOAT8_SIZES
from baton.tests.helpers.replayed_prompts import SIZES, record_again, steps_of
from baton.tests.helpers.small_models import load_runner, save_model, server_config

NONE = OffloadArgs()
ALL = OffloadArgs(offload_group_size=1)
MOST = OffloadArgs(offload_group_size=3, offload_num_in_group=2, offload_prefetch_step=2)
MODELS: dict[str, tuple[Any, dict[str, Any]]] = {
    "Llama": (lambda folder: save_model(folder, "Llama", num_hidden_layers=7, shard="100KB"), {}),
    "float8": (lambda folder: save_model(folder, "Qwen3", **{**FLOAT8_SIZES, "num_hidden_layers": 7}),
               {"quantization": "fp8"}),
    "float8 blocks": (lambda folder: save_model(folder, "Qwen3", **{**FLOAT8_SIZES, "num_hidden_layers": 7}),
                      {"quantization": "fp8_per_block"}),
    "DeepseekV3": (lambda folder: save_deepseek(folder, 3, num_hidden_layers=7), {}),
    "dummy": (lambda folder: save_model(folder, "Qwen2", num_hidden_layers=7), {"load_format": "dummy"})}


def runner_of(folder: Path, offload: OffloadArgs = NONE, **model: Any) -> ModelRunner:
    config = server_config(folder, page_size=4, num_layer_groups=3, **model)
    return load_runner(dataclasses.replace(config, offload=offload))


def weight_bytes(runner: ModelRunner) -> int:
    """The device memory of the weights."""
    return sum(storage.nbytes() for storage in runner._memory["weights"]._storages)


def assert_equal_steps(found: list[torch.Tensor], wanted: list[torch.Tensor]) -> None:
    assert len(found) == len(wanted)
    for mine, theirs in zip(found, wanted):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("name", MODELS)
def test_offloaded_layers_compute_the_same(tmp_path, name):
    save, flags = MODELS[name]
    save(tmp_path)
    plain = runner_of(tmp_path, **flags)
    wanted = steps_of(plain)
    for offload in (ALL, MOST):
        runner = runner_of(tmp_path, offload, **flags)
        assert_equal_steps(steps_of(runner), wanted)
        record_again(runner, SIZES)  # prompts in pieces, as CUDA graphs compute them
        for mine, theirs in zip(steps_of(runner), wanted):
            torch.testing.assert_close(mine, theirs, atol=1e-5, rtol=1e-5)


def test_features_of_offloaded_layers(tmp_path):
    """Drafters read hidden states between layers."""
    save_model(tmp_path, "Llama", num_hidden_layers=7)
    found = []
    for offload in (NONE, ALL):
        runner = runner_of(tmp_path, offload)
        batch = build_forward_batch([Row([*range(20)], 0, np.arange(5))], 4, runner.device, [*range(20)])
        with torch.inference_mode():
            found.append(runner._model.hidden_states_and_features(runner.plan(batch), (0, 3, 6)))
    for mine, theirs in zip(*found):
        assert torch.equal(mine, theirs)


def test_bytes_on_the_device(tmp_path):
    """Of seven equal layers two remain, in the buffers, which are aligned."""
    save_model(tmp_path, "Llama", num_hidden_layers=7)
    plain, offloaded = runner_of(tmp_path), runner_of(tmp_path, ALL)
    layer = sum(slot.target.nbytes for slot in plain._model.layers[0].slots())
    outside = weight_bytes(plain) - 7 * layer
    assert outside + 2 * layer <= weight_bytes(offloaded) <= outside + 2 * (layer + 16 * 512)
    spread = runner_of(tmp_path, OffloadArgs(cpu_offload_gb=3.5 * layer / 2**30))
    assert weight_bytes(spread) - outside - (7 - 3 + 2) * layer in range(2 * 16 * 512)


def test_contents_and_updates(tmp_path):
    """Slots tell what offloaded parameters hold, and another checkpoint replaces it."""
    first, second = tmp_path / "first", tmp_path / "second"
    save_model(first, "Llama", num_hidden_layers=7)
    torch.manual_seed(1)
    model = save_model(second, "Llama", num_hidden_layers=7, shard="50KB")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.25)
    for file in checkpoint_files(second):
        file.unlink()
    model.save_pretrained(second, max_shard_size="50KB")
    runner, plain = runner_of(first, ALL), runner_of(first)
    for updated in (False, True):
        if updated:
            for each in (runner, plain):
                each.check_weights(str(second), None)
                each.update_weights(str(second), None)
        for mine, theirs in zip(runner._model.slots(), plain._model.slots()):
            assert torch.equal(mine.content(), theirs.target), mine.name
        assert_equal_steps(steps_of(runner), steps_of(plain))
    one = next(slot for slot in runner._model.slots() if slot.name == "model.layers.3.mlp.down_proj.weight")
    assert one.memory is not None
    one.fill(torch.zeros(one.shape))  # one tensor alone, as trainers send them
    one.memory.write_back()
    assert not one.content().any()
    assert next(s for s in runner._model.slots() if s.name == "model.layers.3.mlp.up_proj.weight").content().any()


def test_a_failed_update_leaves_no_layer_behind(tmp_path):
    save_model(tmp_path / "whole", "Llama", num_hidden_layers=7)
    runner = runner_of(tmp_path / "whole", ALL)
    wanted = steps_of(runner)
    save_model(tmp_path / "half", "Llama", num_hidden_layers=7, shard="100KB")
    files = checkpoint_files(tmp_path / "half")
    (tmp_path / "half" / "model.safetensors.index.json").unlink()
    files[-1].unlink()
    with pytest.raises(ConfigError, match="lacks"):
        runner.update_weights(str(tmp_path / "half"), None)
    steps_of(runner)
    runner.update_weights(str(tmp_path / "whole"), None)
    assert_equal_steps(steps_of(runner), wanted)


def test_release_and_resume(tmp_path):
    save_model(tmp_path, "Llama", num_hidden_layers=7)
    runner = runner_of(tmp_path, ALL)
    wanted = steps_of(runner)
    runner.release(["weights"])
    assert weight_bytes(runner) == 0
    runner.resume(["weights"], complete=True)
    assert_equal_steps(steps_of(runner), wanted)


def test_what_saves_nothing_is_refused(tmp_path):
    save_model(tmp_path, "Llama", num_hidden_layers=4)
    with pytest.raises(ConfigError, match="--offload-group-size puts 2 of 4 layers into host memory"):
        runner_of(tmp_path, OffloadArgs(offload_group_size=2))
    with pytest.raises(ConfigError, match="--cpu-offload-gb puts 0 of 4 layers into host memory"):
        runner_of(tmp_path, OffloadArgs(cpu_offload_gb=1e-6))


def test_a_host_without_the_memory(tmp_path, monkeypatch):
    save_model(tmp_path, "Llama", num_hidden_layers=4)
    monkeypatch.setattr("baton.common.weights.offload.layer_stack.available_host_bytes", lambda: 1000)
    with pytest.raises(ConfigError, match="this host has 0.0 GiB: put fewer layers there with --cpu-offload-gb"):
        runner_of(tmp_path, ALL)
