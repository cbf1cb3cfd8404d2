"""Weights in NF4 and FP4 against their twin, on a GPU or under the interpreter; collected as kernel_cases.py is."""

from __future__ import annotations

import pytest
import torch

from baton.kernels import reference
from baton.kernels.nf4.dequantize_nf4 import dequantize_nf4, quantize_nf4
from baton.tests.kernels.kernel_cases import DEVICE, each_dtype, pytestmark, random

__all__ = ["pytestmark"]


@each_dtype
@pytest.mark.parametrize("kind", ["nf4", "fp4"])
@pytest.mark.parametrize("out,width", [(3, 64), (37, 256)])
def test_dequantize(kind, out, width, dtype, atol, rtol):
    packed = torch.randint(256, (out, width // 2), generator=torch.Generator().manual_seed(1), dtype=torch.uint8)
    absmax = random(out, width // 64, dtype=torch.float32).abs()
    got = dequantize_nf4(packed.to(DEVICE), absmax, kind, dtype)
    assert torch.equal(got, reference.dequantize_nf4(packed.to(DEVICE), absmax, kind, dtype))


def test_quantized_values_are_the_nearest():
    weight = random(5, 128, dtype=torch.float32)
    packed, absmax = quantize_nf4(weight)
    table = torch.tensor(reference.NF4_TABLES["nf4"], device=DEVICE)
    spread = absmax.repeat_interleave(64, 1)
    best = (weight[..., None] - table * spread[..., None]).abs().amin(-1)
    torch.testing.assert_close((dequantize_nf4(packed, absmax, "nf4", torch.float32) - weight).abs(), best)
