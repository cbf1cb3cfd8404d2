"""Float8 kernels against their twins, on a GPU or under the interpreter; collected as kernel_cases.py is."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from baton.common.quantization.float8 import quantize_blocks, quantize_channels
from baton.kernels import reference
from baton.kernels.arguments import Float8Format
from baton.kernels.attention.decode_plan import plan_decode
from baton.kernels.attention.dequantize_pages import dequantize_pages
from baton.kernels.attention.paged_decode import paged_decode
from baton.kernels.attention.paged_prefill import paged_prefill, plan_prefill
from baton.kernels.attention.rope_and_store import rope_and_store
from baton.kernels.float8.fp8_block_matmul import block_matmul
from baton.kernels.float8.fp8_scaled_matmul import scaled_matmul
from baton.kernels.rowwise.fp8_quantize import quantize, quantize_by, quantize_groups, quantize_tokens
from baton.kernels.rowwise.fp8_rmsnorm import fp8_rmsnorm
from baton.tests.kernels.kernel_cases import DEVICE, GPU, each_dtype, page_table, pytestmark, random

__all__ = ["pytestmark"]
FLOAT8 = [torch.float8_e4m3fn, torch.float8_e5m2]
each_float8 = pytest.mark.parametrize("stored", FLOAT8, ids=str)


def assert_as_near(got: torch.Tensor, want: torch.Tensor) -> None:
    """Asserts equality; on a GPU a few values may differ by an eighth, where a division is rounded to the other of two
    neighbours."""
    if not GPU:
        assert torch.equal(got.float(), want.float())
        return
    torch.testing.assert_close(got.float(), want.float(), atol=2**-9, rtol=0.25)
    assert (got.float() != want.float()).float().mean() < 0.01


@each_dtype
@pytest.mark.parametrize("rows,width,group", [(1, 7, 7), (2, 1500, 128), (2, 1026, 1026)])
def test_quantize(rows, width, group, dtype, atol, rtol):
    x = random(rows, width + 8, dtype=dtype)[:, :width] * 3
    x[0, :3] = 0
    got = quantize_tokens(x) if group == width else quantize_groups(x, group)
    want = reference.quantize_groups(x, group)
    assert_as_near(got[0], want[0])
    torch.testing.assert_close(got[1], want[1])
    if width % 2 == 0:
        gated = quantize_groups(x, group, gated=True)
        want = reference.quantize_groups(reference.silu_and_mul(x), group)
        assert gated[0].shape == (rows, width // 2)
        assert_as_near(gated[0], want[0])
        torch.testing.assert_close(gated[1], want[1], atol=1e-6, rtol=1e-3)
    zeros, _ = quantize_tokens(torch.zeros_like(x))
    assert not zeros.float().any()
    scale = torch.tensor([0.004], device=DEVICE)
    limited = quantize_by(x, scale)
    assert_as_near(limited, reference.quantize_by(x, scale))
    assert limited.float().isfinite().all()


FORMS = {"token": Float8Format(1026), "group": Float8Format(128), "known": Float8Format(1026, torch.tensor([0.004]))}


@each_dtype
@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("form", FORMS)
def test_rmsnorm_to_float8(form, residual, dtype, atol, rtol):
    """The result is that of the norm followed by quantization, for rows that are not contiguous."""
    group, known = FORMS[form]
    programs = Float8Format(group, None if known is None else known.to(DEVICE))
    x, weight = random(3, 1040, dtype=dtype)[:, :1026], random(1026, dtype=dtype, seed=1)
    before = random(3, 1026, dtype=dtype, seed=2) if residual else None
    got, total = fp8_rmsnorm(x, weight, 1e-6, programs, before)
    normed, want_total = reference.rmsnorm(x, weight, 1e-6, before)
    want = quantize(normed, programs)
    torch.testing.assert_close(total, want_total)
    torch.testing.assert_close(got.scale, want.scale, atol=1e-6, rtol=2e-3)
    assert got.dtype == dtype and got.scale.stride() == want.scale.stride()
    torch.testing.assert_close(got.values.float(), want.values.float(), atol=2**-9, rtol=0.13)
    assert (got.values.float() != want.values.float()).float().mean() < 0.02  # the sum's order may turn a rounding
    assert torch.equal(fp8_rmsnorm(x[:0], weight, 1e-6, programs)[0].values, want.values[:0])


@each_dtype
@pytest.mark.parametrize("rows,width,out", [(1, 128, 32), (17, 304, 200), (130, 256, 130)])
def test_block_matmul(rows, width, out, dtype, atol, rtol):
    x, x_scale = reference.quantize_groups(random(rows, width, dtype=torch.float32), 128)
    weight, scale = quantize_blocks(random(out, width, dtype=torch.float32, seed=1), (128, 128))
    got = block_matmul(x, x_scale, weight, scale, (128, 128), dtype)
    want = reference.block_matmul(x, x_scale, weight, scale, (128, 128), dtype)
    if GPU:  # tensor cores add up float8 products with 14 bits
        atol, rtol = 0.05, 1e-2
    torch.testing.assert_close(got, want, atol=atol * width**0.5, rtol=rtol)


def test_block_matmul_without_rows():
    weight, scale = quantize_blocks(random(32, 128, dtype=torch.float32), (128, 128))
    x, x_scale = quantize_groups(random(0, 128, dtype=torch.float32), 128)
    assert block_matmul(x, x_scale, weight, scale, (128, 128), torch.float16).shape == (0, 32)


@pytest.mark.parametrize("rows", [0, 1, 33])
@pytest.mark.parametrize("single", [False, True], ids=["a scale a row", "one scale"])
def test_scaled_matmul(rows, single):
    """``torch._scaled_mm`` on a GPU; rows are no multiple of 16."""
    x = random(rows, 256, dtype=torch.bfloat16)
    weight, scale = quantize_channels(random(96, 256, dtype=torch.float32, seed=1))
    q, x_scale = quantize_tokens(x)
    if single:
        x_scale = scale = torch.tensor([0.01], device=DEVICE)
    got = scaled_matmul(q, x_scale, weight, scale, torch.bfloat16)
    want = reference.scaled_matmul(q, x_scale, weight, scale, torch.bfloat16)
    torch.testing.assert_close(got, want, atol=0.1, rtol=2e-2)


@each_dtype
@each_float8
@pytest.mark.parametrize("rotate", [False, True])
def test_rope_and_store(rotate, stored, dtype, atol, rtol):
    heads, kv_heads, dim, page_size, tokens, pages = 3, 2, 20, 4, 7, 5
    fused = random(tokens, (heads + 2 * kv_heads) * dim, dtype=dtype) * 100
    slots = torch.randperm(pages * page_size, generator=torch.Generator().manual_seed(5))[:tokens].to(DEVICE)
    angles = torch.rand(50, dim // 2, generator=torch.Generator().manual_seed(6)) * 6
    table = torch.cat((angles.cos(), angles.sin()), -1).to(DEVICE) if rotate else None
    results = []
    for op in (rope_and_store, reference.rope_and_store):
        parts = fused.clone().split([heads * dim, kv_heads * dim, kv_heads * dim], -1)
        q, k, v = (part.unflatten(-1, (-1, dim)) for part in parts)
        pool = torch.zeros(pages, 3, 2, kv_heads, page_size, dim, dtype=stored, device=DEVICE)
        op(q, k, v, pool[:, 1, 0], pool[:, 1, 1], slots // page_size, slots % page_size, table, slots,
           k_scale=0.5, v_scale=0.25)
        results.append((q, pool))
    torch.testing.assert_close(results[0][0], results[1][0], atol=100 * atol, rtol=rtol)
    torch.testing.assert_close(results[0][1].float(), results[1][1].float(), atol=2**-7, rtol=0.25)
    found = results[0][1].float()
    assert found.isfinite().all() and found.abs().max() > (400 if stored == FLOAT8[0] else 1000)


def float8_pool(pages: int, heads: int, page_size: int, dim: int, stored: torch.dtype) -> list[torch.Tensor]:
    pool = (random(pages, 3, 2, heads, page_size, dim, dtype=torch.float32, seed=3) * 4).to(stored)
    return [pool[:, 1, 0], pool[:, 1, 1]]


@each_dtype
@each_float8
def test_widen_pages(stored, dtype, atol, rtol):
    pool = float8_pool(9, 3, 4, 20, stored)
    ids = torch.tensor([7, 0, 7, 3], dtype=torch.int32, device=DEVICE)
    got = dequantize_pages(*pool, ids, dtype, 0.5, 0.3)
    torch.testing.assert_close(got, reference.dequantize_pages(*pool, ids, dtype, 0.5, 0.3), atol=atol, rtol=rtol)
    assert torch.equal(got[:, 0].float(), pool[0][ids.long()].float() * 0.5)
    assert dequantize_pages(*pool, ids[:0], dtype).shape == (0, 2, 3, 4, 20)


@each_dtype
@each_float8
@pytest.mark.parametrize("dim", [36, 64])
def test_attention(dim, stored, dtype, atol, rtol):
    """Decode steps of one and of several splits, and prompts over prefixes: queries of one type, pages of another; with
    heads that a GPU reads in words of four values, and others."""
    heads, kv_heads, page_size, lengths = 4, 2, 8, [1, 65, 150]
    table = page_table(lengths, page_size, 50)
    pool = float8_pool(50, kv_heads, page_size, dim, stored)
    q = random(len(lengths), heads, dim, dtype=dtype)
    scale = dim**-0.5 * 0.25
    want = reference.paged_attention(q, *pool, torch.arange(len(lengths) + 1), *table, scale, 0.5)
    for num_sms in (1, 100):
        plan = plan_decode(table[0], table[2], page_size, kv_heads, num_sms, max(lengths), min_tokens=64)
        got = paged_decode(q, *pool, *table, scale, plan, v_scale=0.5)
        torch.testing.assert_close(got, want, atol=4 * atol, rtol=4 * rtol)
    indptr = np.array([0, 1, 6, 40], np.int32)
    q = random(40, heads, dim, dtype=dtype)
    on_device = torch.from_numpy(indptr).to(DEVICE)
    blocks = plan_prefill(indptr, heads // kv_heads, torch.device(DEVICE))
    got = paged_prefill(q, *pool, blocks, on_device, *table, scale, 0.5)
    want = reference.paged_attention(q, *pool, on_device, *table, scale, 0.5)
    torch.testing.assert_close(got, want, atol=4 * atol, rtol=4 * rtol)
