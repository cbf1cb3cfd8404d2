"""Mixtures of experts on a GPU: kernels against their twins, CUDA graphs, whole models, a real layer's shape."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from baton.common.config.moe import MoESpec
from baton.common.distributed.expert_parallel import ExpertParallel
from baton.common.distributed.tp import TPGroup
from baton.common.layers.moe import MoE
from baton.common.weights.slots import allocator
from baton.kernels import reference
from baton.kernels.arguments import ExpertBiases, Scales
from baton.kernels.moe.moe_experts import moe_experts
from baton.kernels.moe.moe_sorted import supports_warp_specialized
from baton.kernels.tuning.moe import default_tiles, warp_specialized_tiles
from baton.tests.common.distributed.moe_rank import TOKENS
from baton.tests.common.distributed.test_moe_ranks import MOE_RANK
from baton.tests.gpu.whole_models import check_graphs_and_overlap
from baton.tests.helpers.kernel_cases import check_cases
from baton.tests.helpers.rank_processes import run_ranks
from baton.tests.helpers.small_models import expected_logits, forward, load_runner, scattered_pages, server_config
from baton.tests.helpers.small_moe import FAMILIES, save_moe

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def test_kernels_equal_their_twins():
    check_cases("moe_cases.py", "mxfp4_cases.py", timeout=280)


@pytest.mark.parametrize("tokens", [1, 13, 200, 1500, 5000])
def test_the_shape_of_qwen3_30b(tokens):
    """In bfloat16, by every size of default tiles, against the twin in float32; 5,000 tokens fill several parts of the
    alignment."""
    hidden, experts, size, top_k = 2048, 128, 768, 8
    generator = torch.Generator("cuda").manual_seed(0)

    def random(*shape: int, scale: float) -> torch.Tensor:
        return (torch.randn(shape, generator=generator, device="cuda") * scale).bfloat16()

    x, gate_up = random(tokens, hidden, scale=1.0), random(experts, 2 * size, hidden, scale=0.03)
    down = random(experts, hidden, size, scale=0.03)
    places = torch.rand(tokens, experts, generator=generator, device="cuda").topk(top_k).indices
    weights = torch.rand(tokens, top_k, generator=generator, device="cuda")
    got = moe_experts(x, gate_up, down, places, weights).float()
    want = reference.moe_experts(x.float(), gate_up.float(), down.float(), places, weights)
    assert (got - want).norm() <= 0.01 * want.norm()
    assert (got - want).abs().max() <= 0.05 * want.abs().max()


@pytest.mark.parametrize("by", ["block", "row"])
@pytest.mark.parametrize("tokens", [7, 700, 3000])
def test_the_shape_of_qwen3_30b_in_float8(tokens, by):
    """By the default tiles; both sides round the same values to float8, but for a few that the first product's last
    digit moves."""
    hidden, experts, size, top_k = 2048, 128, 768, 8
    generator = torch.Generator("cuda").manual_seed(0)
    x = torch.randn(tokens, hidden, generator=generator, device="cuda").bfloat16()
    gate_up, down = ((torch.randn(shape, generator=generator, device="cuda") * 8).to(torch.float8_e4m3fn)
                     for shape in ((experts, 2 * size, hidden), (experts, hidden, size)))
    shapes = [tuple(-(-n // 128) for n in w.shape[1:]) if by == "block" else w.shape[1:2] for w in (gate_up, down)]
    scales = Scales(*(torch.rand(experts, *shape, generator=generator, device="cuda") * 0.01 for shape in shapes), by)
    places = torch.rand(tokens, experts, generator=generator, device="cuda").topk(top_k).indices
    weights = torch.rand(tokens, top_k, generator=generator, device="cuda")
    got = moe_experts(x, gate_up, down, places, weights, scales).float()
    want = reference.moe_experts(x, gate_up, down, places, weights, scales).float()
    assert (got - want).norm() <= 0.02 * want.norm()


@pytest.mark.skipif(torch.cuda.is_available() and torch.cuda.get_device_capability() != (9, 0), reason="Hopper's alone")
@pytest.mark.parametrize("limit", [0.0, 0.5])
@pytest.mark.parametrize("tokens,num_places,hidden,size,dtype", [
    (1, 4, 256, 128, torch.bfloat16), (300, 6, 512, 192, torch.float16), (9000, 40, 1024, 448, torch.bfloat16),
    (20000, 5, 2048, 768, torch.bfloat16), (3000, 7, 512, 384, torch.float8_e4m3fn),
    (20000, 5, 2048, 768, torch.float8_e4m3fn),
], ids=str)
def test_warp_groups_equal_the_twin(tokens, num_places, hidden, size, dtype, limit):
    """Few experts with uneven loads, some of other ranks, half blocks, columns that no tile divides, many tiles a
    program; the same bits each time, and nearly those of the other sorted products. The twin's float8 differs where the
    first product's last digit moves a rounding."""
    assert supports_warp_specialized(torch.device("cuda", 0), hidden, size, dtype)
    generator = torch.Generator("cuda").manual_seed(0)
    given = torch.bfloat16 if dtype.itemsize == 1 else dtype
    x = torch.randn(tokens, hidden, generator=generator, device="cuda").to(given)
    logits = torch.randn(tokens, num_places + 3, generator=generator, device="cuda")
    places = (logits + torch.arange(num_places + 3, device="cuda") / 4).topk(3).indices - 2
    weights = torch.rand(tokens, 3, generator=generator, device="cuda")
    shapes, scales = ((num_places, 2 * size, hidden), (num_places, hidden, size)), None
    gate_up, down = ((torch.randn(shape, generator=generator, device="cuda") * 0.05).to(given) for shape in shapes)
    if dtype.itemsize == 1:
        gate_up, down = ((matrix * 100).to(dtype) for matrix in (gate_up, down))
        scales = Scales(*(torch.rand(n, rows // 128, depth // 128, generator=generator, device="cuda") * 0.01
                          for n, rows, depth in shapes), "block")
    tiles, biases = warp_specialized_tiles(dtype), None
    if limit:
        biases = ExpertBiases(*(torch.randn(shape[:2], generator=generator, device="cuda").to(given)
                                for shape in shapes))
    how = {"biases": biases, "limit": limit}
    got = moe_experts(x, gate_up, down, places, weights, scales, tiles, **how)
    want = reference.moe_experts(x, gate_up, down, places, weights, scales, **how).float()
    assert (got.float() - want).norm() <= (0.02 if scales else 0.01) * want.norm()
    assert (got.float() - want).abs().max() <= 0.05 * want.abs().max()
    others = default_tiles(1000, dtype)
    if size % others.down.depth == 0:
        near = moe_experts(x, gate_up, down, places, weights, scales, others, **how).float()
        assert (got.float() - near).norm() <= 0.003 * near.norm()
    for _ in range(5):
        assert torch.equal(moe_experts(x, gate_up, down, places, weights, scales, tiles, **how), got)


def test_a_layer_under_a_cuda_graph():
    """Captured with one choice of experts, replayed with others."""
    spec = MoESpec(num_experts=16, top_k=4, intermediate_size=64, layers=(0,), shared_size=64)
    layer = MoE("mixture", spec, 128, ExpertParallel(TPGroup()), allocator(torch.bfloat16, torch.device("cuda")))
    for slot in layer.slots():
        slot.target.normal_(0, 0.1)
    inputs = [torch.randn(24, 128, device="cuda").bfloat16() for _ in range(4)]
    with torch.inference_mode():
        x = inputs[0].clone()
        layer(x)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = layer(x)
        for given in inputs:
            x.copy_(given)
            graph.replay()
            torch.testing.assert_close(out, layer(given), atol=0, rtol=0)


@pytest.mark.parametrize("family", FAMILIES)
def test_float32_logits_equal_transformers(tmp_path, family):
    changes = {} if family == "Qwen3Moe" else {"hidden_size": 64}
    model = save_moe(tmp_path, family, **changes)
    runner = load_runner(server_config(tmp_path, backend="triton", dtype="float32"), device="cuda:0")
    tokens = np.random.default_rng(0).integers(0, 97, 60)
    pages = scattered_pages(runner, 1, 60)[0]
    want = expected_logits(model, tokens)
    got = [forward(runner, [(tokens[:59], 0, pages)]), forward(runner, [(tokens[59:], 59, pages)])]
    torch.testing.assert_close(torch.cat(got).cpu(), want, atol=1e-4, rtol=0)


def test_graphs_and_overlap_change_no_token(tmp_path):
    save_moe(tmp_path, "Qwen3Moe", eos_token_id=None, head_dim=32)
    check_graphs_and_overlap(tmp_path)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_two_gpus_equal_transformers(tmp_path):
    """Slices of experts, whole ones, tokens sent to them, and experts that move between graphs' replays, over NCCL."""
    checkpoints = tmp_path / "models"
    model = save_moe(checkpoints / "Qwen3Moe", "Qwen3Moe", num_hidden_layers=2)
    want = expected_logits(model, TOKENS)
    for found in run_ranks(MOE_RANK, 2, tmp_path, str(checkpoints), "cuda"):
        for name, logits in found["logits"].items():
            assert (logits - want).abs().max() < 2e-4, name
        for a2a, moved in found["balanced"].items():
            assert (moved["logits"] - want).abs().max() < 2e-4, a2a
            assert (moved["again"] - want).abs().max() < 2e-4, a2a
            assert len({str(step) for step in moved["placements"]}) >= 3
