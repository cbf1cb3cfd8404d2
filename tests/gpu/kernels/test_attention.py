"""The triton and flashinfer backends against the torch backend: extends over prefixes, decode, strided inputs."""

from __future__ import annotations

from importlib.util import find_spec

import numpy as np
import pytest
import torch

from baton.common.attention.select import choose_backend, select_backend
from baton.common.attention.workspace import AttentionWorkspace
from baton.common.forward.forward_batch import Row, build_forward_batch
from baton.common.kvcache.layout import KVLayout
from baton.common.kvcache.pool import KVPool

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

CUDA = torch.device("cuda", 0)
NUM_PAGES = 900


def backend_of(name: str, heads: int, kv_heads: int, dim: int, page_size: int, dtype: str):
    layout = KVLayout(groups=(2, 1), num_kv_heads=kv_heads, head_dim=dim, page_size=page_size, dtype=dtype)
    pool = KVPool(layout, NUM_PAGES, CUDA)
    return pool, select_backend(name, CUDA, pool, heads)


def fused(tokens: int, heads: int, kv_heads: int, dim: int, dtype: str, seed: int) -> list[torch.Tensor]:
    """Queries, keys and values as views into one projection's output, as a model passes them."""
    generator = torch.Generator(CUDA).manual_seed(seed)
    rows = torch.randn(tokens, (heads + 2 * kv_heads) * dim, device=CUDA, generator=generator)
    parts = rows.to(getattr(torch, dtype)).split([heads * dim, kv_heads * dim, kv_heads * dim], -1)
    return [part.unflatten(-1, (-1, dim)) for part in parts]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("heads,kv_heads,dim,page_size", [(32, 8, 128, 16), (4, 4, 64, 1), (14, 2, 64, 64)])
@pytest.mark.parametrize("name", ["triton", "flashinfer"])
def test_backends_agree(name, heads, kv_heads, dim, page_size, dtype):
    if name == "flashinfer" and (find_spec("flashinfer") is None or dtype == "float16"):
        pytest.skip("not installed, or minutes of compilation for a type that differs in no line of ours")
    table = torch.randn(600, dim, device=CUDA, generator=torch.Generator(CUDA).manual_seed(9))
    runs = [backend_of(kind, heads, kv_heads, dim, page_size, dtype) for kind in ("torch", name)]
    prompts, chunk, workspace = [5, 257, 130], 64, AttentionWorkspace(CUDA)
    each = -(-270 // page_size)
    pages = np.random.default_rng(0).permutation(NUM_PAGES)[:3 * each].reshape(3, each)
    steps = [[(b, start, min(chunk, n - start)) for b, n in enumerate(prompts) if start < n]
             for start in range(0, max(prompts), chunk)]
    steps.append([(b, n, 1) for b, n in enumerate(prompts)])
    for seed, rows in enumerate(steps):
        batch = build_forward_batch([Row([0] * count, start, pages[b]) for b, start, count in rows], page_size, CUDA)
        results = []
        for _, backend in runs:
            plan = backend.plan(batch, workspace)
            for layer in range(3):
                results.append(plan.run(layer, *fused(batch.num_tokens, heads, kv_heads, dim, dtype, seed + layer),
                                        table))
        for want, got in zip(results[:3], results[3:]):
            torch.testing.assert_close(got.float(), want.float(), atol=2e-2, rtol=2e-2)
    for want, got in zip(runs[0][0].groups, runs[1][0].groups):
        torch.testing.assert_close(got.float(), want.float(), atol=2e-2, rtol=1e-2)


def test_automatic_choice():
    best = "flashinfer" if find_spec("flashinfer") else "triton"
    assert choose_backend("auto", CUDA, "bfloat16", 128) == best
    assert choose_backend("auto", CUDA, "float32", 128) == "triton"
    assert choose_backend("auto", CUDA, "bfloat16", 80) == "triton"
    assert choose_backend("auto", torch.device("cpu"), "float32", 64) == "torch"
