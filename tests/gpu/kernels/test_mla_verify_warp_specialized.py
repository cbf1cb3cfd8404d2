"""Verified rows over latents by warp groups, on a Hopper GPU, against plain torch."""

from __future__ import annotations

import pytest
import torch

from baton.kernels import reference
from baton.kernels.attention.mla_verify import mla_verify
from baton.kernels.attention.verify_attention import plan_verify
from baton.kernels.tuning.attention import DecodeSplits
from baton.kernels.tuning.policy import policy_of

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="Hopper's alone")]

RANK, ROPE, LAYERS = 512, 64, 3


def int32(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device="cuda")


@pytest.mark.parametrize("heads,rows", [(16, (4, 3, 1, 4)), (16, (8, 5, 1, 7)), (64, (1, 2, 3, 4)),
                                        (128, (2, 1, 2, 2))])
@pytest.mark.parametrize("splits", [DecodeSplits(1, 64), DecodeSplits(4, 64)], ids=["1", "4"])
def test_rows_equal_their_twin(heads, rows, splits):
    """Requests of other lengths and numbers of rows, which end within a tile and a page; slots after them are NaN."""
    page, random = 16, torch.Generator("cuda").manual_seed(0)
    lengths = (700, 65, 9, 2048)
    counts = [-(-length // page) for length in lengths]
    pages = torch.randn(sum(counts) + 1, LAYERS, page, RANK + ROPE, device="cuda", generator=random).bfloat16()
    order = torch.randperm(sum(counts), generator=random, device="cuda").int()
    ends = torch.tensor(counts).cumsum(0).tolist()
    for end, count, length in zip(ends, counts, lengths):
        pages[order[end - 1].item(), :, length - (count - 1) * page:] = float("nan")
    table = int32(0, *ends), order, int32(*(length - (count - 1) * page for length, count in zip(lengths, counts)))
    indptr = int32(0, *torch.tensor(rows).cumsum(0).tolist())
    q, qr = (torch.randn(sum(rows), heads, size, device="cuda", generator=random).bfloat16() for size in (RANK, ROPE))
    tile = policy_of(q.device).attention.mla_verify(heads, max(rows), 2)
    if not tile.warp_specialized:
        pytest.skip("another Triton")
    plan = plan_verify(indptr, table[0], table[2], page, tile.head_blocks(heads), 132, max(rows), 4096, tile, splits)
    assert plan.rows * min(heads, tile.heads) == 64
    made = mla_verify(q, qr, pages[:, 1], indptr, *table, 0.1, plan, tile)
    want = reference.mla_attention(q.float(), qr.float(), pages[:, 1].nan_to_num(), indptr, *table, 0.1)
    assert (made.float() - want).norm() <= 0.01 * want.norm()
    assert torch.equal(made, mla_verify(q, qr, pages[:, 1], indptr, *table, 0.1, plan, tile))
