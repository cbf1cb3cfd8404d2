"""Packed integer weights on a GPU: kernels against their twins, shapes of real layers, CUDA graphs, whole models."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch

from baton.kernels import reference
from baton.kernels.arguments import PackedInts
from baton.kernels.gemm.packed_int_matmul import packed_int_matmul
from baton.kernels.moe.packed_int_experts import packed_int_expert_products
from baton.tests.helpers.kernel_cases import check_cases
from baton.tests.helpers.packed_checkpoints import FORMS, save_packed
from baton.tests.helpers.small_models import forward, load_runner, save_model, scattered_pages, server_config
from baton.tests.helpers.small_moe import save_moe

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
TOKENS = np.random.default_rng(2).integers(0, 97, 60)
SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}


def test_kernels_equal_their_twins():
    check_cases("packed_int_cases.py", timeout=280)


def packed(*shape: int, bits: int, group: int, zeros: bool) -> PackedInts:
    """Weights of a deviation near 0.02."""
    *stack, out, width = shape
    values = torch.randint(0, 256, (*stack, out, width * bits // 8), dtype=torch.uint8, device="cuda")
    scales = (torch.rand(*stack, width // group, out, device="cuda") + 0.5) * 0.07 / 2**bits
    points = torch.randint(0, 2**bits, scales.shape, device="cuda") if zeros else 1 << (bits - 1)
    return PackedInts(values, reference.scale_words(scales, points), None, bits, group)


@pytest.mark.parametrize("bits,group,zeros", [(4, 128, True), (4, 32, False), (8, 128, True), (8, 4096, False)])
@pytest.mark.parametrize("rows", [1, 5, 16, 17, 64, 100, 511, 512, 3000])
def test_layers_of_llama_8b(rows, bits, group, zeros):
    """Every size of tile and the library's product, in bfloat16, against the twin in float32."""
    for out in (6144, 4096):
        weight = packed(out, 4096, bits=bits, group=group, zeros=zeros)
        x = torch.randn(rows, 4096, device="cuda").bfloat16()
        want = reference.packed_int_matmul(x.float(), weight)
        got = packed_int_matmul(x, weight).float()
        assert (got - want).norm() <= 0.01 * want.norm()
        assert (got - want).abs().max() <= 0.05 * want.abs().max()
        assert torch.equal(packed_int_matmul(x, weight).float(), got)


@pytest.mark.parametrize("tokens", [1, 13, 200, 1500])
def test_the_shape_of_qwen3_30b(tokens):
    hidden, experts, size, top_k = 2048, 128, 768, 8
    gate_up = packed(experts, 2 * size, hidden, bits=4, group=128, zeros=True)
    down = packed(experts, hidden, size, bits=4, group=128, zeros=True)
    x = torch.randn(tokens, hidden, device="cuda").bfloat16()
    ids = torch.rand(tokens, experts, device="cuda").topk(top_k).indices
    got = packed_int_expert_products(x, [gate_up], [down], ids).float().view(tokens, top_k, hidden)
    for token in {0, tokens // 2, tokens - 1}:
        for choice in (0, top_k - 1):
            one = [weight._replace(values=weight.values[ids[token, choice]], scales=weight.scales[ids[token, choice]])
                   for weight in (gate_up, down)]
            between = reference.silu_and_mul(reference.packed_int_matmul(x[token][None].float(), one[0]))
            want = reference.packed_int_matmul(between, one[1])[0]
            assert (got[token, choice] - want).norm() <= 0.02 * want.norm()


def test_products_under_a_cuda_graph():
    """Split products replayed with other rows."""
    weight = packed(4096, 4096, bits=4, group=128, zeros=True)
    inputs = [torch.randn(7, 4096, device="cuda").bfloat16() for _ in range(3)]
    x = inputs[0].clone()
    packed_int_matmul(x, weight)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = packed_int_matmul(x, weight)
    for given in inputs:
        x.copy_(given)
        graph.replay()
        assert torch.equal(out, packed_int_matmul(given, weight))


@pytest.mark.parametrize("form", ["awq", "gptq act-order", "gptq 8 bits, act-order", "compressed-tensors asymmetric"])
@pytest.mark.parametrize("family", ["Qwen2", "Qwen3Moe"])
def test_float32_logits_equal_the_dense_model(tmp_path, family, form):
    save = (partial(save_model, family="Qwen2", **SIZES) if family == "Qwen2" else
            partial(save_moe, family=family, **SIZES, moe_intermediate_size=64))
    dense, logits = save_packed(tmp_path / "model", FORMS[form], save), []
    for folder in (dense, tmp_path / "model"):
        runner = load_runner(server_config(folder, backend="triton", dtype="float32"), device="cuda:0")
        pages = scattered_pages(runner, 1, 60)[0]
        parts = (TOKENS[:59], 0), (TOKENS[59:], 59)
        logits.append(torch.cat([forward(runner, [(*part, pages)]) for part in parts]))
    torch.testing.assert_close(*logits, atol=2e-3, rtol=1e-3)
