"""Files of ranks: written by a server's ranks, read by those of one with the same, or with other, parallel sizes."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from baton.common.api.errors import ConfigError, InvalidRequest
from baton.common.config.server import ModelArgs
from baton.common.distributed.parallel import Parallel
from baton.common.distributed.tp import TPGroup
from baton.common.models.registry import build_model, load_model_spec
from baton.common.weights.fingerprint import identify
from baton.common.weights.loader import load_weights, silent
from baton.common.weights.sharded_state_source import PATTERN, save_sharded
from baton.common.weights.source import open_weights
from baton.tests.helpers.small_models import (
    expected_logits,
    forward,
    load_runner,
    save_model,
    scattered_pages,
    server_config,
)

TOKENS = np.arange(1, 12)


def slots_of(args: ModelArgs, rank: int, size: int) -> list:
    spec = load_model_spec(args)
    model = build_model(spec, Parallel(TPGroup(rank, size)), torch.float32, torch.device("cpu"))
    slots = [*model.slots()]
    load_weights(open_weights(args), slots, silent, tied=False)
    return slots


def save_ranks(folder, target, size: int, max_bytes: int = 1 << 30) -> ModelArgs:
    for rank in range(size):
        save_sharded(slots_of(ModelArgs(str(folder)), rank, size), target, rank, PATTERN, max_bytes,
                     folder if rank == 0 else None)
    return ModelArgs(str(target), load_format="sharded_state")


def test_ranks_read_their_files_and_others_parts_of_them(tmp_path):
    model = save_model(tmp_path / "model", "Llama")
    args = save_ranks(tmp_path / "model", tmp_path / "saved", 2, max_bytes=40_000)
    names = {file.name for file in (tmp_path / "saved").iterdir()}
    assert {"config.json", "generation_config.json", "model-rank-1-part-1.safetensors"} <= names
    for size in (1, 2, 4):
        for rank in range(size):
            found = slots_of(args, rank, size)
            for slot, other in zip(found, slots_of(ModelArgs(str(tmp_path / "model")), rank, size)):
                assert torch.equal(slot.target, other.target), slot.name
    runner = load_runner(server_config(tmp_path / "saved", load_format="sharded_state"))
    torch.testing.assert_close(forward(runner, [(TOKENS, 0, scattered_pages(runner, 1, 16)[0])]),
                               expected_logits(model, TOKENS), atol=1e-4, rtol=0)
    first = identify(args, load_model_spec(args)).fingerprint
    assert first == identify(args, load_model_spec(args)).fingerprint
    assert torch.equal(open_weights(args).find("lm_head.weight")[3:70], model.lm_head.weight[3:70])
    with pytest.raises(ConfigError, match="lacks nothing"):
        open_weights(args).find("nothing")
    for file in (tmp_path / "saved").glob("model-rank-1-*"):
        file.unlink()
    with pytest.raises(ConfigError, match="lack a part of a tensor of model-rank-0-part-0.safetensors: save them"):
        slots_of(args, 1, 2)


def test_what_cannot_be_saved_or_read(tmp_path):
    save_model(tmp_path / "model", "Llama")
    slots = slots_of(ModelArgs(str(tmp_path / "model")), 0, 1)
    with pytest.raises(InvalidRequest, match="is quantized or repacked: such weights are not saved"):
        save_sharded([dataclasses.replace(slots[0], load=lambda part: None)], tmp_path / "x", 0, PATTERN, 1, None)
    (tmp_path / "file").touch()
    with pytest.raises(InvalidRequest, match="Cannot write"):
        save_sharded(slots, tmp_path / "file", 0, PATTERN, 1 << 30, None)
    args = ModelArgs(str(tmp_path / "model"), load_format="sharded_state")
    with pytest.raises(ConfigError, match="holds no files of ranks .* let a running server write them by"):
        open_weights(args).find("lm_head.weight")
    save_file({"lm_head.weight": torch.zeros(2)}, tmp_path / "model" / "model-rank-0-part-0.safetensors")
    with pytest.raises(ConfigError, match="as a rank's file"):
        open_weights(args).find("lm_head.weight")
