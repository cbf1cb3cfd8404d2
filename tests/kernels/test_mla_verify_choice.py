"""Rows over latents go to warp groups where they fill the tensor cores' tile, and TMA loads the pages."""

from __future__ import annotations

import pytest
import torch

from baton.kernels.attention.mla_verify import fits_warp_groups
from baton.kernels.tuning.attention import DecodeSplits
from baton.kernels.tuning.policy import Policy

from .h200 import FACTS, H200, policy_of_h200


@pytest.mark.parametrize("heads,q_len,taken", [(16, 1, False), (16, 2, False), (16, 3, True), (16, 8, True),
                                               (64, 1, True), (128, 1, True), (128, 4, True), (24, 4, False)])
def test_whole_tiles_are_warp_groups(heads, q_len, taken):
    """A decode step's of many heads, too; a program has an SM to itself then."""
    tile = H200.attention.mla_verify(heads, q_len, 2)
    assert tile.warp_specialized == taken
    assert H200.attention.mla_verify_splits(tile) == DecodeSplits(1 if taken else 2, 64)
    for other in (policy_of_h200(runs_gluon=False), Policy.load(FACTS, batch_invariant=True)):
        assert not other.attention.mla_verify(heads, q_len, 2).warp_specialized
    assert not H200.attention.mla_verify(heads, q_len, 4).warp_specialized


def test_only_latents_that_tma_loads_fit():
    def of(*sizes: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.empty(sizes, dtype=dtype, device="meta")

    q, q_rope, pages = of(4, 16, 512), of(4, 16, 192)[..., 128:], of(8, 3, 16, 576)[:, 1]
    assert fits_warp_groups(q, q_rope, pages, 64)
    assert not fits_warp_groups(q, q_rope, pages, 32)
    assert not fits_warp_groups(q, q_rope, of(8, 1, 576), 64), "pages of one token"
    assert not fits_warp_groups(q, q_rope, of(8, 64, 576), 64), "pages of 64 tokens"
    assert not fits_warp_groups(q, q_rope, of(8, 16, 640)[..., :576], 64), "latents with gaps"
    assert not fits_warp_groups(q, q_rope, of(8, 16, 576, dtype=torch.float8_e4m3fn), 64)
    assert not fits_warp_groups(q.float(), q_rope.float(), pages.float(), 64)
    assert not fits_warp_groups(of(4, 16, 256), q_rope, of(8, 16, 320), 64), "latents of another size"
