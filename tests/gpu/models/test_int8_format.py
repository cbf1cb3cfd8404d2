"""A quantization format in plain torch on a GPU: dense layers, and experts that it computes one by one."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from baton.common.config.server import KernelArgs
from baton.tests.helpers.hand_driven import Engine, tokens_of
from baton.tests.helpers.int8_format import registered
from baton.tests.helpers.small_models import forward, load_runner, save_model, scattered_pages, server_config
from baton.tests.helpers.small_moe import save_moe

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

TOKENS = np.random.default_rng(2).integers(0, 97, 30)
SIZES = {"hidden_size": 128, "intermediate_size": 256, "num_key_value_heads": 4, "head_dim": 64, "eos_token_id": None}
SAVE = {"dense": lambda folder: save_model(folder, "Qwen3", **SIZES),
        "experts": lambda folder: save_moe(folder, "Qwen3Moe", **SIZES, moe_intermediate_size=128, num_experts=4,
                                           num_experts_per_tok=4)}  # of all: rounding may change which are chosen


@pytest.fixture
def toy():
    with registered() as module:
        yield module


@pytest.mark.parametrize("kind", SAVE)
def test_logits_equal_those_of_a_cpu(tmp_path, toy, kind):
    SAVE[kind](tmp_path)
    found = []
    for device, options in (("cpu", {}), ("cuda", {"backend": "triton", "dtype": "bfloat16"})):
        runner = load_runner(server_config(tmp_path, quantization="toyint8", **options), device=device)
        found.append(forward(runner, [(TOKENS, 0, scattered_pages(runner, 1, 30)[0])]).float().cpu())
    assert (found[1] - found[0]).norm() < 0.1 * found[0].norm()


@pytest.mark.parametrize("kind", SAVE)
def test_graphs_change_no_token(tmp_path, toy, kind):
    SAVE[kind](tmp_path)
    found = []
    for kernels in (KernelArgs(disable_cuda_graph=True), KernelArgs(cuda_graph_bs=(8,))):
        engine = Engine(tmp_path, page_size=16, device="cuda", dtype="bfloat16", quantization="toyint8",
                        kernels=kernels)
        for i in range(8):
            engine.start(str(i), [(7 * i + j) % 90 + 5 for j in range(30)], max_new_tokens=20)
        found.append(tokens_of(engine.run()))
    assert sum(found[0][rid] == found[1][rid] for rid in found[0]) >= 7  # a near tie may fall otherwise
