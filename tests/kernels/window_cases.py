"""Attention with sliding windows and sinks, and experts with biases and clamped gates, against their twins, on a GPU or
under the interpreter; collected by test_kernels_interpreted.py and tests/gpu/models/test_gpt_oss.py."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from baton.kernels import reference
from baton.kernels.arguments import ExpertBiases
from baton.kernels.attention.decode_plan import plan_decode
from baton.kernels.attention.paged_decode import paged_decode
from baton.kernels.attention.paged_prefill import paged_prefill, plan_prefill
from baton.kernels.attention.scale_by_sinks import scale_by_sinks
from baton.kernels.moe.moe_experts import moe_experts
from baton.kernels.tuning.moe import Tile, Tiles
from baton.tests.kernels.kernel_cases import DEVICE, DTYPES, GPU, page_table, paged_pool, pytestmark, random
from baton.tests.kernels.moe_cases import choices_of

__all__ = ["pytestmark"]


def sinks_of(heads: int, programs: bool) -> torch.Tensor | None:
    """Some far below the scores, some far above."""
    return random(heads, dtype=torch.float32, seed=8) * 4 if programs else None


@pytest.mark.parametrize("heads,kv_heads,dim,page_size,num_sms,window,sinks,softcap", [
    (6, 2, 16, 4, 1, 1, False, 0.0), (6, 2, 16, 4, 1, 70, True, 0.0), (8, 1, 64, 16, 100, None, True, 0.0),
    (8, 1, 64, 16, 100, 200, True, 0.0), (8, 1, 64, 16, 100, 200, False, 0.5),
])
def test_paged_decode(heads, kv_heads, dim, page_size, num_sms, window, sinks, softcap):
    """Lengths below, at and above the window, in one split and in several."""
    lengths = [1, 70, 71, 300]
    table = page_table(lengths, page_size, 800)
    pool = paged_pool(800, kv_heads, page_size, dim, torch.float32)
    q, given = random(len(lengths), heads, dim, dtype=torch.float32), sinks_of(heads, sinks)
    want = reference.paged_attention(q, *pool, torch.arange(len(lengths) + 1), *table, dim**-0.5, 1.0, window, given,
                                     softcap=softcap)
    plan = plan_decode(table[0], table[2], page_size, kv_heads, num_sms, max(lengths), min_tokens=64,
                       programs_per_sm=1 if num_sms == 1 else 8, window=window)
    request_of_split, split_indptr = torch.full_like(plan.request_of_split, -1), torch.empty_like(plan.split_indptr)
    programs = max(1, (1 if num_sms == 1 else 8) * num_sms // kv_heads)
    reference.plan_decode(table[0], table[2], request_of_split, split_indptr, page_size, programs, 64, window=window)
    assert plan.split_indptr.tolist() == split_indptr.tolist()
    assert plan.needs_merge == (min(max(lengths), window or 300) >= 96) and int(split_indptr.diff().max()) <= 5
    assert num_sms == 1 or int(split_indptr.diff().max()) == {None: 5, 1: 1, 70: 1, 200: 3}[window]
    found = paged_decode(q, *pool, *table, dim**-0.5, plan, inputs_ready=GPU, window=window, sinks=given,
                         softcap=softcap)
    torch.testing.assert_close(found, want, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("heads,kv_heads,dim,page_size,window,sinks,softcap", [
    (6, 2, 16, 4, None, True, 0.0), (6, 2, 16, 4, 1, False, 0.0), (8, 1, 64, 16, 40, False, 0.5),
    (8, 1, 64, 16, 70, True, 0.0),
])
def test_paged_prefill(heads, kv_heads, dim, page_size, window, sinks, softcap):
    """Rows without a prefix, with one, a single row over a long prefix, and several blocks of rows, of which the first
    tiles of some hold no key that their last row sees."""
    counts, prefixes = [5, 1, 100], [0, 130, 7]
    table = page_table([c + p for c, p in zip(counts, prefixes)], page_size, 700)
    pool = paged_pool(700, kv_heads, page_size, dim, torch.float32)
    indptr = np.cumsum([0, *counts]).astype(np.int32)
    q, given = random(sum(counts), heads, dim, dtype=torch.float32), sinks_of(heads, sinks)
    on_device = torch.from_numpy(indptr).to(DEVICE)
    blocks = plan_prefill(indptr, heads // kv_heads, torch.device(DEVICE))
    got = paged_prefill(q, *pool, blocks, on_device, *table, dim**-0.5, window=window, sinks=given, softcap=softcap)
    want = reference.paged_attention(q, *pool, on_device, *table, dim**-0.5, 1.0, window, given, softcap=softcap)
    torch.testing.assert_close(got, want, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("dtype,atol,rtol", DTYPES)
def test_sinks_after_the_fact(dtype, atol, rtol):
    """A result without sinks, scaled by the scores' log-sum-exp, is the result with them."""
    lengths, heads, dim = [7, 40], 6, 10
    table, pool = page_table(lengths, 4, 20), paged_pool(20, 3, 4, dim, dtype)
    q, sinks = random(2, heads, dim, dtype=dtype), random(heads, dtype=torch.float32, seed=8) * 4
    rows = torch.arange(3)
    want = reference.paged_attention(q, *pool, rows, *table, dim**-0.5, 1.0, None, sinks)
    lse = torch.empty(2, heads, device=DEVICE)
    for b, length in enumerate(lengths):
        pages = table[1][table[0][b]:table[0][b + 1]].long()
        keys = pool[0][pages].transpose(0, 1).flatten(1, 2)[:, :length].float().repeat_interleave(2, 0)
        lse[b] = (torch.einsum("hd,hkd->hk", q[b].float(), keys) * dim**-0.5).logsumexp(-1) / np.log(2)
    out = reference.paged_attention(q, *pool, rows, *table, dim**-0.5)
    scale_by_sinks(out, lse, sinks)
    torch.testing.assert_close(out, want, atol=atol, rtol=rtol)


@pytest.mark.parametrize("dtype,atol,rtol", DTYPES[::2])
@pytest.mark.parametrize("rows,ordered,limit", [(16, False, 0.5), (16, True, 0.0), (128, True, 0.5)])
def test_moe_experts_with_biases(rows, ordered, limit, dtype, atol, rtol):
    """A limit that clamps many values; some of a token's experts are not on this rank."""
    tokens, places_here, hidden, size = 37, 4, 32, 48
    places = choices_of(tokens, places_here, 3, 1)
    weights = torch.rand(places.shape, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    x = random(tokens, hidden, dtype=dtype)
    gate_up = random(places_here, 2 * size, hidden, dtype=dtype, seed=2) * 0.2
    down = random(places_here, hidden, size, dtype=dtype, seed=3) * 0.2
    biases = ExpertBiases(random(places_here, 2 * size, dtype=dtype, seed=4), random(places_here, hidden, dtype=dtype,
                                                                                     seed=5))
    want = reference.moe_experts(x, gate_up, down, places, weights, biases=biases, limit=limit)
    plain = reference.moe_experts(x, gate_up, down, places, weights)
    assert (want - plain).abs().max() > 0.5
    tiles = Tiles(Tile(rows, 32, 16, 2, 4, 2), Tile(rows, 32, 16, 2, 4, 2), ordered)
    got = moe_experts(x, gate_up, down, places, weights, tiles=tiles, biases=biases, limit=limit)
    torch.testing.assert_close(got, want, atol=3 * atol, rtol=2 * rtol)  # the twin rounds before the biases too
