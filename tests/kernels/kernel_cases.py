"""Every kernel against its twin, on a GPU or under the interpreter; collected by test_kernels_interpreted.py and
tests/gpu/kernels/test_kernels.py, never by itself (its name has no ``test_``)."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from baton.kernels import _triton, reference
from baton.kernels.arguments import HeadNorms, NormWeight
from baton.kernels.attention.current_kv import CurrentKV
from baton.kernels.attention.decode_plan import plan_decode
from baton.kernels.attention.paged_decode import paged_decode
from baton.kernels.attention.paged_prefill import paged_prefill, plan_prefill
from baton.kernels.attention.rope_and_store import rope_and_store
from baton.kernels.rowwise.gather_rows import gather_rows
from baton.kernels.rowwise.gelu_and_mul import gelu_and_mul
from baton.kernels.rowwise.joined_norms import joined_norms
from baton.kernels.rowwise.rmsnorm import rmsnorm
from baton.kernels.rowwise.silu_and_mul import silu_and_mul
from baton.kernels.sampling.argmax import argmax
from baton.kernels.tuning.policy import policy_of

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
# (dtype, atol, rtol); the twins round once where the kernels do, so the rest is the order of sums.
DTYPES = [(torch.float32, 2e-5, 2e-5), (torch.float16, 2e-3, 2e-3), *([(torch.bfloat16, 2e-2, 1e-2)] if GPU else [])]

pytestmark = pytest.mark.skipif(not (GPU or _triton.INTERPRETED), reason="needs a GPU or TRITON_INTERPRET=1")
each_dtype = pytest.mark.parametrize("dtype,atol,rtol", DTYPES, ids=[str(d[0]) for d in DTYPES])


def random(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(DEVICE, dtype)


@each_dtype
@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("shape", [(1, 1), (3, 7), (5, 64), (2, 1000)])
def test_rmsnorm(shape, residual, dtype, atol, rtol):
    x, weight = random(*shape, dtype=dtype), random(shape[-1], dtype=dtype, seed=1)
    before = random(*shape, dtype=dtype, seed=2) if residual else None
    for got, want in zip(rmsnorm(x, weight, 1e-6, before), reference.rmsnorm(x, weight, 1e-6, before)):
        torch.testing.assert_close(got, want, atol=atol, rtol=rtol)


@each_dtype
def test_rmsnorm_of_heads_inside_a_wider_row(dtype, atol, rtol):
    """Query norm reads its heads out of the fused projection's output."""
    x = random(4, 5 * 24, dtype=dtype)[:, 24:96].unflatten(-1, (3, 24))
    weight = random(24, dtype=dtype, seed=1)
    got, _ = rmsnorm(x, weight, 1e-6)
    torch.testing.assert_close(got, reference.rmsnorm(x, weight, 1e-6)[0], atol=atol, rtol=rtol)


def test_rmsnorm_applies_float32_weights_before_rounding():
    x, weight = random(3, 77, dtype=torch.float16), 1 + random(77, dtype=torch.float32, seed=1) / 1000
    got, want = rmsnorm(x, weight, 1e-6)[0], reference.rmsnorm(x, weight, 1e-6)[0]
    exact = torch.nn.functional.rms_norm(x.double(), (77,), weight.double(), 1e-6)
    assert got.dtype == want.dtype == torch.float16
    for rounded in (got, want):
        assert ((rounded.double() - exact).abs() <= 0.51 * 2.0 ** -10 * exact.abs() + 1e-6).all()


@each_dtype
@pytest.mark.parametrize("rows,width", [(1, 1), (3, 77), (2, 1025)])
def test_gated_activations(rows, width, dtype, atol, rtol):
    x = random(rows, 2 * width, dtype=dtype)
    torch.testing.assert_close(silu_and_mul(x), reference.silu_and_mul(x), atol=atol, rtol=rtol)
    for tanh in (False, True):
        torch.testing.assert_close(gelu_and_mul(4 * x, tanh), reference.gelu_and_mul(4 * x, tanh), atol=atol, rtol=rtol)


@each_dtype
@pytest.mark.parametrize("rows,width", [(0, 8), (1, 1), (5, 1500)])
def test_gather_rows(rows, width, dtype, atol, rtol):
    table = random(9, width, dtype=dtype)
    ids = torch.randint(9, (rows,), generator=torch.Generator().manual_seed(1)).to(DEVICE)
    assert torch.equal(gather_rows(table, ids), table[ids])


@each_dtype
def test_gather_rows_of_a_part(dtype, atol, rtol):
    table = random(9, 1500, dtype=dtype)
    ids = torch.tensor([30, 11, 20, 19, 12, 28, 0], device=DEVICE)
    whole = torch.zeros(40, 1500, dtype=dtype, device=DEVICE)
    whole[11:20] = table
    assert torch.equal(gather_rows(table, ids, 11), whole[ids])
    assert torch.equal(reference.gather_rows(table, ids, 11), whole[ids])


