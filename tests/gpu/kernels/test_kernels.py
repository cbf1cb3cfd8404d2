"""The Triton kernels on a GPU against their plain-torch twins, bfloat16 included."""

from __future__ import annotations

import pytest
import torch

from baton.kernels import _triton
from baton.kernels.sampling.argmax import argmax
from baton.tests.bench import small_kernels
from baton.tests.helpers.kernel_cases import check_cases

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.mark.parametrize("file",
                         ["kernel_cases.py", "sample_cases.py", "fp8_cases.py", "small_m_cases.py", "verify_cases.py",
                          "chain_cases.py", "int8_cases.py"])
def test_kernels_equal_their_twins(file):
    check_cases(file)


@pytest.mark.parametrize("rows", [1, 8, 64, 140])
def test_kernels_that_start_early_compute_what_they_do_one_after_the_other(rows, monkeypatch):
    """Layers of a decode step in a CUDA graph, with other inputs in each replay: a value that is read too early, or
    overwritten before it is read, would show."""
    results = {}
    for early in (True, False):
        monkeypatch.setattr(_triton, "PDL_ALLOWED", early)
        assert _triton.pdl(torch.empty(0, device="cuda")).get("launch_pdl", False) == (
            early and torch.cuda.get_device_capability() >= (9, 0))
        results[early] = _decode_layers(rows)
    for found, wanted in zip(results[True], results[False], strict=True):
        assert torch.equal(found, wanted)


def _decode_layers(rows: int) -> list[torch.Tensor]:
    torch.manual_seed(0)
    batch = small_kernels.Batch(small_kernels.Shape(512, 8, 2, 128, 1024, 5000, True), rows, 1000)
    x = torch.empty(rows, 512, dtype=torch.bfloat16, device="cuda")

    def step() -> torch.Tensor:
        hidden, residual = x, None
        batch.plan()
        for layer in range(small_kernels.LAYERS):
            hidden, residual = batch.run(layer, hidden, residual)
        return torch.cat((hidden.float(), residual.float(), argmax(hidden.float())[0][:, None]), -1)

    x.normal_()
    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    found = []
    for seed in range(20):
        x.copy_(torch.randn(rows, 512, generator=torch.Generator().manual_seed(seed)))
        graph.replay()
        found.append(out.clone())
    assert all(one.isfinite().all() for one in found)
    return found
