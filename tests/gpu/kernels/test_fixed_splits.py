"""Attention of deterministic mode on a GPU: a row's bits do not depend on the tile, nor on the step that it is in."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from baton.kernels.attention.fixed_split_attention import (
    FixedSplitPlan,
    fixed_split_attention,
    plan_decode_rows,
    plan_rows,
    plan_verified_rows,
)
from baton.kernels.attention.paged_prefill import paged_prefill, plan_prefill
from baton.kernels.tuning.policy import policy_of, set_batch_invariant

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

PAGE, TOKENS, ROWS = 16, 2500, 260


@pytest.fixture(autouse=True)
def deterministic() -> Iterator[None]:
    set_batch_invariant(True)
    yield
    set_batch_invariant(False)


def int32(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device="cuda")


class Sequence:
    """The keys, values and last queries of one request, in pages in any order."""

    def __init__(self, heads: int, kv_heads: int, dim: int, dtype: torch.dtype, stored: torch.dtype,
                 window: int | None):
        torch.manual_seed(0)
        self.window, self.group = window, heads // kv_heads
        pages = -(-TOKENS // PAGE)
        self.k, self.v = (torch.randn(pages, kv_heads, PAGE, dim, device="cuda").to(stored) for _ in range(2))
        self.q = torch.randn(ROWS, heads, dim, device="cuda").to(dtype)
        self.ids = torch.randperm(pages, device="cuda").to(torch.int32)

    def table(self, stop: int) -> tuple[torch.Tensor, ...]:
        return int32(0, -(-stop // PAGE)), self.ids, int32((stop - 1) % PAGE + 1)

    def attend(self, plan: FixedSplitPlan, start: int, stop: int) -> torch.Tensor:
        first = TOKENS - ROWS
        return fixed_split_attention(
            self.q[start - first:stop - first], self.k, self.v, plan, torch.arange(start, stop, device="cuda"),
            int32(0, stop - start), *self.table(stop), self.q.shape[-1] ** -0.5, window=self.window)


@pytest.mark.parametrize(("heads", "dim", "dtype", "stored", "window"), [
    (32, 128, torch.bfloat16, torch.bfloat16, None), (8, 128, torch.bfloat16, torch.bfloat16, None),
    (32, 128, torch.bfloat16, torch.float8_e4m3fn, None), (64, 64, torch.bfloat16, torch.bfloat16, 200),
    (32, 128, torch.float16, torch.float16, None), (16, 256, torch.bfloat16, torch.bfloat16, None),
    (16, 80, torch.bfloat16, torch.bfloat16, None)])
def test_a_row_has_the_same_bits_in_every_tile_and_step(heads, dim, dtype, stored, window):
    sequence, policy = Sequence(heads, 8, dim, dtype, stored, window), policy_of(torch.device("cuda")).attention
    group, first = heads // 8, TOKENS - ROWS
    tiles = {count: policy.fixed_split(dim, 2, stored.itemsize, count) for count in (16, 32, 64, 128)}
    assert len(set(tiles.values())) > 1

    def prompt(count: int, start: int, stop: int) -> torch.Tensor:
        plan = plan_rows(np.array([0, stop - start]), np.array([stop]), group, tiles[count], window, sequence.q.device)
        return sequence.attend(plan, start, stop)

    whole = prompt(128, first, TOKENS)
    rows, lengths = int32(0, ROWS), plan_prefill(np.array([0, ROWS]), group, sequence.q.device)
    expected = paged_prefill(sequence.q, sequence.k, sequence.v, lengths, rows, *sequence.table(TOKENS), dim ** -0.5,
                             1.0, window)
    torch.testing.assert_close(whole.float(), expected.float(), atol=5e-3, rtol=5e-2)
    for count in tiles:
        assert torch.equal(prompt(count, first, TOKENS), whole), count
        assert torch.equal(prompt(count, first + 7, TOKENS - 9), whole[7:-9]), count
    for at in range(first, TOKENS, 23):
        for longest in (TOKENS, 1 << 17):
            plan = plan_decode_rows(1, group, tiles[16], longest, window, sequence.q.device)
            assert torch.equal(sequence.attend(plan, at, at + 1)[0], whole[at - first]), at
    for count, q_len in ((16, 2), (32, 5), (64, 8)):
        for start in range(first, TOKENS - q_len, 37):
            plan = plan_verified_rows(int32(0, q_len), torch.arange(start, start + q_len, device="cuda"), q_len, group,
                                      tiles[count], TOKENS, window)
            found = sequence.attend(plan, start, start + q_len)
            assert torch.equal(found, whole[start - first:][:q_len]), start


def test_rows_of_large_batches_have_the_bits_of_one(requests: int = 200):
    """A program reads all of a request's keys there, where several share those of one."""
    sequence = Sequence(32, 8, 128, torch.bfloat16, torch.bfloat16, None)
    tile = policy_of(sequence.q.device).attention.fixed_split(128, 2, 2, 4)
    one, many = (plan_decode_rows(count, 4, tile, TOKENS, None, sequence.q.device) for count in (1, requests))
    assert one.programs(8, 132) > 1 == many.programs(8, 132)
    indptr, ids, last = sequence.table(TOKENS)
    pages = int(indptr[1])
    found = fixed_split_attention(
        sequence.q[-1:].expand(requests, -1, -1).contiguous(), sequence.k, sequence.v, many,
        torch.full((requests,), TOKENS - 1, device="cuda"), int32(*range(requests + 1)),
        int32(*range(0, pages * requests + 1, pages)), ids.repeat(requests), last.expand(requests).contiguous(),
        128 ** -0.5)
    alone = sequence.attend(one, TOKENS - 1, TOKENS)
    assert all(torch.equal(row, alone[0]) for row in found)
