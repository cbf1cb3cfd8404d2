"""Int8 weights and activations: every form of checkpoint, weights quantized as they are loaded, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from baton.common.api.errors import ConfigError
from baton.common.config.quantization import choose_quantization
from baton.common.distributed.tp import TPGroup
from baton.common.layers.linear import ColumnLinear, Columns, RowLinear
from baton.common.quantization.int8 import Int8
from baton.common.weights.slots import allocator
from baton.tests.common.quantization.test_quantization import filled, rms
from baton.tests.helpers.int8_checkpoints import PlainInt8, save_int8, stated
from baton.tests.helpers.small_models import expected_logits, logits_of, save_model
from baton.tests.helpers.small_moe import save_moe

TOKENS = np.random.default_rng(2).integers(0, 97, 30)
CPU = torch.device("cpu")


@pytest.mark.parametrize("kind", ["dynamic", "dynamic, asymmetric", "static", "static, asymmetric"])
def test_checkpoints_compute_what_the_plain_model_does(tmp_path, kind):
    """But for values between two integers that fall to the other side by the order of a sum."""
    plain = expected_logits(save_int8(tmp_path, kind, stated(kind)), TOKENS)
    exact = expected_logits(save_model(tmp_path / "exact", "Qwen3"), TOKENS)
    found = logits_of(tmp_path, TOKENS)
    assert rms(found - plain) < 0.2 * rms(plain - exact) < 0.1 * rms(exact)
    assert torch.equal(logits_of(tmp_path, TOKENS, quantization="w8a8_int8"), found)


def test_the_flag_takes_both_kinds_of_checkpoints(tmp_path):
    """Int8 weights of which config.json says nothing, and weights that are not quantized."""
    plain = expected_logits(save_int8(tmp_path, "dynamic", None), TOKENS)
    stored = logits_of(tmp_path, TOKENS, quantization="w8a8_int8")
    exact = expected_logits(save_model(tmp_path / "exact", "Qwen3"), TOKENS)
    quantized = logits_of(tmp_path / "exact", TOKENS, quantization="w8a8_int8")
    assert rms(stored - plain) < 0.2 * rms(plain - exact)
    assert 1e-3 * rms(exact) < rms(quantized - exact) < 1.3 * rms(plain - exact)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors.pop("model.layers.1.mlp.up_proj.weight_scale")
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match="lacks model.layers.1.mlp.up_proj.weight_scale, and the weight is int8"):
        logits_of(tmp_path, TOKENS, quantization="w8a8_int8")


def test_experts(tmp_path):
    exact = expected_logits(save_moe(tmp_path, "Qwen3Moe"), TOKENS)
    found = logits_of(tmp_path, TOKENS, quantization="w8a8_int8")
    assert 1e-4 * rms(exact) < rms(found - exact) < 0.1 * rms(exact)
    with pytest.raises(ConfigError, match="static scales or zero points of activations, which is not supported"):
        Int8("channel", "static").experts(type("Stack", (), {"name": "experts.0"}), None, 0.0)


@pytest.mark.parametrize("scheme", [Int8("channel", "static", True, True), Int8(stored=True)], ids=str)
def test_ranks_hold_parts_of_what_one_rank_holds(scheme):
    torch.manual_seed(1)
    kind, tensors = f"{scheme.activations}{', asymmetric' * scheme.asymmetric}", {}
    for part in "abc":
        tensors |= PlainInt8(torch.randn(64, 32), None, kind).tensors(part)
    allocate, x, whole = allocator(torch.float32, CPU, scheme), torch.randn(5, 32), []
    for size in (1, 2):
        columns, rows = [], []
        for rank in range(size):
            tp = TPGroup(rank, size)
            column = filled(ColumnLinear(32, [Columns.shard(part, 64, tp) for part in "ab"], False, allocate), tensors)
            column.method._finish()
            columns.append(column(x).split(column.sizes, 1))
            row = filled(RowLinear("c", 32, 64, False, tp, allocate), tensors)
            rows.append(row.method.dequantize())
        whole.append([torch.cat(parts, 1) for parts in zip(*columns)] + [torch.cat(rows, 1)])
    for one, two in zip(*whole):
        torch.testing.assert_close(one, two)


def test_dummy_weights(tmp_path):
    save_int8(tmp_path, "static, asymmetric", stated("static, asymmetric"))
    (tmp_path / "model.safetensors").unlink()
    found = [logits_of(tmp_path, TOKENS, load_format="dummy", random_seed=seed) for seed in (1, 1, 2)]
    assert torch.equal(*found[:2]) and not torch.allclose(*found[1:]) and found[0].isfinite().all()


@pytest.mark.parametrize("changes,sentence", [
    ({"weights": {"symmetric": False}}, "where the weights are symmetric and their strategy is 'tensor' or 'channel'"),
    ({"input_activations": {"strategy": "tensor"}}, "where their strategy is 'token', dynamic, or 'tensor', static"),
])
def test_other_variants_are_refused(changes, sentence):
    config = stated("dynamic")
    for side, change in changes.items():
        config["config_groups"]["group_0"][side].update(change)
    with pytest.raises(ConfigError, match=sentence):
        choose_quantization({"quantization_config": config}, None)
