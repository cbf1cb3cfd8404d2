"""Experts in MXFP4 against their twin, on a GPU or under the interpreter; collected by test_kernels_interpreted.py and
tests/gpu/kernels/test_moe.py."""

from __future__ import annotations

import pytest
import torch

from baton.kernels import reference
from baton.kernels.arguments import ExpertBiases, Mxfp4Weights
from baton.kernels.moe.mxfp4_experts import Mxfp4Tile, default_tile, mxfp4_experts
from baton.tests.kernels.kernel_cases import DEVICE, each_dtype, pytestmark, random
from baton.tests.kernels.moe_cases import choices_of

__all__ = ["pytestmark"]

SMALL = Mxfp4Tile(16, 16, 2, 4, 2)


def packed_experts(num_experts: int, out: int, width: int, group: int, seed: int) -> Mxfp4Weights:
    generator = torch.Generator().manual_seed(seed)
    packed, scales = [], []
    for _ in range(num_experts):
        blocks = torch.randint(256, (out, width // 2), generator=generator, dtype=torch.uint8)
        exponents = torch.randint(118, 124, (out, width // group), generator=generator, dtype=torch.uint8)
        packed.append(reference.pack_mxfp4(blocks, group))
        scales.append(reference.pack_mxfp4_scales(exponents, group))
    return Mxfp4Weights(torch.stack(packed).to(DEVICE), torch.stack(scales).contiguous().to(DEVICE), group)


@each_dtype
@pytest.mark.parametrize("tokens,num_experts,choices,outside,hidden,size,group,tile", [
    (1, 4, 2, 0, 64, 32, 32, SMALL), (19, 5, 3, 1, 160, 48, 16, SMALL), (40, 2, 1, 1, 64, 40, 8, SMALL),
    (70, 2, 1, 0, 32, 32, 32, default_tile(40)), (2, 4, 2, 1, 288, 160, 32, SMALL._replace(splits=3)),
])
@pytest.mark.parametrize("clamped", [True, False])
def test_mxfp4_experts(tokens, num_experts, choices, outside, hidden, size, group, tile, clamped, dtype, atol, rtol):
    """Hidden sizes are whole groups of 32, intermediate ones of ``group``."""
    places = choices_of(tokens, num_experts, choices, outside)
    weights = torch.rand(places.shape, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    x = random(tokens, hidden, dtype=dtype)
    gate_up = packed_experts(num_experts, 2 * size, hidden, 32, 2)
    down = packed_experts(num_experts, hidden, size, group, 3)
    biases = ExpertBiases(random(num_experts, 2 * size, dtype=dtype), random(num_experts, hidden, dtype=dtype))
    how = {"biases": biases, "limit": 1.5} if clamped else {}
    want = reference.mxfp4_experts(x, gate_up, down, places, weights, **how)
    got = mxfp4_experts(x, gate_up, down, places, weights, tile=tile, **how)
    torch.testing.assert_close(got, want, atol=2 * atol, rtol=2 * rtol)
    assert mxfp4_experts(x[:0], gate_up, down, places[:0], weights[:0]).shape == (0, hidden)


def test_weights_keep_their_values():
    """Beside the dense experts of the same values."""
    gate_up, down = packed_experts(3, 64, 32, 32, 4), packed_experts(3, 32, 32, 16, 5)
    places, x = choices_of(6, 3, 2), random(6, 32, dtype=torch.float32)
    weights = torch.rand(places.shape).to(DEVICE)
    dense = [reference.dequantize_mxfp4(each)[..., :32] for each in (gate_up, down)]
    want = reference.moe_experts(x, *dense, places, weights)
    torch.testing.assert_close(mxfp4_experts(x, gate_up, down, places, weights), want, atol=1e-3, rtol=1e-4)
