"""The rule of float8 products' tiles, and the padding of rows for the library, on any machine."""

from __future__ import annotations

import itertools

import pytest
import torch

from baton.kernels.arguments import Float8Format
from baton.kernels.float8.fp8_block_matmul import _with_padded_rows
from baton.kernels.rowwise.fp8_quantize import quantize, quantize_groups

from .h200 import H200

MOST_SHARED = 227 << 10


def test_tiles_fit_and_spread():
    for by, rows, out, width in itertools.product(("row", "block"), (1, 64, 65, 128, 129, 8192),
                                                  (16, 576, 4096, 6144, 28672), (16, 512, 4096, 14336)):
        tile = H200.float8.tile(by, rows, out, width)
        assert (tile.rows + tile.columns) * tile.depth * tile.stages < MOST_SHARED
        assert by == "row" or tile.depth == 128  # a step has one scale
        columns, steps = -(-out // tile.columns), -(-width // tile.depth)
        assert tile.splits == 1 or (columns * tile.splits <= 2 * 132 and steps // tile.splits >= 16)


@pytest.mark.parametrize("rows", [1, 6, 8])
def test_rows_that_were_quantized_have_room_for_whole_fours(rows):
    """Nothing is copied then; other rows are."""
    x = torch.randn(rows, 256)
    given = quantize(x, Float8Format(128))
    values, scale = quantize_groups(x, 128)
    for q, s in ((given.values, given.scale), (values, scale)):
        whole, whole_scale = _with_padded_rows(q, s)
        assert whole.shape[0] == whole_scale.shape[0] == -(-rows // 4) * 4
        assert whole_scale.stride() == (1, len(whole)) and whole.is_contiguous()
        assert torch.equal(whole[:rows].float(), values.float()) and torch.equal(whole_scale[:rows], scale)
    taken, _ = _with_padded_rows(given.values, given.scale)
    assert taken.data_ptr() == given.values.data_ptr()
