"""The kernels over recurrent states against their twins and against plain recurrences, on a GPU or under the
interpreter; collected by test_kernels_interpreted.py and tests/gpu/kernels/test_states.py."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from baton.kernels import _triton
from baton.kernels.arguments import DeltaNet, Mamba2, StateRuns
from baton.kernels.reference import state as reference
from baton.kernels.state.causal_conv1d import causal_conv1d
from baton.kernels.state.gated_delta_rule import gated_delta_rule
from baton.kernels.state.selective_scan import selective_scan

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
DTYPES = [(torch.float32, 1e-4), *([(torch.bfloat16, 3e-2)] if GPU else [])]

pytestmark = pytest.mark.skipif(not (GPU or _triton.INTERPRETED), reason="needs a GPU or TRITON_INTERPRET=1")
each_dtype = pytest.mark.parametrize("dtype,tolerance", DTYPES)
SHAPES = [DeltaNet(2, 2, 16, 20, 4), *([DeltaNet(16, 2, 128, 128, 4)] if GPU else [])]
MIXERS = [Mamba2(2, 2, 12, 20, 4), *([Mamba2(1, 24, 64, 256, 4), Mamba2(8, 16, 64, 128, 4)] if GPU else [])]
# Rows, source and target of each run: in place, from zeros, from another's state.
RUNS = [[(70, 3, 3), (1, -1, 0), (5, 2, 4), (2, 2, 5)], [(1, 3, 3), (1, -1, 0), (1, 2, 4)], [(3, 1, 1)]]


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def runs_of(runs: list[tuple[int, int, int]], *, decodes: bool = False) -> StateRuns:
    """The runs with a row of nobody's between."""
    ends = np.cumsum([rows + (not decodes) for rows, _, _ in runs])
    begins = ends - [rows for rows, _, _ in runs]
    tensors = [torch.tensor(column, dtype=dtype, device=DEVICE) for column, dtype in (
        (begins, torch.int32), (ends, torch.int32), ([source for _, source, _ in runs], torch.int64),
        ([target for _, _, target in runs], torch.int64))]
    return StateRuns(*tensors, max(rows for rows, _, _ in runs), None if decodes else np.stack((begins, ends), 1))


def same(ours: torch.Tensor, twin: torch.Tensor, tolerance: float) -> None:
    """Sums of hundreds of products are exact to a share of what they usually are, however small they turn out."""
    usual = max(1.0, float(twin.float().square().mean().sqrt()))
    torch.testing.assert_close(ours, twin, atol=tolerance * usual, rtol=tolerance)


@pytest.mark.parametrize("runs", RUNS)
@pytest.mark.parametrize("has_bias", [False, True])
@each_dtype
def test_convolution(dtype, tolerance, runs, has_bias):
    own = runs_of(runs)
    rows = int(own.ends[-1])
    x = random(rows, 3, 40)[..., :37].to(dtype)
    weight, bias = random(3, 37, 4).to(dtype), random(3, 37).to(dtype) if has_bias else None
    memory = random(6, 3, 150)
    found = []
    for convolve in (causal_conv1d, reference.causal_conv1d):
        states, out = memory.clone(), torch.zeros(rows, 3, 37, dtype=dtype, device=DEVICE)
        convolve(x, weight, bias, states[..., :111].unflatten(-1, (37, 3)), own, out)
        found.append((states, out))
    for ours, twin in zip(*found):
        same(ours, twin, tolerance)


def delta_inputs(shape: DeltaNet, rows: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    heads = shape.num_heads * shape.group
    return (random(rows, shape.num_heads, shape.channels).to(dtype), -random(rows, heads).abs() / 4,
            random(rows, heads, seed=1).sigmoid())


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("runs", RUNS)
@each_dtype
def test_delta_rule(dtype, tolerance, runs, shape):
    own = runs_of(runs)
    rows, heads = int(own.ends[-1]), shape.num_heads * shape.group
    inputs, memory = delta_inputs(shape, rows, dtype), random(6, shape.num_heads, shape.values)
    found = []
    for compute in (gated_delta_rule, reference.gated_delta_rule):
        states = memory.clone()
        out = torch.zeros(rows, heads, shape.value_dim, dtype=dtype, device=DEVICE)
        compute(*inputs, states[..., shape.conv_values:shape.values], shape, own, out)
        found.append((states, out))
    for ours, twin in zip(*found):
        same(ours, twin, tolerance)


@pytest.mark.parametrize("shape", MIXERS)
@pytest.mark.parametrize("runs", RUNS)
@each_dtype
def test_selective_scan(dtype, tolerance, runs, shape):
    own = runs_of(runs)
    rows, heads = int(own.ends[-1]), shape.num_groups * shape.heads
    mixed, step = random(rows, shape.num_groups, shape.channels).to(dtype), random(rows, heads, seed=1).abs()
    inputs, memory = (mixed, step, -step / 4, random(heads)), random(6, shape.num_groups, shape.values)
    found = []
    for compute in (selective_scan, reference.selective_scan):
        states = memory.clone()
        out = torch.zeros(rows, heads, shape.head_dim, dtype=dtype, device=DEVICE)
        compute(*inputs, states[..., shape.conv_values:shape.values], shape, own, out)
        found.append((states, out))
    for ours, twin in zip(*found):
        same(ours, twin, tolerance)


def test_chunks_equal_steps():
    """The chunk-parallel form, and a token at a time."""
    shape = SHAPES[0]
    inputs, memory = delta_inputs(shape, 71, torch.float32), random(6, shape.num_heads, shape.values)
    found = []
    for decodes in (False, True):
        states = memory.clone()
        matrices = states[..., shape.conv_values:shape.values]
        out = torch.zeros(71, shape.num_heads * shape.group, shape.value_dim, device=DEVICE)
        if decodes:
            for row in range(1, 71):
                gated_delta_rule(*(x[row:row + 1] for x in inputs), matrices, shape,
                                 runs_of([(1, 3, 3)], decodes=True), out[row:row + 1])
        else:
            gated_delta_rule(*inputs, matrices, shape, runs_of([(70, 3, 3)]), out)
        found.append((states, out))
    for chunks, steps in zip(*found):
        torch.testing.assert_close(chunks, steps, atol=1e-4, rtol=1e-4)
