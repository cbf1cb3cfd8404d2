"""Weights quantized to integers while they are loaded, by torchao's names."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from baton.common.api.errors import ConfigError
from baton.common.distributed.tp import TPGroup
from baton.common.layers.linear import ColumnLinear, Columns, RowLinear
from baton.common.quantization.int_weight_only import IntWeightOnly
from baton.common.weights.slots import allocator
from baton.tests.common.quantization.test_quantization import filled, rms
from baton.tests.helpers.small_models import expected_logits, logits_of, save_model
from baton.tests.helpers.small_moe import save_moe

TOKENS = np.random.default_rng(2).integers(0, 97, 30)
SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}


@pytest.mark.parametrize("flag,most", [("int8wo", 0.02), ("int4wo-32", 0.3)])
@pytest.mark.parametrize("kind", ["dense", "experts"])
def test_logits_are_near_the_model_s(tmp_path, kind, flag, most):
    model = save_model(tmp_path, "Qwen3", **SIZES) if kind == "dense" else save_moe(
        tmp_path, "Qwen3Moe", **SIZES, moe_intermediate_size=32)
    exact = expected_logits(model, TOKENS)
    found = logits_of(tmp_path, TOKENS, quantization=flag)
    assert 1e-4 * rms(exact) < rms(found - exact) < most * rms(exact)


@pytest.mark.parametrize("flag,most", [("int8wo", 0.01), ("int4wo-32", 0.1)])
def test_each_rank_quantizes_its_part(flag, most):
    torch.manual_seed(1)
    tensors = {f"{part}.weight": torch.randn(64, 64) * 0.1 for part in "abc"}
    allocate = allocator(torch.float32, torch.device("cpu"), IntWeightOnly.at_load(flag))
    for size in (1, 2):
        for rank in range(size):
            tp = TPGroup(rank, size)
            column = filled(ColumnLinear(64, [Columns.shard(part, 64, tp) for part in "ab"], False, allocate), tensors)
            row = filled(RowLinear("c", 64, 64, False, tp, allocate), tensors)
            want = torch.cat([tensors[f"{part}.weight"].chunk(size)[rank] for part in "ab"])
            assert rms(column.method.dequantize() - want) < most * rms(want)
            want = tensors["c.weight"].chunk(size, 1)[rank]
            assert rms(row.method.dequantize() - want) < most * rms(want)


def test_parts_that_groups_do_not_fill_are_refused():
    allocate = allocator(torch.float32, torch.device("cpu"), IntWeightOnly.at_load("int4wo-64"))
    with pytest.raises(ConfigError, match="c has 32 inputs on each rank, and its weights are quantized in groups of"):
        RowLinear("c", 64, 64, False, TPGroup(0, 2), allocate)
