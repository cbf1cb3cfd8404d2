"""The kernels of multi-head latent attention against their twins, on a GPU or under the interpreter; collected by
test_kernels_interpreted.py and tests/gpu/kernels/test_mla.py."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from baton.kernels import reference
from baton.kernels.arguments import RowMask
from baton.kernels.attention.decode_plan import plan_decode
from baton.kernels.attention.mla_decode import mla_decode
from baton.kernels.attention.mla_prefill import mla_prefill, plan_mla_prefill
from baton.kernels.attention.mla_rope_and_store import mla_rope_and_store
from baton.kernels.attention.mla_verify import mla_verify
from baton.kernels.attention.per_head_matmul import per_head_matmul
from baton.kernels.attention.verify_attention import plan_verify
from baton.kernels.tuning.attention import DecodeSplits, VerifyTile
from baton.kernels.tuning.policy import policy_of
from baton.tests.kernels.kernel_cases import DEVICE, DTYPES, GPU, page_table, random
from baton.tests.kernels.kernel_cases import pytestmark as pytestmark

PAGES = 400
SHAPES = [(4, 24, 8, 4), (3, 32, 16, 1), (20, 16, 6, 16), *([(16, 512, 64, 16), (128, 512, 64, 64)] if GPU else [])]
"""Heads, latent's and shared key's width, page size: small odd ones, and on a GPU DeepSeek's."""


def cases(names: str, shapes: list[tuple[int, ...]], widest: int):
    """Every shape in every type; in float32, whose products spill registers, only those up to ``widest``."""
    found = [(*shape, *kind) for shape in shapes for kind in DTYPES
             if max(shape[1:]) <= widest or kind[0] is not torch.float32]
    return pytest.mark.parametrize(f"{names},page_size,dtype,atol,rtol", found)


def latent_pool(rank: int, rope: int, page_size: int, dtype: torch.dtype) -> torch.Tensor:
    """Layer 1 of a page-first pool of 3, strided as the engine passes it."""
    return random(PAGES, 3, 1, 1, page_size, rank + rope, dtype=dtype, seed=3)[:, 1, 0, 0]


