"""Experts in float8: from checkpoints, made as they are loaded, shared by ranks, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from baton.common.api.errors import ConfigError
from baton.common.config.moe import MoESpec
from baton.common.distributed.expert_parallel import ExpertParallel
from baton.common.distributed.tp import TPGroup
from baton.common.layers.moe.experts import Experts
from baton.common.quantization.fp8 import AS_LOADED, Fp8
from baton.common.weights.slots import allocator
from baton.kernels.reference import silu_and_mul
from baton.tests.helpers.dummy_weights import fill_dummy
from baton.tests.helpers.fp8_checkpoints import FORMS, SIZES, PlainLinear, state
from baton.tests.helpers.small_models import expected_logits, forward, load_runner, scattered_pages, server_config
from baton.tests.helpers.small_moe import save_moe

TOKENS = np.random.default_rng(2).integers(0, 97, 30)
SPEC = MoESpec(num_experts=4, top_k=2, intermediate_size=256, layers=(0,))


def experts(scheme: Fp8 | None, share: ExpertParallel | None = None) -> Experts:
    made = Experts("mlp.experts", SPEC, 128, share or ExpertParallel(TPGroup()),
                   allocator(torch.float32, torch.device("cpu"), scheme))
    fill_dummy(made.slots(), 3)
    return made


@pytest.mark.parametrize("scheme", [*AS_LOADED.values(), Fp8("block", stored=True),
                                    Fp8("tensor", stored=True)],
                         ids=lambda scheme: f"{scheme.weights}{' stored' * scheme.stored}")
def test_every_expert_is_a_linear_layer_of_its_form(scheme):
    """The grouped product of stacks is what the layers that the stacks consist of compute one by one."""
    made = experts(scheme)
    torch.manual_seed(0)
    x = torch.randn(9, 128)
    places = torch.stack([torch.randperm(4)[:2] for _ in range(9)])
    weights = torch.rand(9, 2)
    want = torch.zeros(9, 128)
    for token in range(9):
        for place, weight in zip(places[token].tolist(), weights[token]):
            between = silu_and_mul(made.gate_up.methods[place](x[token:token + 1]))
            want[token] += weight * made.down.methods[place](between)[0]
    torch.testing.assert_close(made(x, places, weights), want, atol=1e-5, rtol=1e-4)
    assert made.gate_up.parameters[0].dtype == torch.float8_e4m3fn and want.std() > 0


@pytest.mark.parametrize("flag", AS_LOADED)
def test_slices_of_ranks_add_up(flag):
    """Both ways of sharing experts: whole ones, and halves of each. Scales of halves are finer, so that sums differ by
    what float8 leaves out."""
    torch.manual_seed(0)
    x = torch.randn(20, 128)
    places = torch.stack([torch.randperm(4)[:2] for _ in range(20)])
    weights = torch.rand(20, 2)
    want = experts(AS_LOADED[flag])(x, places, weights)
    for ep, tolerance in ((2, 1e-5), (1, 0.1)):
        found = torch.zeros(20, 128)
        for rank in range(2):
            part = experts(AS_LOADED[flag], ExpertParallel(TPGroup(rank, 2), ep))
            found += part(x, places - (rank * 2 if ep == 2 else 0), weights)
        assert (found - want).norm() < tolerance * want.norm()


@pytest.mark.parametrize("form", ["blocks", "tensor", "channel"])
def test_checkpoints(tmp_path, form):
    """Against transformers over the rounded weights: what differs is the rounding of activations. All experts compute
    all tokens, for rounding may change which are chosen."""
    model = save_moe(tmp_path, "Qwen3Moe", **SIZES, moe_intermediate_size=128, num_experts=4, num_experts_per_tok=4)
    exact = expected_logits(model, TOKENS)
    tensors = load_file(tmp_path / "model.safetensors")
    for name in [name for name in tensors if "_proj.weight" in name]:
        plain = PlainLinear(tensors[name], None, form)
        tensors.update(plain.tensors(name.removesuffix(".weight")))
        parts = name.split(".")
        if "experts" not in parts:
            model.get_parameter(name).data.copy_(plain.weight)
            continue
        layer, expert, part = int(parts[2]), int(parts[5]), parts[6]
        stacked = model.model.layers[layer].mlp.experts
        target = stacked.down_proj[expert] if part == "down_proj" else stacked.gate_up_proj[expert].chunk(2)[
            part == "up_proj"]
        target.data.copy_(plain.weight)
    save_file(tensors, tmp_path / "model.safetensors")
    state(tmp_path, FORMS[form])
    runner = load_runner(server_config(tmp_path))
    pages = scattered_pages(runner, 1, 30)[0]
    found = forward(runner, [(TOKENS, 0, pages)])
    rounded = expected_logits(model, TOKENS)
    assert 1e-3 * rounded.norm() < (found - rounded).norm() < 0.1 * rounded.norm()
    assert (found - exact).norm() < 0.2 * exact.norm()


def test_what_grouped_products_do_not_compute_is_refused():
    with pytest.raises(ConfigError, match="mlp.experts.0.gate_proj is quantized with static scales of activations"):
        experts(Fp8("tensor", "static", stored=True))
    with pytest.raises(ConfigError, match="mlp.experts.0.gate_proj is quantized in blocks of 64 x 128; experts are"):
        experts(Fp8("block", stored=True, block=(64, 128)))
