"""gpt-oss on a GPU: kernels against their twins, backends against plain torch, whole models against transformers."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec

import numpy as np
import pytest
import torch

from baton.common.attention.base import AttentionBackend
from baton.common.attention.select import select_backend
from baton.common.attention.workspace import AttentionWorkspace
from baton.common.forward.forward_batch import Row, build_forward_batch
from baton.common.kvcache.layout import KVLayout
from baton.common.kvcache.pool import KVPool
from baton.kernels import reference
from baton.kernels.arguments import ExpertBiases
from baton.kernels.moe.moe_experts import moe_experts
from baton.tests.gpu.kernels.test_attention import fused
from baton.tests.gpu.whole_models import check_bfloat16, check_graphs_and_overlap
from baton.tests.helpers.gpt_oss_models import save_gpt_oss
from baton.tests.helpers.kernel_cases import check_cases
from baton.tests.helpers.small_models import expected_logits, forward, load_runner, scattered_pages, server_config

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

CUDA = torch.device("cuda", 0)
FLASHINFER = pytest.mark.skipif(find_spec("flashinfer") is None, reason="not installed")


def test_kernels_equal_their_twins():
    check_cases("window_cases.py")


Make = Callable[[KVPool, int], AttentionBackend]


def ours(window: int | None) -> Make:
    return lambda pool, heads: select_backend("triton", CUDA, pool, heads, "bfloat16", window)


def flashinfers(window: int | None) -> Make:
    from baton.common.attention.flashinfer_backend import FlashInferBackend
    return lambda pool, heads: FlashInferBackend(pool, heads, torch.bfloat16, window)


def check_backend(make: Make, heads: int, kv_heads: int, dim: int, window: int | None, cache: str = "bfloat16",
                  decodes: bool = True) -> None:
    """Chunks of prompts across the window's border, and a decode step, with sinks, against the torch backend."""
    layout = KVLayout((1,), kv_heads, dim, 16, cache)
    pools = [KVPool(layout, 200, CUDA) for _ in range(2)]
    runs = [select_backend("torch", CUDA, pools[0], heads, "bfloat16", window), make(pools[1], heads)]
    sinks = torch.randn(heads, device=CUDA, generator=torch.Generator(CUDA).manual_seed(7)) * 3
    pages = np.random.default_rng(0).permutation(200)[:51].reshape(3, 17)
    prompts, workspace = [5, 257, 130], AttentionWorkspace(CUDA)
    steps = [[(b, start, min(64, n - start)) for b, n in enumerate(prompts) if start < n]
             for start in range(0, 257, 64)]
    steps += [[(b, n, 1) for b, n in enumerate(prompts)]] * decodes
    for seed, rows in enumerate(steps):
        batch = build_forward_batch([Row([0] * count, start, pages[b]) for b, start, count in rows], 16, CUDA)
        results = []
        for backend in runs:
            plan = backend.plan(batch, workspace)
            results.append(plan.run(0, *fused(batch.num_tokens, heads, kv_heads, dim, "bfloat16", seed), sinks=sinks))
        torch.testing.assert_close(results[1].float(), results[0].float(), atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("window", [None, 1, 48])
@pytest.mark.parametrize("cache", ["bfloat16", "float8_e4m3fn"])
def test_our_backend_with_windows_and_sinks(window, cache):
    check_backend(ours(window), 16, 2, 64, window, cache)


@FLASHINFER
def test_flashinfer_s_prompts_with_sinks():
    check_backend(flashinfers(None), 8, 2, 128, None, decodes=False)


@FLASHINFER
@pytest.mark.slow  # minutes of compilation
def test_flashinfer_with_windows_and_sinks():
    check_backend(flashinfers(48), 8, 2, 128, 48)


@pytest.mark.parametrize("tokens", [1, 60, 3000])
def test_the_shape_of_gpt_oss_20b(tokens):
    """In bfloat16, by every kind of default tiles, against the twin in float32."""
    hidden, experts, size = 2880, 32, 2880
    generator = torch.Generator("cuda").manual_seed(0)

    def random(*shape: int, scale: float) -> torch.Tensor:
        return (torch.randn(shape, generator=generator, device="cuda") * scale).bfloat16()

    x, gate_up = random(tokens, hidden, scale=1.0), random(experts, 2 * size, hidden, scale=0.06)
    down = random(experts, hidden, size, scale=0.03)
    biases = ExpertBiases(random(experts, 2 * size, scale=1.0), random(experts, hidden, scale=1.0))
    places = torch.rand(tokens, experts, generator=generator, device="cuda").topk(4).indices
    weights = torch.rand(tokens, 4, generator=generator, device="cuda")
    got = moe_experts(x, gate_up, down, places, weights, biases=biases, limit=7.0).float()
    want = reference.moe_experts(x.float(), gate_up.float(), down.float(), places, weights,
                                 biases=ExpertBiases(*(bias.float() for bias in biases)), limit=7.0)
    assert (got - want).norm() <= 0.01 * want.norm()


def test_float32_logits_equal_transformers(tmp_path):
    """Over our kernels, with decode steps beyond the window."""
    model = save_gpt_oss(tmp_path, hidden_size=64, intermediate_size=32, head_dim=64)
    runner = load_runner(server_config(tmp_path, backend="triton", dtype="float32"), device="cuda:0")
    tokens = np.random.default_rng(0).integers(0, 97, 60)
    pages = scattered_pages(runner, 1, 60)[0]
    want = expected_logits(model, tokens)
    got = [forward(runner, [(tokens[:11], 0, pages)]).cpu(), forward(runner, [(tokens[11:57], 11, pages)]).cpu()]
    for i in range(57, 60):  # a graph's logits are overwritten by the next
        got.append(forward(runner, [(tokens[i:i + 1], i, pages)]).cpu())
    torch.testing.assert_close(torch.cat(got), want, atol=1e-4, rtol=0)


@pytest.mark.parametrize("backend", ["triton", pytest.param("flashinfer", marks=[FLASHINFER, pytest.mark.slow])])
def test_bfloat16_stays_as_close_as_transformers(tmp_path, backend):
    """Against float32: our bfloat16 error is at most that of transformers in bfloat16, give or take a half."""
    check_bfloat16(save_gpt_oss(tmp_path, head_dim=64, num_attention_heads=8, hidden_size=256), tmp_path, backend)


def test_graphs_and_overlap_change_no_token(tmp_path):
    save_gpt_oss(tmp_path, eos_token_id=None, hidden_size=64, intermediate_size=32, head_dim=32)
    check_graphs_and_overlap(tmp_path)
