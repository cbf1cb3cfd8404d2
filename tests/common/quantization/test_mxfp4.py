"""Experts that stay in MXFP4: their size, ranks' parts, flags that convert them, and weights without a checkpoint."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from baton.common.api.errors import ConfigError
from baton.common.config.moe import MoESpec
from baton.common.distributed.expert_parallel import ExpertParallel
from baton.common.distributed.tp import TPGroup
from baton.common.layers.moe.experts import Experts
from baton.common.quantization.mxfp4 import Mxfp4
from baton.common.weights.slots import allocator
from baton.tests.common.models.test_gpt_oss import packed
from baton.tests.helpers.dummy_weights import fill_dummy
from baton.tests.helpers.gpt_oss_models import save_gpt_oss
from baton.tests.helpers.small_models import expected_logits, logits_of

TOKENS = np.random.default_rng(2).integers(0, 97, 30)
SPEC = MoESpec(num_experts=4, top_k=2, intermediate_size=96, layers=(0,), gate_limit=7.0, expert_bias=True)


def experts(share: ExpertParallel | None = None, spec: MoESpec = SPEC) -> Experts:
    made = Experts("mlp.experts", spec, 64, share or ExpertParallel(TPGroup()),
                   allocator(torch.float32, torch.device("cpu"), Mxfp4()))
    fill_dummy(made.slots(), 3)
    return made


@pytest.mark.parametrize("size,ep,group", [(2, 2, 32), (2, 1, 16), (4, 1, 8)])
def test_parts_of_ranks_add_up(size, ep, group):
    """Whole experts, and parts of each that split the blocks which share a scale."""
    torch.manual_seed(0)
    x, weights = torch.randn(20, 64), torch.rand(20, 2)
    places = torch.stack([torch.randperm(4)[:2] for _ in range(20)])
    want = experts()(x, places, weights)
    found = torch.zeros(20, 64)
    for rank in range(size):
        part = experts(ExpertParallel(TPGroup(rank, size), ep))
        assert part.down.methods[0].group == group
        found += part(x, places - (rank * 2 if ep == 2 else 0), weights)
    torch.testing.assert_close(found, want, atol=1e-4, rtol=1e-5)


def test_memory_of_values_and_scales():
    """64 inputs are filled up to four groups of 32."""
    stacks = experts().gate_up.parameters
    assert [(stack.dtype, *stack.shape) for stack in stacks] == [(torch.uint8, 4, 192, 64), (torch.uint8, 4, 1, 192, 4)]


def test_parts_that_are_too_narrow_are_refused():
    with pytest.raises(ConfigError, match=r"down_proj has 6 inputs on each rank, and products in MXFP4 take multiples "
                                          "of 4: choose another --tp-size or --ep-size"):
        experts(ExpertParallel(TPGroup(0, 16)))


def test_flags_convert_packed_experts(tmp_path):
    model = save_gpt_oss(tmp_path, hidden_size=64, intermediate_size=96, num_hidden_layers=2)
    packed(model, tmp_path, 1)
    exact = expected_logits(model, TOKENS)
    kept = logits_of(tmp_path, TOKENS)
    assert torch.equal(logits_of(tmp_path, TOKENS, quantization="mxfp4"), kept)
    torch.testing.assert_close(kept, exact, atol=2e-3, rtol=2e-3)
    float8 = logits_of(tmp_path, TOKENS, quantization="fp8")
    assert 1e-3 * exact.norm() < (float8 - exact).norm() < 0.2 * exact.norm()


def test_dummy_weights(tmp_path):
    save_gpt_oss(tmp_path, hidden_size=64, intermediate_size=96, num_hidden_layers=1)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "quantization_config": {"quant_method": "mxfp4"}}))
    (tmp_path / "model.safetensors").unlink()
    found = [logits_of(tmp_path, TOKENS, load_format="dummy", random_seed=seed) for seed in (1, 1, 2)]
    assert torch.equal(*found[:2]) and not torch.allclose(*found[1:]) and found[0].isfinite().all()
