"""Warp-specialized decode attention on a Hopper GPU, against plain torch and its twin."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from baton.kernels import reference
from baton.kernels.attention.decode_plan import plan_decode
from baton.kernels.attention.paged_decode import paged_decode, supports_warp_specialized
from baton.kernels.tuning.attention import DecodeTile

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="Hopper's alone")]

SCALE = 128**-0.5
FP8 = torch.float8_e4m3fn


def batch_of(heads: int, kv_heads: int, page: int, dtype: torch.dtype, lengths: list[int],
             stored: torch.dtype | None = None) -> tuple:
    """Queries in wider rows, keys and values of one of three layers, page table; pages have NaN after a request's last
    token, and everywhere if they belong to no request. Pages are ``stored`` in another type than queries."""
    generator = torch.Generator("cuda").manual_seed(0)
    counts = [-(-length // page) for length in lengths]
    order = np.random.default_rng(4).permutation(sum(counts) + 3)[:sum(counts)]
    ends = np.cumsum([0, *counts])
    last = [length - (count - 1) * page for length, count in zip(lengths, counts, strict=True)]
    pool = torch.full((len(order) + 3, 3, 2, kv_heads, page, 128), float("nan"), device="cuda", dtype=dtype)
    pool[torch.from_numpy(order).cuda()] = torch.randn(len(order), *pool.shape[1:], device="cuda", dtype=dtype,
                                                       generator=generator)
    for end, rest in zip(ends[1:], last, strict=True):
        pool[order[end - 1], ..., rest:, :] = float("nan")
    q = 2 * torch.randn(len(lengths), heads + 2 * kv_heads, 128, device="cuda", dtype=dtype, generator=generator)
    table = [torch.tensor(x, dtype=torch.int32, device="cuda") for x in (ends, order, last)]
    pool = pool.to(stored or dtype)
    return q[:, :heads], pool[:, 1, 0], pool[:, 1, 1], table


def captured(work) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
    work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = work()
    return graph, out


@pytest.mark.parametrize("inputs_ready", [False, True])
@pytest.mark.parametrize("num_sms,programs,scale", [(1, 1, SCALE), (132, 4, SCALE), (132, 4, 1.0)],
                         ids=["whole requests", "pieces", "scores that outgrow each other"])
@pytest.mark.parametrize("heads,kv_heads,page,dtype,lengths,stored", [
    (32, 8, 16, torch.bfloat16, [1, 63, 64, 65, 200, 1300, 2048] * 12, None),
    (32, 4, 16, torch.float16, [5, 128, 700, 3000] * 24, None),
    (16, 8, 32, torch.bfloat16, [2048, 31, 33] * 12, None), (48, 3, 64, torch.bfloat16, [1, 127, 64, 1001] * 24, None),
    (32, 8, 16, torch.bfloat16, [1, 63, 64, 65, 200, 1300, 2048] * 12, FP8),
    (32, 4, 32, torch.bfloat16, [5, 128, 700, 3000] * 24, FP8), (8, 8, 128, torch.bfloat16, [129, 4, 2000] * 12, FP8),
    (48, 3, 64, torch.bfloat16, [1, 127, 64, 1001] * 24, FP8)])
def test_attention_equals_plain_torch(heads, kv_heads, page, dtype, lengths, stored, num_sms, programs, scale,
                                      inputs_ready):
    """The result is as near as the other kernel's, and has the same bits in each replay. Scores of float8 products are
    off by 2^-13 of the largest, and weights by as much of themselves."""
    q, k, v, table = batch_of(heads, kv_heads, page, dtype, lengths, stored)
    assert supports_warp_specialized(q, k)
    plan = plan_decode(table[0], table[2], page, kv_heads, num_sms, max(lengths), programs_per_sm=programs,
                       min_tokens=128, max_rounds=2)
    graph, got = captured(lambda: paged_decode(q, k, v, *table, scale, plan, inputs_ready=inputs_ready))
    twin = paged_decode(q, k, v, *table, scale, plan, DecodeTile())
    rows = torch.arange(len(lengths) + 1)
    want = reference.paged_attention(q.float(), k.float().nan_to_num(), v.float().nan_to_num(), rows, *table, scale)
    largest = 5 * 2 * 128**0.5 * scale  # of normal queries, twice as large, and normal keys
    allowed = 1.3 * (twin.float() - want).norm() + (2**-13 * largest * want.norm() if stored else 0)
    assert not torch.equal(got, twin)
    for _ in range(3):
        got.zero_()
        graph.replay()
        assert (got.float() - want).norm() <= allowed


def test_float8_queries_keep_their_precision():
    """Values of one head that differ by powers of two, up to what bfloat16 has: scores have the bits of a product of
    the queries as they are, within what float32 sums round."""
    q, k, v, table = batch_of(32, 8, 16, torch.bfloat16, [900] * 40, FP8)
    q *= 2.0 ** torch.randint(-12, 1, q.shape, device="cuda")
    q[0] = 0
    plan = plan_decode(table[0], table[2], 16, 8, 132, 900, programs_per_sm=4, min_tokens=128, max_rounds=2)
    got = paged_decode(q, k, v, *table, 4 * SCALE, plan, v_scale=0.5)
    want = reference.paged_attention(q.float(), k.float().nan_to_num(), v.float().nan_to_num(), torch.arange(41),
                                     *table, 4 * SCALE, 0.5)
    assert (got.float() - want).norm() <= 3e-3 * want.norm()
    torch.testing.assert_close(got[0].float(), want[0], atol=2e-3, rtol=1e-2)


def test_more_pages_than_tokens():
    """Pages that are listed after the last token's are not read: ``kv_last_page_len`` is negative then."""
    q, k, v, table = batch_of(32, 8, 16, torch.bfloat16, [1, 63, 200, 2048] * 12)
    indptr, indices, last = table
    spare = torch.cat([torch.cat((x, x.new_full((2,), len(k) - 1))) for x in indices.split(indptr.diff().tolist())])
    listed = [indptr + 2 * torch.arange(len(indptr), dtype=torch.int32, device="cuda"), spare, last - 32]
    results = []
    for each in (table, listed):
        plan = plan_decode(each[0], each[2], 16, 8, 132, 2048, programs_per_sm=4, min_tokens=128, max_rounds=2)
        results.append(paged_decode(q, k, v, *each, SCALE, plan))
    assert torch.equal(*results) and not results[0].isnan().any()


def test_what_it_does_not_take():
    q, k, _, _ = batch_of(32, 8, 16, torch.bfloat16, [100] * 34)
    assert supports_warp_specialized(q, k) and not supports_warp_specialized(q[:33], k)
    assert supports_warp_specialized(q, k.to(FP8)) and not supports_warp_specialized(q.half(), k.to(FP8))
    assert not supports_warp_specialized(q, k.to(torch.float8_e5m2))
    assert not supports_warp_specialized(q[..., :64], k[..., :64])
    assert not supports_warp_specialized(q, k[..., :8, :])
