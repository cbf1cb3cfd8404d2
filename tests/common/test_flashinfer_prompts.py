"""Prompts over a float8 cache by FlashInfer's backend, the library stood in for: which pages its kernels see."""

from __future__ import annotations

import importlib
import sys
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import torch

from baton.common.attention.torch_backend import TorchBackend
from baton.common.engine.forward_batch import Row, build_forward_batch
from baton.common.kvcache.layout import KVLayout
from baton.common.kvcache.pool import KVPool
from baton.kernels import reference

CPU = torch.device("cpu")
SCALES = ((0.5, 0.25), (1.0, 2.0), (0.03, 0.02))


class Wrapper:
    """What the backend calls of FlashInfer's wrappers; takes queries and keys of one type, as FA3 does."""

    runs = 0

    def __init__(self, workspace, layout, **options):
        pass

    def plan(self, *tables, **options):
        self.tables, self.options = tables, options

    def run(self, q, pages, out):
        assert self.options["kv_data_type"] == pages[0].dtype == q.dtype
        Wrapper.runs += 1
        return out.copy_(reference.paged_attention(q, *pages, *self.tables, q.shape[-1] ** -0.5, 1.0))


@pytest.fixture
def backend_of(monkeypatch):
    if "flashinfer" in sys.modules:
        pytest.skip("FlashInfer itself is here: tests/gpu has this test")
    library = ModuleType("flashinfer")
    for name in ("BatchPrefillWithPagedKVCacheWrapper", "BatchDecodeWithPagedKVCacheWrapper",
                 "CUDAGraphBatchDecodeWithPagedKVCacheWrapper"):
        setattr(library, name, Wrapper)
    name, plain = "baton.common.attention.flashinfer_backend", torch.empty
    monkeypatch.setitem(sys.modules, "flashinfer", library)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.cuda, "Event", lambda: SimpleNamespace(synchronize=lambda: None, record=lambda: None))
    monkeypatch.setattr(torch, "empty", lambda *shape, pin_memory=False, **options: plain(*shape, **options))
    yield importlib.import_module(name).FlashInferBackend
    del sys.modules[name]


def test_float8_pages_are_widened_for_the_library_and_too_many_are_not(backend_of):
    layout = KVLayout((2, 1), num_kv_heads=2, head_dim=16, page_size=16, dtype="float8_e4m3fn", scales=SCALES)
    pools = [KVPool(layout, 60, CPU) for _ in range(2)]
    backends = [TorchBackend(pools[0]), backend_of(pools[1], 8, torch.float32)]
    pages = np.random.default_rng(0).permutation(60)[:40].reshape(2, 20)
    before = Wrapper.runs
    # The first batch, and one whose pages are too many, are our kernel's.
    for start, count, by_library in [(0, 100, 0), (100, 50, 3), (150, 20, 3)]:
        batch = build_forward_batch([Row([0] * count, start, row) for row in pages], 16, CPU, False)
        for backend in backends:
            backend.plan(batch)
        for layer in range(3):
            fused = torch.randn(batch.num_tokens, 12 * 16, generator=torch.Generator().manual_seed(start + layer))
            found = []
            for backend in backends:
                q, k, v = (part.clone().unflatten(-1, (-1, 16)) for part in fused.split([128, 32, 32], -1))
                found.append(backend.run(layer, q, k, v, torch.ones(400, 16)))
            torch.testing.assert_close(found[1], found[0])
        assert Wrapper.runs - before == by_library
        backends[1]._most_pages = 10**6 if start == 0 else 3
