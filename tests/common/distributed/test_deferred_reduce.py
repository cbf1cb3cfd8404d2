"""Who makes a sum over ranks that is left open: the norm behind it, in one kernel where the group's peers have one."""

from __future__ import annotations

import pytest
import torch

from baton.common.distributed.deferred_reduce import DeferredProduct, DeferredSum
from baton.common.distributed.tp import TPGroup
from baton.common.layers.linear import RowLinear
from baton.common.layers.norm import RMSNorm
from baton.common.quantization import methods
from baton.common.weights.slots import allocator
from baton.kernels import reference

HIDDEN = 16
ALLOCATE = allocator(torch.float32, torch.device("cpu"))


class Two(TPGroup):
    """Of two ranks with equal parts."""

    def __init__(self, comm=None):
        super().__init__(0, 2)
        self.symm_comm = comm
        self.sums = 0

    def all_reduce(self, tensor):
        self.sums += 1
        return tensor.mul_(2)


class Peers:
    def __init__(self):
        self.normed = 0

    def can_all_reduce_norm(self, rows):
        return len(rows) <= 4

    def all_reduce_norm(self, rows, residual, weight, eps):
        self.normed += 1
        return reference.all_reduce_rmsnorm([rows, rows], residual, weight, eps)


@pytest.fixture
def norm():
    made = RMSNorm("norm", HIDDEN, 1e-5, ALLOCATE)
    made.weight.copy_(torch.rand(HIDDEN))
    return made


@pytest.mark.parametrize("rows,fused", [(3, True), (9, False)])
def test_a_norm_makes_the_sum(norm, rows, fused):
    group = Two(Peers())
    part, residual = torch.randn(rows, HIDDEN), torch.randn(rows, HIDDEN)
    wanted = reference.rmsnorm(2 * part, norm.weight, norm.eps, residual)
    found = norm.add_norm(DeferredSum(part.clone(), group), residual)
    assert all(torch.allclose(one, other, atol=1e-6) for one, other in zip(found, wanted))
    assert (group.symm_comm.normed, group.sums) == (int(fused), int(not fused))


def test_the_first_norm_has_no_residual(norm):
    group = Two(Peers())
    part = torch.randn(3, HIDDEN)
    y, total = norm.add_norm(DeferredSum(part.clone(), group), None)
    assert torch.equal(total, 2 * part) and torch.allclose(y, norm(2 * part)) and group.sums == 1


def test_rows_are_taken_before_the_sum():
    group, part = Two(), torch.randn(5, HIDDEN)
    assert torch.equal(DeferredSum(part, group).select(torch.tensor([4, 1])).reduce(), 2 * part[[4, 1]])
    assert DeferredSum(part, group).select(torch.tensor([], dtype=torch.long)).reduce().shape == (0, HIDDEN)
    assert group.sums == 1, "of no rows there is none"


def test_a_bias_is_one_rank_s_summand():
    x = torch.randn(3, HIDDEN)
    biased, plain = (RowLinear("row", 2 * HIDDEN, HIDDEN, bias, Two(), ALLOCATE) for bias in (True, False))
    alone = RowLinear("row", HIDDEN, HIDDEN, False, TPGroup(), ALLOCATE)
    assert isinstance(plain.forward_deferred(x), DeferredSum) and isinstance(alone.forward_deferred(x), torch.Tensor)
    for tensor in (biased.method.weight, biased.bias):
        tensor.normal_()
    for rank in range(2):
        biased.tp.rank = rank
        with_bias = biased.forward_deferred(x)
        assert isinstance(with_bias, DeferredSum)
        bias = biased.bias if rank == 0 else torch.zeros(HIDDEN)
        torch.testing.assert_close(with_bias.part, biased.partial(x) + bias)


def test_a_product_is_added_as_it_is_made(norm, monkeypatch):
    """On a GPU, of many rows; a float8 weight, or one with a bias, has no such product."""
    monkeypatch.setattr(methods, "fuses_residual", lambda x, weight: len(x) >= 5)
    alone, biased = (RowLinear("row", 2 * HIDDEN, HIDDEN, bias, TPGroup(), ALLOCATE) for bias in (False, True))
    for tensor in (alone.method.weight, biased.method.weight, biased.bias):
        tensor.normal_()
    x, residual = torch.randn(6, 2 * HIDDEN), torch.randn(6, HIDDEN)
    assert isinstance(alone.forward_deferred(x[:4]), torch.Tensor) and isinstance(biased.forward_deferred(x),
                                                                                  torch.Tensor)
    pending = alone.forward_deferred(x)
    assert isinstance(pending, DeferredProduct)
    wanted = norm.add_norm(alone(x), residual)
    torch.testing.assert_close(norm.add_norm(pending, residual.clone()), wanted)
    torch.testing.assert_close(norm.add_norm(pending, None), norm.add_norm(alone(x), None))
    torch.testing.assert_close(pending.select(torch.tensor([5, 1])), alone(x[[5, 1]]))
