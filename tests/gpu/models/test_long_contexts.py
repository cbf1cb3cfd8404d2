"""Attention over contexts of one token to 32,768 side by side, cut into many pieces, against the torch backend."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from baton.common.attention.mla.select import latent_backend
from baton.common.attention.select import select_backend
from baton.common.attention.workspace import AttentionWorkspace
from baton.common.config.mla import MLASpec
from baton.common.forward.forward_batch import ForwardBatch, Row, build_forward_batch
from baton.common.forward.step_context import AttentionPlan
from baton.common.kvcache.layout import KVLayout
from baton.common.kvcache.pool import KVPool
from baton.tests.gpu.kernels.test_attention import fused

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

CUDA = torch.device("cuda", 0)
PAGE = 16
DECODED = (1, 2, 16, 17, 255, 256, 257, 511, 4096, 30_001, 32_768)
"""Tokens of each request, the one that is computed included."""
MANY = (*DECODED, *range(90, 110), *range(1000, 1020))
"""So many that another kernel may take them."""
EXTENDED = ((0, 65), (4095, 1), (20_000, 300), (128, 129))
"""Tokens before a chunk, and of it."""
MOST = 40_000
DEEPSEEK = MLASpec(q_lora_rank=None, kv_lora_rank=512, nope_dim=128, rope_dim=64, v_dim=128, scale=192**-0.5)


def pools_of(layout: KVLayout) -> list[KVPool]:
    """Two that hold the same, as if all tokens had been stored."""
    pools = [KVPool(layout, sum(-(-length // PAGE) for length in MANY), CUDA) for _ in range(2)]
    held = torch.randn(pools[0].groups[0].shape, device=CUDA, generator=torch.Generator(CUDA).manual_seed(3))
    for pool in pools:
        pool.groups[0].copy_(held)
    return pools


def batch_of(parts: list[tuple[int, int]], pages: np.ndarray) -> ForwardBatch:
    """Chunks of ``(tokens before, tokens)``, each over pages of its own."""
    rows = []
    for start, count in parts:
        mine, pages = np.split(pages, [-(-(start + count) // PAGE)])
        rows.append(Row([0] * count, start, mine))
    return build_forward_batch(rows, PAGE, CUDA)


def check(backends: list, run: Callable[[AttentionPlan, int], torch.Tensor]) -> None:
    """``run(plan, rows)``, the same inputs in each call; a decode step also as one that is captured is planned."""
    pages = np.random.default_rng(0).permutation(backends[0].pool.num_pages)
    few, many = ([(length - 1, 1) for length in lengths] for lengths in (DECODED, MANY))
    for parts, longest in ((few, None), (few, MOST), (many, None), (many, MOST), (list(EXTENDED), None)):
        batch = batch_of(parts, pages)
        plans = [backend.plan(batch, AttentionWorkspace(CUDA), max_length=longest) for backend in backends]
        want, got = (run(plan, batch.num_tokens).float() for plan in plans)
        errors = (got - want).flatten(1).norm(dim=-1) / want.flatten(1).norm(dim=-1)
        assert errors.max() < 0.02, (batch.is_decode, longest, errors)


@pytest.mark.parametrize("heads,kv_heads", [(32, 8), (16, 1)])
@pytest.mark.parametrize("stored", ["bfloat16", "float8_e4m3fn"])
@pytest.mark.parametrize("window", [None, 4096])
def test_keys_and_values(heads, kv_heads, stored, window):
    layout = KVLayout((1,), kv_heads, 128, PAGE, stored)
    backends = [select_backend(name, CUDA, pool, heads, "bfloat16", window)
                for name, pool in zip(("torch", "triton"), pools_of(layout))]
    check(backends, lambda plan, rows: plan.run(0, *fused(rows, heads, kv_heads, 128, "bfloat16", rows)))


@pytest.mark.parametrize("heads", [16, 128])
@pytest.mark.parametrize("stored", ["bfloat16", "float8_e4m3fn"])
def test_latents(heads, stored):
    layout = KVLayout((1,), 1, DEEPSEEK.latent_dim, PAGE, stored, "latent")
    backends = [latent_backend(name, pool, DEEPSEEK, heads, "bfloat16")
                for name, pool in zip(("torch", "triton"), pools_of(layout))]
    table = torch.zeros(MOST, 64, device=CUDA)
    table[:, :32] = 1.0  # turns nothing
    up = (torch.randn(heads, 256, 512, device=CUDA, generator=torch.Generator(CUDA).manual_seed(4)) / 23).bfloat16()

    def run(plan, rows: int) -> torch.Tensor:
        generator = torch.Generator(CUDA).manual_seed(rows)
        q = torch.randn(rows, heads, 192, device=CUDA, generator=generator).bfloat16()
        latent = torch.randn(rows, 576, device=CUDA, generator=generator).bfloat16()
        return plan.run(0, q, *latent.split([512, 64], -1), up, table)

    check(backends, run)
