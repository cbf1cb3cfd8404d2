"""The kernels of sparse decode attention against their twins, on a GPU or under the interpreter; collected by
test_kernels_interpreted.py and tests/gpu/kernels/test_double_sparsity.py, never by itself (its name has no ``test_``).
"""

from __future__ import annotations

import pytest
import torch

from baton.kernels import _triton, reference
from baton.kernels.arguments import HeadNorms
from baton.kernels.attention.decode_plan import plan_decode
from baton.kernels.attention.label_scores import label_scores
from baton.kernels.attention.order_channels import order_channels
from baton.kernels.attention.paged_decode import paged_decode
from baton.kernels.attention.select_tokens import select_tokens
from baton.kernels.attention.sparse_decode import sparse_decode
from baton.kernels.attention.sparse_decode_plan import SCORE_BLOCK, SparseDecodePlan, TokenScores, plan_sparse_decode

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
DTYPES = [(torch.float32, 2e-5, 2e-5), (torch.float16, 2e-3, 2e-3), *([(torch.bfloat16, 2e-2, 1e-2)] if GPU else [])]
PAGE = 8
SPLITS = {"programs_per_sm": 2, "min_tokens": 128, "max_rounds": 2}

pytestmark = pytest.mark.skipif(not (GPU or _triton.INTERPRETED), reason="needs a GPU or TRITON_INTERPRET=1")
each_dtype = pytest.mark.parametrize("dtype,atol,rtol", DTYPES, ids=[str(d[0]) for d in DTYPES])


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def int32(values: list[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def no_scores(heads: int, capacity: int) -> TokenScores:
    scores = TokenScores.empty(heads, capacity, torch.device(DEVICE))
    for part in scores:
        part.zero_()
    return scores


def scores_of(lengths: list[int], values: torch.Tensor) -> tuple[TokenScores, SparseDecodePlan]:
    """Scores [H, any] of requests one after the other."""
    starts = [0]
    for length in lengths:
        starts.append(starts[-1] + -(-length // SCORE_BLOCK) * SCORE_BLOCK)
    scores = TokenScores(values[:, :starts[-1]].half(), no_scores(len(values), starts[-1]).maxima)
    for start, length in zip(starts, lengths):
        end = start + -(-length // SCORE_BLOCK) * SCORE_BLOCK
        scores.values[:, start + length:end] = float("-inf")
    scores.maxima.copy_(scores.values.unflatten(1, (-1, SCORE_BLOCK)).amax(-1))
    return scores, SparseDecodePlan(int32(lengths), int32(starts), int32([]), int32([]))


def orders(heads: int, dim: int) -> torch.Tensor:
    return random(heads, dim, seed=9).argsort(-1).to(torch.int32)


class Pages:
    """Requests of ``lengths`` tokens over shuffled pages of random keys and values."""

    def __init__(self, lengths: list[int], heads: int, dim: int, dtype: torch.dtype):
        counts = [-(-length // PAGE) for length in lengths]
        total = sum(counts)
        pages = random(total + 2, 3, 2, heads, PAGE, dim, seed=1).to(dtype)
        self.keys, self.values = pages[:, 1, 0], pages[:, 1, 1]
        shuffled = torch.randperm(total + 2, generator=torch.Generator().manual_seed(2))[:total]
        self.indices = shuffled.to(DEVICE, torch.int32)
        self.indptr = int32([sum(counts[:i]) for i in range(len(counts) + 1)])
        self.last = int32([length - (count - 1) * PAGE for length, count in zip(lengths, counts)])

    def plan(self, threshold: int, capacity: int) -> SparseDecodePlan:
        plan = SparseDecodePlan.empty(len(self.last), self.last.device)
        plan_sparse_decode(self.indptr, self.last, PAGE, threshold, capacity, plan)
        return plan


@each_dtype
@pytest.mark.parametrize("rotated", [None, 24, 16])
@pytest.mark.parametrize("norms", [False, True])
@pytest.mark.parametrize("heads,kv_heads", [(4, 2), (20, 10)])
def test_channels_are_ordered_after_rope(heads, kv_heads, norms, rotated, dtype, atol, rtol):
    dim = 24
    q, k = random(5, heads + kv_heads, dim, dtype=dtype).split([heads, kv_heads], 1)
    cos_sin = None if rotated is None else random(50, rotated, seed=3)
    positions = torch.tensor([0, 7, 3, 49, 20], device=DEVICE)
    weights = HeadNorms(random(dim, dtype=dtype, seed=4), random(dim, dtype=dtype, seed=5), 1e-5) if norms else None
    arguments = (q, k, orders(kv_heads, dim), cos_sin, positions, weights)
    for got, want in zip(order_channels(*arguments), reference.order_channels(*arguments)):
        torch.testing.assert_close(got, want, atol=atol, rtol=rtol)
    scores = [torch.einsum("qhd,khd->hqk", x.float(), y.float().repeat_interleave(2, 1)) for x, y in (
        order_channels(*arguments), reference.order_channels(q, k, orders(kv_heads, dim).sort(-1).values.to(
            torch.int32), *arguments[3:]))]
    torch.testing.assert_close(*scores, atol=100 * atol, rtol=10 * rtol)


@pytest.mark.parametrize("capacity", [10_000, 150, 60])
def test_requests_above_the_threshold_are_sparse(capacity):
    pages = Pages([20, 21, 64, 5, 1, 30, 90], 1, 16, torch.float32)
    got, want = pages.plan(20, capacity), SparseDecodePlan.empty(7, pages.last.device)
    reference.plan_sparse_decode(pages.indptr, pages.last, PAGE, 20, capacity, *want)
    for mine, twins in zip(got, want):
        assert torch.equal(mine, twins)
    fits = {10_000: [0, 21, 64, 0, 0, 30, 90], 150: [0, 21, 64, 0, 0, 30, 0], 60: [0, 21, 0, 0, 0, 0, 0]}[capacity]
    assert got.lengths.tolist() == fits
    assert got.score_indptr.diff().tolist() == [-(-length // 16) * 16 for length in fits]
    lengths = (pages.indptr.diff() - 1) * PAGE
    assert (lengths + got.exact).tolist() == [1 if sparse else whole
                                              for sparse, whole in zip(fits, [20, 21, 64, 5, 1, 30, 90])]
    assert (lengths + got.sparse).tolist() == [whole or 1 for whole in fits]


@each_dtype
@pytest.mark.parametrize("heads,kv_heads,channels", [(4, 2, 8), (3, 3, 20), (8, 1, 32)])
def test_label_scores(heads, kv_heads, channels, dtype, atol, rtol):
    pages = Pages([300, 3, 129, 17], kv_heads, 40, dtype)
    sparse = pages.plan(16, 1000)
    q = random(4, heads + 2, 40, dtype=dtype)[:, :heads]
    scores, want = no_scores(heads, 1000), no_scores(heads, 1000)
    plan = plan_decode(pages.indptr, sparse.sparse, PAGE, kv_heads, 4, 300, **SPLITS)
    label_scores(q, pages.keys, pages.indptr, pages.indices, channels, 0.25, sparse, plan, scores)
    reference.label_scores(q, pages.keys, pages.indptr, pages.indices, channels, 0.25, sparse.lengths,
                           sparse.score_indptr, *want)
    for got, twins in zip(scores, want):
        torch.testing.assert_close(got, twins, atol=4e-3, rtol=4e-3)
    written = torch.zeros(1000, dtype=torch.bool, device=DEVICE)
    for begin, length in ((0, 304), (304, 144), (448, 32)):
        written[begin:begin + length] = True
    assert torch.equal(scores.values[:, :1000].any(0), written) and scores.maxima[:, :30].any(0).all()
    assert not scores.maxima[:, 30:].any()


def test_scores_beyond_float16_keep_their_order():
    pages = Pages([40], 1, 16, torch.float32)
    sparse, scores = pages.plan(1, 64), no_scores(1, 64)
    plan = plan_decode(pages.indptr, sparse.sparse, PAGE, 1, 4, 40, **SPLITS)
    label_scores(random(1, 1, 16) * 1e6, pages.keys, pages.indptr, pages.indices, 16, 1.0, sparse, plan, scores)
    assert scores.values[:, :40].isfinite().all() and scores.values[:, :40].abs().max() == 60000


@pytest.mark.parametrize("count", [1, 7, 256, 300, 1500])
@pytest.mark.parametrize("step", [0.0, 0.5])
def test_selected_tokens(count, step):
    """With a ``step`` many scores are equal, zeros of both signs among them."""
    lengths = [0, 20_500, 1, 0, 301, 300, 4096]
    values = random(2, 26_000, seed=6) * 3
    scores, sparse = scores_of(lengths, (values / step).round() * step if step else values)
    got = select_tokens(scores, sparse, count)
    want = reference.select_tokens(scores.values, sparse.lengths, sparse.score_indptr, count)
    chosen = [b for b, length in enumerate(lengths) if length]
    assert torch.equal(got[chosen], want[chosen])
    assert (got[2, :, 0] == 0).all() and (got[2, :, 1:] == -1).all()


@each_dtype
@pytest.mark.parametrize("heads,kv_heads", [(4, 2), (3, 3), (8, 1)])
def test_attention_over_selected_tokens(heads, kv_heads, dtype, atol, rtol):
    pages = Pages([100, 30, 70], kv_heads, 40, dtype)
    sparse = pages.plan(50, 1000)
    q = random(3, heads + 1, 40, dtype=dtype)[:, :heads]
    selected = select_tokens(scores_of(sparse.lengths.tolist(), random(heads, 1000, seed=7))[0], sparse, 80)
    got, want = (torch.full((3, heads, 40), 7.0, dtype=dtype, device=DEVICE) for _ in range(2))
    for attend, out in ((sparse_decode, got), (reference.sparse_decode, want)):
        attend(q, pages.keys, pages.values, pages.indptr, pages.indices, selected, sparse.lengths, 0.2, 0.5, out)
    torch.testing.assert_close(got, want, atol=atol, rtol=rtol)
    assert (got[1] == 7).all()


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_float8_pages(dtype):
    pages = Pages([300, 70], 2, 32, dtype)
    sparse, q = pages.plan(50, 400), random(2, 4, 32, dtype=torch.float16)
    scores, want = no_scores(4, 400), no_scores(4, 400)
    plan = plan_decode(pages.indptr, sparse.sparse, PAGE, 2, 4, 300, **SPLITS)
    table = (pages.indptr, pages.indices)
    label_scores(q, pages.keys, *table, 16, 0.25, sparse, plan, scores)
    reference.label_scores(q, pages.keys, *table, 16, 0.25, sparse.lengths, sparse.score_indptr, *want)
    for own, twins in zip(scores, want):
        torch.testing.assert_close(own, twins, atol=4e-3, rtol=4e-3)
    selected = select_tokens(want, sparse, 60)
    got, want = torch.zeros_like(q), torch.zeros_like(q)
    for attend, out in ((sparse_decode, got), (reference.sparse_decode, want)):
        attend(q, pages.keys, pages.values, *table, selected, sparse.lengths, 0.2, 0.5, out)
    torch.testing.assert_close(got, want, atol=2e-3, rtol=2e-3)


@each_dtype
def test_all_tokens_selected_equals_dense_attention(dtype, atol, rtol):
    lengths, heads, kv_heads, dim = [200, 9, 131], 4, 2, 32
    pages = Pages(lengths, kv_heads, dim, dtype)
    q = random(3, heads, dim, dtype=dtype)
    dense = paged_decode(q, pages.keys, pages.values, pages.indptr, pages.indices, pages.last, 0.2, plan_decode(
        pages.indptr, pages.last, PAGE, kv_heads, 4, 200))
    sparse = pages.plan(100, 400)
    out = paged_decode(q, pages.keys, pages.values, pages.indptr, pages.indices, sparse.exact, 0.2, plan_decode(
        pages.indptr, sparse.exact, PAGE, kv_heads, 4, 200))
    assert not torch.allclose(out[0], dense[0], atol=10 * atol)
    scores = no_scores(heads, 400)
    label_scores(q, pages.keys, pages.indptr, pages.indices, dim, 0.2, sparse, plan_decode(
        pages.indptr, sparse.sparse, PAGE, kv_heads, 4, 200, **SPLITS), scores)
    selected = select_tokens(scores, sparse, 256)
    sparse_decode(q, pages.keys, pages.values, pages.indptr, pages.indices, selected, sparse.lengths, 0.2, 1.0, out)
    torch.testing.assert_close(out, dense, atol=atol, rtol=rtol)