@each_dtype
@pytest.mark.parametrize("gathers", [True, False])
@pytest.mark.parametrize("first,second", [(True, True), (False, False), (False, True)])
@pytest.mark.parametrize("rows,width", [(1, 1), (5, 1500)])
def test_joined_norms(rows, width, first, second, gathers, dtype, atol, rtol):
    """The halves are those of the norms alone, bit by bit."""
    table, hidden = random(9, width, dtype=dtype), random(rows, 2 * width, dtype=dtype, seed=1)[:, :width]
    ids = torch.randint(9, (rows,), generator=torch.Generator().manual_seed(1)).to(DEVICE) if gathers else None
    norms = [NormWeight(random(width, dtype=dtype, seed=seed), 1e-5) if used else None
             for seed, used in ((2, first), (3, second))]
    embeds = table[:rows] if ids is None else table[ids]
    got = joined_norms(embeds if ids is None else table, hidden, *norms, ids)
    torch.testing.assert_close(got, reference.joined_norms(embeds, hidden, *norms), atol=atol, rtol=rtol)
    alone = [x if norm is None else rmsnorm(x, *norm)[0] for x, norm in zip((embeds, hidden), norms)]
    assert torch.equal(got, torch.cat(alone, -1))


@pytest.mark.parametrize("rows,width", [(1, 1), (3, 77), (2, 9000)])
def test_argmax(rows, width):
    x = random(rows, width, dtype=torch.float32).mul(4).round()  # so that many are equal
    x[-1, width // 2:] = 100
    for got, want in zip(argmax(x), reference.argmax(x)):
        assert torch.equal(got, want)


@each_dtype
def test_argmax_is_written_twice(dtype, atol, rtol):
    x = random(3, 9016, dtype=dtype)[:, :9001]
    again = torch.zeros(3, dtype=torch.int64, device=DEVICE)
    values, columns = argmax(x, again)
    assert torch.equal(again, columns) and again.data_ptr() != columns.data_ptr()
    assert values.dtype == torch.float32 and torch.equal(values, x.float().amax(-1))
    assert columns.tolist() == x.float().argmax(-1).tolist()


@pytest.mark.parametrize("width", [77, 9000])
def test_argmax_by_the_tokens_of_columns(width):
    x = random(3, width, dtype=torch.float32)
    ids = torch.arange(width, device=DEVICE) * 3 + 1
    drafts = torch.zeros(3, 4, dtype=torch.int64, device=DEVICE)
    values, tokens = argmax(x, drafts[:, 2], ids)
    assert torch.equal(values, x.amax(-1)) and torch.equal(tokens, ids[x.argmax(-1)])
    assert torch.equal(drafts[:, 2], tokens) and not drafts[:, [0, 1, 3]].any()


def test_argmax_of_nan():
    x = random(4, 5000, dtype=torch.float32)
    x[0] = float("-inf")
    x[1, 7], x[1, 4500] = float("inf"), float("nan")
    x[2, 4999] = float("inf")
    x[3, [3, 4100]] = float("nan")
    values, columns = argmax(x)
    assert columns.tolist() == x.argmax(-1).tolist() == [0, 4500, 4999, 3]
    assert values[[1, 3]].isnan().all() and values[[0, 2]].tolist() == [float("-inf"), float("inf")]


def paged_pool(pages: int, heads: int, page_size: int, dim: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """Layer 1 of a page-first pool of 3: strided key and value views, as the engine passes them."""
    pool = random(pages, 3, 2, heads, page_size, dim, dtype=dtype, seed=3)
    return [pool[:, 1, 0], pool[:, 1, 1]]


@each_dtype
@pytest.mark.parametrize("rotate,norm", [(False, False), (True, False), (True, True), (False, True)])
@pytest.mark.parametrize("heads,kv_heads,dim,page_size,rotated", [
    (4, 2, 16, 4, 16), (3, 1, 10, 1, 10), (2, 2, 64, 16, 64), (4, 2, 16, 4, 4), (3, 1, 10, 1, 6), (2, 2, 64, 16, 32)])
def test_rope_and_store(heads, kv_heads, dim, page_size, rotated, rotate, norm, dtype, atol, rtol):
    tokens, pages, rope_keys_in_place = 7, 9, page_size == 4
    fused = random(tokens, (heads + 2 * kv_heads) * dim, dtype=dtype)
    slots = torch.randperm(pages * page_size, generator=torch.Generator().manual_seed(5))[:tokens].to(DEVICE)
    angles = torch.rand(50, rotated // 2, generator=torch.Generator().manual_seed(6)) * 6
    table = torch.cat((angles.cos(), angles.sin()), -1).to(DEVICE) if rotate else None
    positions = torch.randint(0, 50, (tokens,), generator=torch.Generator().manual_seed(7)).to(DEVICE)
    norms = HeadNorms(random(dim, dtype=dtype, seed=8), random(dim, dtype=dtype, seed=9), 1e-5) if norm else None
    results = []
    for op in (rope_and_store, reference.rope_and_store):
        parts = fused.clone().split([heads * dim, kv_heads * dim, kv_heads * dim], -1)
        q, k, v = (part.unflatten(-1, (-1, dim)) for part in parts)
        stored = [x.clone() for x in paged_pool(pages, kv_heads, page_size, dim, dtype)]
        op(q, k, v, *stored, slots // page_size, slots % page_size, table, positions, norms=norms,
           rope_keys_in_place=rope_keys_in_place)
        results.append((q, k, v, *stored))
    for got, want in zip(*results):
        torch.testing.assert_close(got, want, atol=atol, rtol=rtol)
    if rotate and not norm:
        assert torch.equal(q[..., rotated:], fused[:, :heads * dim].unflatten(-1, (-1, dim))[..., rotated:])
    if rope_keys_in_place:
        assert torch.equal(stored[0][slots // page_size, :, slots % page_size], k)


def page_table(lengths: list[int], page_size: int, pages: int) -> list[torch.Tensor]:
    counts = [-(-length // page_size) for length in lengths]
    assert sum(counts) <= pages
    indices = np.random.default_rng(4).permutation(pages)[:sum(counts)]
    last = [length - (count - 1) * page_size for length, count in zip(lengths, counts)]
    return [torch.tensor(x, dtype=torch.int32, device=DEVICE) for x in (np.cumsum([0, *counts]), indices, last)]


ATTENTION = [  # heads, KV heads, head_dim, page_size
    (4, 2, 16, 4), (3, 3, 20, 1), (6, 1, 64, 16), (10, 2, 32, 64),
]


@each_dtype
@pytest.mark.parametrize("num_sms", [1, 100])
@pytest.mark.parametrize("heads,kv_heads,dim,page_size", ATTENTION)
def test_paged_decode(heads, kv_heads, dim, page_size, num_sms, dtype, atol, rtol):
    """One split a request, and with many SMs up to 20 of the longest: more than one iteration of the merge."""
    lengths = [1, 63, 64, 65, 200, 1300 if num_sms > 1 else 90]
    table = page_table(lengths, page_size, 1800)
    pool = paged_pool(1800, kv_heads, page_size, dim, dtype)
    q = random(len(lengths), heads + 2, dim, dtype=dtype)[:, :heads]
    rows = torch.arange(len(lengths) + 1)
    want = reference.paged_attention(q, *pool, rows, *table, dim**-0.5)
    plan = plan_decode(table[0], table[2], page_size, kv_heads, num_sms, max(lengths), min_tokens=64,
                       programs_per_sm=1 if num_sms == 1 else 8)
    counts = plan.split_indptr.diff().tolist()
    assert max(counts) > 16 if num_sms > 1 else max(counts) <= 2
    found = paged_decode(q, *pool, *table, dim**-0.5, plan, inputs_ready=GPU)
    torch.testing.assert_close(found, want, atol=atol, rtol=rtol)


@each_dtype
@pytest.mark.parametrize("heads,kv_heads,dim,page_size,num_sms,norm,window", [
    (4, 2, 16, 4, 100, False, None), (3, 3, 20, 1, 1, True, None), (6, 1, 64, 16, 100, True, 90)])
def test_paged_decode_takes_in_fresh_rows(heads, kv_heads, dim, page_size, num_sms, norm, window, dtype, atol, rtol):
    """The result is that of rope_and_store followed by attention, for requests without another token, and for new pages
    and tiles."""
    lengths = [1, 64, 65, 400]
    table = page_table(lengths, page_size, 600)
    fused = random(len(lengths), (heads + 2 * kv_heads) * dim, dtype=dtype)
    angles = torch.rand(400, dim // 2, generator=torch.Generator().manual_seed(6)) * 6
    turns = torch.cat((angles.cos(), angles.sin()), -1).to(DEVICE)
    positions = torch.tensor(lengths, device=DEVICE) - 1
    norms = HeadNorms(random(dim, dtype=dtype, seed=8), random(dim, dtype=dtype, seed=9), 1e-5) if norm else None
    plan = plan_decode(table[0], table[2], page_size, kv_heads, num_sms, max(lengths), min_tokens=64,
                       programs_per_sm=1 if num_sms == 1 else 8, window=window)
    results = []
    attention = policy_of(torch.device(DEVICE)).attention
    tile = attention.decode(dim, dtype.itemsize, dtype.itemsize, len(lengths) * kv_heads)
    for waits in ("late", "early", None):
        q, k, v = (part.unflatten(-1, (-1, dim)) for part in
                   fused.clone().split([heads * dim, kv_heads * dim, kv_heads * dim], -1))
        pool = [x.clone() for x in paged_pool(600, kv_heads, page_size, dim, dtype)]
        rows = CurrentKV(k, v, turns, positions, norms)
        if waits:
            found = paged_decode(q, *pool, *table, dim**-0.5, plan, tile._replace(waits_late=waits == "late"),
                                 inputs_ready=True, window=window, current_kv=rows)
        else:
            reference.rope_and_store(q, k, v, *pool, table[1][table[0][1:] - 1].long(), table[2].long() - 1, turns,
                                     positions, norms=norms)
            found = reference.paged_attention(q, *pool, torch.arange(len(lengths) + 1), *table, dim**-0.5, 1.0, window)
        results.append((found, *pool))
    for late, early, want in zip(*results):
        torch.testing.assert_close(late, want, atol=atol, rtol=rtol)
        torch.testing.assert_close(early, want, atol=atol, rtol=rtol)


@pytest.mark.parametrize("lengths,kv_heads,num_sms", [
    ([1], 8, 132), ([8192], 8, 132), ([2048] * 64, 8, 132), ([2048] * 256, 8, 132), ([100] * 20 + [30_000], 8, 132),
    ([100_000, 1, 1, 700], 1, 132), (list(range(1, 3000, 17)), 4, 16)])
def test_plan_of_a_decode_batch(lengths, kv_heads, num_sms):
    indptr, _, last = page_table(lengths, 16, sum(lengths))
    made = plan_decode(indptr, last, 16, kv_heads, num_sms, max(lengths))
    programs = 8 * num_sms // kv_heads
    request_of_split, split_indptr = torch.full_like(made.request_of_split, -1), torch.empty_like(made.split_indptr)
    reference.plan_decode(indptr, last, request_of_split, split_indptr, 16, programs, 256)
    assert made.split_indptr.tolist() == split_indptr.tolist()
    total = int(split_indptr[-1])
    assert len(lengths) <= total <= len(made.request_of_split) == len(lengths) + programs
    assert made.request_of_split[:total].tolist() == request_of_split[:total].tolist()
    piece = max(256, sum(lengths) / programs)
    for count, length in zip(split_indptr.diff().tolist(), lengths):
        assert count == 1 or length / count >= piece * 2 / 3 - 1
        assert length / count <= 1.5 * piece + 1, "a request keeps its programs longer than the others"
    assert made.needs_merge == (2 * max(lengths) >= 768)


@pytest.mark.parametrize("lengths,pieces", [
    ([2048] * 64, 64), ([2048] * 8, 64), ([2048] * 256, 256), ([1], 1), ([2048], 16), ([4000] * 8 + [100] * 56, 168)])
def test_a_plan_cuts_mixed_lengths_finer(lengths, pieces):
    """66 programs run at once: where one round of them would wait for the longest, splits are about half as long."""
    indptr, _, last = page_table(lengths, 16, sum(lengths))
    how = {"programs_per_sm": 4, "min_tokens": 128, "max_rounds": 2}
    made = plan_decode(indptr, last, 16, 8, 132, max(lengths), **how)
    request_of_split, split_indptr = torch.full_like(made.request_of_split, -1), torch.empty_like(made.split_indptr)
    reference.plan_decode(indptr, last, request_of_split, split_indptr, 16, 66, 128, 2)
    assert made.split_indptr.tolist() == split_indptr.tolist()
    assert int(split_indptr[-1]) == pieces <= len(request_of_split)
    assert made.request_of_split[:pieces].tolist() == request_of_split[:pieces].tolist()


@each_dtype
@pytest.mark.parametrize("heads,kv_heads,dim,page_size", ATTENTION)
def test_paged_prefill(heads, kv_heads, dim, page_size, dtype, atol, rtol):
    """Rows without a prefix, with one, a single row over a long prefix, and several blocks of rows."""
    counts, prefixes = [5, 33, 1, 90], [0, 64, 130, 7]
    table = page_table([c + p for c, p in zip(counts, prefixes)], page_size, 700)
    pool = paged_pool(700, kv_heads, page_size, dim, dtype)
    indptr = np.cumsum([0, *counts]).astype(np.int32)
    q = random(sum(counts), heads + 2, dim, dtype=dtype)[:, :heads]
    on_device = torch.from_numpy(indptr).to(DEVICE)
    blocks = plan_prefill(indptr, heads // kv_heads, torch.device(DEVICE))
    got = paged_prefill(q, *pool, blocks, on_device, *table, dim**-0.5)
    want = reference.paged_attention(q, *pool, on_device, *table, dim**-0.5)
    torch.testing.assert_close(got, want, atol=atol, rtol=rtol)
