"""A row's result by itself and in batches is the same to the last bit. Run by test_kernels_interpreted.py, in a process
where Triton interprets its kernels; the interpreter's products of bfloat16 are not right, those of float16 are."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from baton.kernels import reference
from baton.kernels.attention.decode_plan import plan_decode
from baton.kernels.attention.paged_decode import paged_decode
from baton.kernels.attention.per_head_matmul import per_head_matmul
from baton.kernels.gemm.dense_matmul import dense_matmul, fuses_residual
from baton.kernels.moe.moe_experts import moe_experts
from baton.kernels.rowwise.rmsnorm import rmsnorm
from baton.kernels.rowwise.silu_and_mul import silu_and_mul
from baton.kernels.tuning.policy import policy_of, set_batch_invariant

CPU = torch.device("cpu")
BATCHES = (2, 3, 17, 64)
DTYPES = (torch.float16, torch.float32)


@pytest.fixture(autouse=True)
def switched_on() -> Iterator[None]:
    set_batch_invariant(True)
    yield
    set_batch_invariant(False)


def randn(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("out", "width"), [(96, 200), (130, 64)])
@pytest.mark.parametrize("gated", [False, True])
def test_products(dtype, out, width, gated):
    x, weight = randn(64, width, dtype=dtype), randn(out, width, dtype=dtype, seed=1) / width ** 0.5
    whole = dense_matmul(x, weight, gated=gated)
    plain = x.float() @ weight.float().T
    expected = reference.silu_and_mul(plain.to(dtype)) if gated else plain.to(dtype)
    torch.testing.assert_close(whole, expected, atol=2e-3, rtol=2e-3)
    for rows in (1, *BATCHES):
        assert torch.equal(dense_matmul(x[:rows], weight, gated=gated), whole[:rows])
    if dtype == torch.float16:  # the interpreter's float32 products are BLAS's: their order depends on a row's number
        assert torch.equal(dense_matmul(x[41:42], weight, gated=gated), whole[41:42])
    assert not fuses_residual(x, weight)


def test_products_with_a_bias():
    x, weight, bias = (randn(*shape, dtype=torch.float16) for shape in ((20, 96), (48, 96), (48,)))
    whole = dense_matmul(x, weight, bias)
    torch.testing.assert_close(whole.float(), (x.float() @ weight.float().T + bias.float()), atol=2e-2, rtol=2e-3)
    assert torch.equal(dense_matmul(x[7:8], weight, bias), whole[7:8])
    strided = torch.cat([x, x], 1)[:, ::2]
    assert torch.equal(dense_matmul(strided, weight, bias), dense_matmul(strided.contiguous(), weight, bias))


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows(dtype):
    x, gain = randn(64, 192, dtype=dtype), randn(192, dtype=dtype, seed=1)
    normed, activated = rmsnorm(x, gain, 1e-5)[0], silu_and_mul(x)
    for rows in (1, *BATCHES):
        assert torch.equal(rmsnorm(x[:rows].contiguous(), gain, 1e-5)[0], normed[:rows])
        assert torch.equal(silu_and_mul(x[:rows].contiguous()), activated[:rows])


@pytest.mark.parametrize("dtype", DTYPES)
def test_decode_attention(dtype):
    """Requests of mixed lengths, some of several splits: by themselves and together."""
    lengths = [3, 700, 16, 2100, 129, *range(20, 31)]
    page, heads, kv_heads, dim = 16, 4, 2, 32
    pages = [-(-length // page) for length in lengths]
    k, v = (randn(sum(pages), kv_heads, page, dim, dtype=dtype, seed=seed) for seed in (1, 2))
    q = randn(len(lengths), heads, dim, dtype=dtype, seed=3)
    ids = torch.randperm(sum(pages), generator=torch.Generator().manual_seed(4)).to(torch.int32)

    def attend(chosen: list[int]) -> torch.Tensor:
        starts = [sum(pages[:i]) for i in chosen]
        indices = torch.cat([ids[start:start + pages[i]] for start, i in zip(starts, chosen)])
        indptr = torch.tensor([0, *torch.tensor([pages[i] for i in chosen]).cumsum(0).tolist()], dtype=torch.int32)
        last = torch.tensor([(lengths[i] - 1) % page + 1 for i in chosen], dtype=torch.int32)
        splits = policy_of(CPU).attention.decode_splits(dim, dtype.itemsize, dtype.itemsize, len(chosen) * kv_heads)
        longest = max(pages[i] for i in chosen) * page
        plan = plan_decode(indptr, last, page, kv_heads, 2, longest, **splits._asdict())
        return paged_decode(q[chosen], k, v, indptr, indices, last, dim ** -0.5, plan)

    together = attend(list(range(len(lengths))))
    reversed_order = attend(list(reversed(range(len(lengths)))))
    assert torch.equal(reversed_order.flip(0), together)
    for i in range(len(lengths)):
        assert torch.equal(attend([i])[0], together[i]), lengths[i]
    assert torch.equal(attend([1, 3]), together[[1, 3]])


def test_heads():
    x, w = randn(64, 4, 48, dtype=torch.float16), randn(4, 48, 80, dtype=torch.float16, seed=1)
    whole = per_head_matmul(x, w)
    for rows in (1, *BATCHES):
        assert torch.equal(per_head_matmul(x[:rows], w), whole[:rows])


@pytest.mark.parametrize("dtype", DTYPES)
def test_experts(dtype):
    experts, hidden, size, choices = 8, 64, 48, 2
    x = randn(64, hidden, dtype=dtype)
    gate_up, down = randn(experts, 2 * size, hidden, dtype=dtype, seed=1), randn(experts, hidden, size, dtype=dtype,
                                                                                 seed=2)
    weights, ids = randn(64, experts, dtype=torch.float32, seed=3).softmax(-1).topk(choices)
    whole = moe_experts(x, gate_up, down, ids, weights)
    for rows in (1, *BATCHES):
        assert torch.equal(moe_experts(x[:rows].contiguous(), gate_up, down, ids[:rows], weights[:rows]), whole[:rows])
