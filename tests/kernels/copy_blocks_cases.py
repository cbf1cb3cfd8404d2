"""Blocks of host memory, copied by the kernel and by its twin; collected by test_kernels_interpreted.py."""

from __future__ import annotations

import pytest
import torch

from baton.kernels import _triton, reference
from baton.kernels.comm.copy_blocks import copy_blocks

pytestmark = pytest.mark.skipif(not _triton.INTERPRETED, reason="needs TRITON_INTERPRET=1")


@pytest.mark.parametrize("block_bytes,count", [
    (65536, 3), (4096, 70), (128, 5), (18432, 3), (40000, 2), (24, 700), (9, 5), (1, 3), (65536, 1)])
def test_every_block_arrives_and_nothing_else_is_touched(block_bytes, count):
    generator = torch.Generator().manual_seed(count)
    source = torch.randint(0, 256, (count + 3, block_bytes), dtype=torch.uint8, generator=generator)
    places = [torch.randperm(count + 3, generator=generator)[:count] for _ in range(2)]
    ids = torch.stack(places)
    targets = [torch.zeros_like(source) for _ in range(2)]
    copy_blocks(source.data_ptr(), targets[0].data_ptr(), ids, block_bytes, programs=3)
    reference.copy_blocks(source.data_ptr(), targets[1].data_ptr(), ids, block_bytes)
    assert torch.equal(targets[0], targets[1])
    expected = torch.zeros_like(source)
    expected[ids[1]] = source[ids[0]]
    assert torch.equal(targets[0], expected)
