"""Weights of bitsandbytes: its checkpoints, weights quantized as they are loaded, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from baton.common.api.errors import ConfigError
from baton.common.distributed.tp import TPGroup
from baton.common.layers.linear import ColumnLinear, Columns, RowLinear
from baton.common.quantization.bitsandbytes import BitsAndBytes
from baton.common.weights.slots import allocator
from baton.tests.common.quantization.test_quantization import filled, rms
from baton.tests.helpers.bitsandbytes_checkpoints import SIZES, pack_int8, save_bitsandbytes
from baton.tests.helpers.small_models import expected_logits, logits_of, save_model
from baton.tests.helpers.small_moe import save_moe

TOKENS = np.random.default_rng(2).integers(0, 97, 30)
CPU = torch.device("cpu")


@pytest.mark.parametrize("kind,nested", [("nf4", False), ("nf4", True), ("fp4", False), ("int8", False)])
def test_checkpoints_compute_what_the_plain_model_does(tmp_path, kind, nested):
    plain = expected_logits(save_bitsandbytes(tmp_path, kind, nested), TOKENS)
    found = logits_of(tmp_path, TOKENS)
    torch.testing.assert_close(found, plain, atol=2e-3, rtol=2e-3)
    assert torch.equal(logits_of(tmp_path, TOKENS, quantization="bitsandbytes"), found)
    if kind == "nf4":
        float8 = logits_of(tmp_path, TOKENS, quantization="fp8")
        assert 1e-3 * rms(plain) < rms(float8 - plain) < 0.2 * rms(plain)


@pytest.mark.parametrize("kind", ["dense", "experts"])
def test_weights_are_quantized_as_they_are_loaded(tmp_path, kind):
    save = save_model if kind == "dense" else save_moe
    experts = {"moe_intermediate_size": 64} if kind == "experts" else {}
    exact = expected_logits(save(tmp_path, "Qwen3" if kind == "dense" else "Qwen3Moe", **SIZES, **experts), TOKENS)
    found = logits_of(tmp_path, TOKENS, quantization="bitsandbytes")
    assert 1e-2 * rms(exact) < rms(found - exact) < 0.5 * rms(exact)


@pytest.mark.parametrize("scheme", [BitsAndBytes(), BitsAndBytes("int8", True)], ids=str)
def test_ranks_hold_parts_of_what_one_rank_holds(scheme):
    torch.manual_seed(1)
    tensors = {}
    for part in "abc":
        weight = torch.randn(128, 128)
        tensors |= pack_int8(f"{part}.weight", weight, "", False)[0] if scheme.stored else {f"{part}.weight": weight}
    allocate, whole = allocator(torch.float32, CPU, scheme), []
    for size in (1, 2):
        columns, rows = [], []
        for rank in range(size):
            tp = TPGroup(rank, size)
            parts = [Columns.shard(part, 128, tp) for part in "ab"]
            column = filled(ColumnLinear(128, parts, False, allocate), tensors)
            columns.append(column.method.dequantize().split(column.sizes))
            rows.append(filled(RowLinear("c", 128, 128, False, tp, allocate), tensors).method.dequantize())
        whole.append([torch.cat(parts) for parts in zip(*columns)] + [torch.cat(rows, 1)])
    for one, two in zip(*whole):
        assert torch.equal(one, two)


def test_dummy_weights(tmp_path):
    save_bitsandbytes(tmp_path, "nf4")
    (tmp_path / "model.safetensors").unlink()
    found = [logits_of(tmp_path, TOKENS, load_format="dummy", random_seed=seed) for seed in (1, 1, 2)]
    assert torch.equal(*found[:2]) and not torch.allclose(*found[1:]) and found[0].isfinite().all()


def test_what_is_refused():
    with pytest.raises(ConfigError, match="c is quantized in blocks of 64 values, and a rank's share of 32 of its 64 "
                                          "inputs cuts one: choose another --tp-size"):
        RowLinear("c", 64, 64, False, TPGroup(0, 2), allocator(torch.float32, CPU, BitsAndBytes()))
    with pytest.raises(ConfigError, match="of the type 'af4' are not supported: use nf4, fp4 or int8"):
        BitsAndBytes.from_config({"bnb_4bit_quant_type": "af4"})
