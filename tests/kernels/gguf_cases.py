"""Kernels over GGUF's blocks against their twin, under Triton's interpreter or on a GPU."""

from __future__ import annotations

import pytest
import torch

from baton.kernels import _triton
from baton.kernels.gguf.packed_matmul import dequantize, packed_matmul
from baton.kernels.gguf_blocks import BLOCKS
from baton.kernels.reference import dequantize_gguf
from baton.tests.helpers.gguf_files import random_blocks

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
pytestmark = pytest.mark.skipif(not (GPU or _triton.INTERPRETED), reason="needs a GPU or TRITON_INTERPRET=1")


@pytest.mark.parametrize("kind", BLOCKS)
def test_blocks_equal_the_twin(kind):
    """Rows and columns that fill no whole tile, and a width of whole blocks but not of whole tiles."""
    packed = random_blocks(kind, 35, 288 if BLOCKS[kind].values == 32 else 512).to(DEVICE)
    want = dequantize_gguf(packed, kind)
    assert torch.equal(dequantize(packed, kind, torch.float32), want)
    x = torch.randn(5, want.shape[1], generator=torch.Generator().manual_seed(1)).to(DEVICE, torch.float16)
    y = torch.full((5, 40), 7.0, device=DEVICE, dtype=torch.float16)
    packed_matmul(x, packed, kind, y[:, 3:38])
    torch.testing.assert_close(y[:, 3:38].float(), x.float() @ want.half().float().T, atol=0.05, rtol=0.01)
    assert (y[:, :3] == 7).all() and (y[:, 38:] == 7).all()