@cases("heads,rank,rope", SHAPES, 512)
@pytest.mark.parametrize("interleaved", [False, True])
def test_rope_and_store(heads, rank, rope, page_size, interleaved, dtype, atol, rtol):
    tokens = 7
    q = random(tokens, heads, 5 + rope, dtype=dtype)
    fused = random(tokens, rank + rope, dtype=dtype, seed=1)
    slots = torch.randperm(PAGES * page_size, generator=torch.Generator().manual_seed(5))[:tokens].to(DEVICE)
    angles = torch.rand(50, rope // 2, generator=torch.Generator().manual_seed(6)) * 6
    table = torch.cat((angles.cos(), angles.sin()), -1).to(DEVICE)
    positions = torch.randint(0, 50, (tokens,), generator=torch.Generator().manual_seed(7)).to(DEVICE)
    results = []
    for op in (mla_rope_and_store, reference.mla_rope_and_store):
        queries, pages = q.clone(), latent_pool(rank, rope, page_size, dtype)
        op(queries[..., 5:], fused[:, :rank] * 1, fused[:, rank:], pages, slots // page_size, slots % page_size, table,
           positions, interleaved)
        results.append((queries, pages))
    for got, want in zip(*results):
        torch.testing.assert_close(got, want, atol=atol, rtol=rtol)
    assert torch.equal(results[0][0][..., :5], q[..., :5]), "the part that is not turned changed"


def test_interleaved_pairs_turn_like_halves_of_reordered_elements():
    rope, positions = 8, torch.arange(3, device=DEVICE)
    angles = torch.rand(3, rope // 2) * 6
    table = torch.cat((angles.cos(), angles.sin()), -1).to(DEVICE)
    q = random(3, 2, rope, dtype=torch.float32)
    order = [0, 2, 4, 6, 1, 3, 5, 7]
    pages = torch.zeros(3, 1, rope + 16, device=DEVICE)
    turned = []
    for queries, interleaved in ((q.clone(), True), (q[..., order].contiguous(), False)):
        mla_rope_and_store(queries, random(3, 16, dtype=torch.float32), random(3, rope, dtype=torch.float32), pages,
                           positions, torch.zeros_like(positions), table, positions, interleaved)
        turned.append(queries)
    torch.testing.assert_close(turned[0][..., order], turned[1], atol=1e-6, rtol=0)


@pytest.mark.parametrize("dtype", [dtype for dtype, *_ in DTYPES if dtype is not torch.float32])
@pytest.mark.parametrize("rows,heads,depth,columns", [(1, 3, 24, 40), (20, 2, 128, 48), (70, 1, 16, 512)])
def test_per_head_matmul(rows, heads, depth, columns, dtype):
    """Views of wider tensors, as attention passes them, and matrices of both orders."""
    x = random(rows, heads, depth + 8, dtype=dtype)[..., :depth]
    w = random(heads, depth, columns, dtype=dtype, seed=1) * depth**-0.5
    for given in (w, w.transpose(1, 2).contiguous().transpose(1, 2)):
        want = reference.per_head_matmul(x.float(), given.float()).to(dtype)
        torch.testing.assert_close(per_head_matmul(x, given), want, atol=2e-2, rtol=2e-2)


@cases("heads,rank,rope", SHAPES, 128)
@pytest.mark.parametrize("num_sms", [1, 100])
def test_decode(heads, rank, rope, page_size, num_sms, dtype, atol, rtol):
    """One split a request, and with many SMs several splits of the longer ones."""
    lengths = [1, 31, 32, 33, 150]
    table = page_table(lengths, page_size, PAGES)
    pages = latent_pool(rank, rope, page_size, dtype)
    q = random(heads, len(lengths), rank, dtype=dtype).transpose(0, 1)  # as the batched product leaves it
    q_rope = random(len(lengths), heads, 5 + rope, dtype=dtype, seed=1)[..., 5:]
    scale = (rank + rope) ** -0.5
    want = reference.mla_attention(q, q_rope, pages, torch.arange(len(lengths) + 1), *table, scale)
    plan = plan_decode(table[0], table[2], page_size, 1, num_sms, max(lengths), min_tokens=32,
                       programs_per_sm=1 if num_sms == 1 else 8)
    assert (plan.split_indptr[-1] > len(lengths)) == (num_sms > 1)
    torch.testing.assert_close(mla_decode(q, q_rope, pages, *table, scale, plan), want, atol=atol, rtol=rtol)


VERIFY = [(16, 16, False, True), (32, 64, True, False), (64, 32, False, False), (64, 32, True, True)]
"""Rows and heads of a tile, tokens, which are the products' rows, and if rows have masks."""


@cases("heads,rank,rope", SHAPES, 128)
@pytest.mark.parametrize("size,tokens,transposed,masked", VERIFY)
def test_verify(heads, rank, rope, page_size, dtype, atol, rtol, size, tokens, transposed, masked):
    """Rows that do not see all of their newest slots, some nothing of the last split; ragged, one page more listed than
    is used, blocks of one row and of several."""
    lengths, counts, q_lens = [5, 64, 100], [5, 2, 63], [1, 2, 4]
    words = torch.tensor([0b10011, 0b01, 0b11, *((1 << 30) + i for i in range(4))], device=DEVICE)
    mask = RowMask(words, torch.tensor(counts, dtype=torch.int32, device=DEVICE)) if masked else None
    rows = torch.tensor(np.cumsum([0, *q_lens]), dtype=torch.int32, device=DEVICE)
    table, pages = page_table([length + page_size for length in lengths], page_size, PAGES), latent_pool(
        rank, rope, page_size, dtype)
    table[2] -= page_size
    q = random(heads, sum(q_lens), rank, dtype=dtype).transpose(0, 1)
    q_rope = random(sum(q_lens), heads, rope, dtype=dtype, seed=1)
    tile = VerifyTile(max(1, size // heads), tokens, 4, 2, heads=min(heads, size), transposed=transposed)
    plan = plan_verify(rows, table[0], table[2], page_size, tile.head_blocks(heads), 100, 4, 100, tile,
                       DecodeSplits(8, 64), masked=masked)
    assert int(plan.splits.split_indptr.diff().max()) > 1
    want = reference.mla_attention(q, q_rope, pages, rows, *table, 0.2, mask=mask)
    got = mla_verify(q, q_rope, pages, rows, *table, 0.2, plan, tile, mask=mask)
    torch.testing.assert_close(got, want, atol=atol, rtol=rtol)


PREFILL = [(2, 12, 8, 20, 4), (3, 16, 6, 16, 1), *([(16, 128, 64, 128, 16)] if GPU else [])]
"""Heads, widths of the two parts of a key and of a value, page size."""


@cases("heads,nope,rope,v", PREFILL, 64)
@pytest.mark.parametrize("most_tokens", [10_000, 64])
def test_prefill(heads, nope, rope, v, page_size, most_tokens, dtype, atol, rtol):
    """Rows without a prefix, with one, one row over a long prefix, several blocks of rows; in one segment or many.
    Compares with the twin, and with the absorbed form, which has no segments."""
    rank, counts, prefixes = 16, [5, 33, 1, 140], [0, 64, 130, 7]
    indptr = np.cumsum([0, *counts]).astype(np.int32)
    table = page_table([c + p for c, p in zip(counts, prefixes)], page_size, PAGES)
    pages = latent_pool(rank, rope, page_size, dtype)
    up = random(heads, nope + v, rank, dtype=dtype, seed=8) / 4
    q = random(sum(counts), heads, nope + rope, dtype=dtype)
    scale, on_device = (nope + rope) ** -0.5, torch.from_numpy(indptr).to(DEVICE)
    segments = plan_mla_prefill(indptr, table[0].cpu().numpy(), table[2].cpu().numpy(), page_size, most_tokens,
                                torch.device(DEVICE))
    assert len(segments) == (1 if most_tokens > 1000 else -(-int(table[0][-1]) // (64 // page_size)))
    results = []
    for op in (mla_prefill, reference.mla_prefill):
        lse = None
        out = torch.full((len(q), heads, v), 7.0, device=DEVICE, dtype=dtype)
        if len(segments) > 1:
            lse = torch.full(out.shape[:2], float("-inf"), device=DEVICE)
            out = torch.zeros(out.shape, device=DEVICE)
        for segment in segments:
            rows = pages[table[1][segment.first_page:segment.last_page].long()].flatten(0, 1)
            kv = torch.einsum("sr,hdr->shd", rows[:, :rank], up)
            op(q, kv, rows[:, rank:], segment, on_device, scale, out, lse)
        results.append(out.to(dtype))
    torch.testing.assert_close(results[0], results[1], atol=atol, rtol=rtol)
    absorbed = torch.einsum("thd,hdr->thr", q[..., :nope], up[:, :nope])
    latents = reference.mla_attention(absorbed, q[..., nope:], pages, on_device, *table, scale)
    want = torch.einsum("thr,hvr->thv", latents, up[:, nope:])
    torch.testing.assert_close(results[0], want, atol=5 * atol, rtol=5 * rtol)


@pytest.mark.parametrize("stored", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_pages_of_float8(stored):
    """Stored over a scale, and some of it beyond float8's range; read back by decode steps."""
    heads, rank, rope, page_size, lengths, scale = 4, 24, 8, 4, [1, 33, 90], 0.004
    dtype = torch.float16 if not GPU else torch.bfloat16
    table, tokens = page_table(lengths, page_size, PAGES), sum(lengths)
    slots = [int(table[1][int(table[0][b]) + i // page_size]) * page_size + i % page_size
             for b, length in enumerate(lengths) for i in range(length)]
    at = torch.tensor(slots, device=DEVICE)
    latent, k = random(tokens, rank, dtype=dtype), random(tokens, rope, dtype=dtype, seed=1)
    latent[3] = 500.0
    angles = torch.rand(tokens, rope // 2, generator=torch.Generator().manual_seed(6)) * 6
    angles = torch.cat((angles.cos(), angles.sin()), -1).to(DEVICE)
    q, q_rope = random(len(lengths), heads, rank, dtype=dtype), random(len(lengths), heads, rope, dtype=dtype, seed=2)
    plan = plan_decode(table[0], table[2], page_size, 1, 1, max(lengths))
    found = []
    for op in (mla_rope_and_store, reference.mla_rope_and_store):
        pages = torch.zeros(PAGES, page_size, rank + rope, device=DEVICE).to(stored)
        op(random(tokens, heads, rope, dtype=dtype), latent, k, pages, at // page_size, at % page_size, angles,
           torch.arange(tokens, device=DEVICE), True, scale)
        found.append(pages)
    assert torch.equal(found[0].float(), found[1].float())
    row = found[0].flatten(0, 1).view(torch.uint8)[at].view(stored).float() * scale
    largest = torch.finfo(stored).max * scale
    torch.testing.assert_close(row[:, :rank], latent.float().clamp(-largest, largest), atol=0.002, rtol=0.13)
    results = [mla_decode(q, q_rope, found[0], *table, 0.1, plan, page_scale=scale),
               reference.mla_attention(q, q_rope, found[0], torch.arange(len(lengths) + 1), *table, 0.1, scale)]
    torch.testing.assert_close(*results, atol=1e-2, rtol=1e-2)


def test_a_block_of_heads_is_as_wide_as_the_type_allows():
    head_block = policy_of(torch.device(DEVICE)).attention.mla_head_block
    assert [head_block(heads, 2) for heads in (1, 16, 20, 64, 128)] == [16, 16, 32, 64, 64]
    assert head_block(128, 4) == 16
