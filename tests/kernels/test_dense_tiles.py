"""Which products of many rows end in the activation, and by which tiles."""

from __future__ import annotations

import pytest
import torch

from baton.kernels.gemm.dense_tiles import MANY_ROWS, TALL, USUAL, best_tile, gated_tile


@pytest.mark.parametrize("rows,tile", [(8192, TALL), (4096, TALL), (1024, USUAL), (1040, None)])
def test_little_is_padding(rows, tile):
    """Llama-3-8B's on an H200."""
    assert best_tile(rows, 14336, 132) == tile


def test_other_devices_have_none():
    x, weight = torch.zeros(MANY_ROWS, 256), torch.zeros(256, 256)
    assert gated_tile(x.bfloat16(), weight.bfloat16()) is None
