"""Prompts by FlashInfer's backend, the library stood in for: which pages, or which rows, its kernels see."""

from __future__ import annotations

import importlib
import sys
import threading
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from baton.common.attention.per_layer_backend import LayerPlace, PerLayerBackend
from baton.common.attention.prefill_decode_backend import PrefillDecodeBackend
from baton.common.attention.torch_backend import TorchBackend
from baton.common.attention.workspace import AttentionWorkspace
from baton.common.forward.forward_batch import Row, build_forward_batch
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


class Ragged:
    """The same of prompts whose keys and values are the step's own rows."""

    runs = 0

    def __init__(self, workspace, layout, **options):
        assert layout == "NHD"

    def plan(self, qo_indptr, kv_indptr, **options):
        assert options["causal"] and torch.equal(qo_indptr, kv_indptr)
        self.bounds = qo_indptr.tolist()

    def run(self, q, k, v, out):
        Ragged.runs += 1
        for begin, end in zip(self.bounds, self.bounds[1:]):
            heads = (part[begin:end].transpose(0, 1)[None] for part in (q, k, v))
            made = scaled_dot_product_attention(*heads, is_causal=True, enable_gqa=True)
            out[begin:end] = made[0].transpose(0, 1)
        return out


@pytest.fixture
def backend_of(monkeypatch):
    if "flashinfer" in sys.modules:
        pytest.skip("FlashInfer itself is here: tests/gpu has this test")
    library = ModuleType("flashinfer")
    for name in ("BatchPrefillWithPagedKVCacheWrapper", "BatchDecodeWithPagedKVCacheWrapper",
                 "CUDAGraphBatchDecodeWithPagedKVCacheWrapper"):
        setattr(library, name, Wrapper)
    library.BatchPrefillWithRaggedKVCacheWrapper = Ragged  # type: ignore[attr-defined]
    name, plain = "baton.common.attention.flashinfer_backend", torch.empty
    monkeypatch.setitem(sys.modules, "flashinfer", library)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.cuda, "Event", lambda: SimpleNamespace(synchronize=lambda: None, record=lambda: None))
    monkeypatch.setattr(torch, "empty", lambda *shape, pin_memory=False, **options: plain(*shape, **options))
    return importlib.import_module(name).FlashInferBackend


def results_of(plans, pages, start: int, count: int, layer: int) -> list[torch.Tensor]:
    """What each backend attends to, by its plan of a chunk of ``count`` tokens of every request."""
    fused = torch.randn(len(pages) * count, 12 * 16, generator=torch.Generator().manual_seed(start + layer))
    angles = torch.randn(400, 16, generator=torch.Generator().manual_seed(7))
    found = []
    for plan in plans:
        q, k, v = (part.clone().unflatten(-1, (-1, 16)) for part in fused.split([128, 32, 32], -1))
        found.append(plan.run(layer, q, k, v, angles))
    return found


def test_whole_prompts_attend_to_their_own_rows(backend_of):
    """And chunks behind a prefix to pages, also where some requests have none."""
    layout = KVLayout((2, 1), num_kv_heads=2, head_dim=16, page_size=16, dtype="float32")
    pools = [KVPool(layout, 60, CPU) for _ in range(2)]
    backends = [TorchBackend(pools[0]), backend_of(pools[1], 8, torch.float32)]
    pages, workspace = np.random.default_rng(0).permutation(60)[:40].reshape(2, 20), AttentionWorkspace(CPU)
    ragged, paged = Ragged.runs, Wrapper.runs
    for starts, count, expected in [((0, 0), 37, (3, 0)), ((37, 37), 20, (3, 3)), ((57, 0), 9, (3, 6))]:
        rows = [Row([0] * count, start, row) for start, row in zip(starts, pages)]
        batch = build_forward_batch(rows, 16, CPU)
        plans = [backend.plan(batch, workspace) for backend in backends]
        for layer in range(3):
            want, got = results_of(plans, pages, starts[0], count, layer)
            torch.testing.assert_close(got, want)
        assert (Ragged.runs - ragged, Wrapper.runs - paged) == expected


def test_float8_pages_are_widened_for_the_library_and_too_many_are_not(backend_of):
    layout = KVLayout((2, 1), num_kv_heads=2, head_dim=16, page_size=16, dtype="float8_e4m3fn", scales=SCALES)
    pools = [KVPool(layout, 60, CPU) for _ in range(2)]
    backends = [TorchBackend(pools[0]), backend_of(pools[1], 8, torch.float32)]
    pages, workspace = np.random.default_rng(0).permutation(60)[:40].reshape(2, 20), AttentionWorkspace(CPU)
    before = Wrapper.runs
    # A batch whose pages are too many is our kernel's.
    for start, count, by_library in [(0, 100, 3), (100, 50, 6), (150, 20, 6)]:
        batch = build_forward_batch([Row([0] * count, start, row) for row in pages], 16, CPU)
        plans = [backend.plan(batch, workspace) for backend in backends]
        for layer in range(3):
            want, got = results_of(plans, pages, start, count, layer)
            torch.testing.assert_close(got, want)
        assert Wrapper.runs - before == by_library
        backends[1]._max_dequantized_pages = 10**6 if start == 0 else 3


class Compiler:
    """FlashInfer's compiler, which ends when it is allowed to."""

    def __init__(self, monkeypatch, compiled: bool = False, error: Exception | None = None):
        self.allowed, self.asked, self.error = threading.Event(), [], error
        jit, prefill = ModuleType("flashinfer.jit"), ModuleType("flashinfer.prefill")
        spec = SimpleNamespace(is_aot=False, is_compiled=compiled)
        jit.gen_batch_prefill_module = lambda *kernels: spec  # type: ignore[attr-defined]
        prefill.get_batch_prefill_module = self.load  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "flashinfer.jit", jit)
        monkeypatch.setitem(sys.modules, "flashinfer.prefill", prefill)

    def load(self, *kernels):
        self.asked.append(kernels)
        assert self.allowed.wait(20)
        if self.error is not None:
            raise self.error

    def end(self) -> None:
        self.allowed.set()
        for thread in threading.enumerate():
            if thread.name == "flashinfer-compiler":
                thread.join(20)


class Prompts:
    """A backend over float8 pages, and which kernels have computed its prompts."""

    def __init__(self, backend_of):
        layout = KVLayout((1,), num_kv_heads=2, head_dim=16, page_size=16, dtype="float8_e4m3fn", scales=SCALES[:1])
        self.backend = backend_of(KVPool(layout, 60, CPU), 8, torch.float32)
        self.workspace = AttentionWorkspace(CPU)

    def by_library(self) -> bool:
        before, pages = Wrapper.runs, np.arange(4)[None]
        plan = self.backend.plan(build_forward_batch([Row([0, 0], 0, row) for row in pages], 16, CPU), self.workspace)
        results_of([plan], pages, 0, 2, 0)
        return Wrapper.runs > before


def test_prompts_are_computed_by_other_kernels_until_the_library_has_compiled_its_own(backend_of, monkeypatch):
    compiler, prompts = Compiler(monkeypatch), Prompts(backend_of)
    prompts.backend.compile_meanwhile()
    counted: list[bool] = []
    prompts.backend.warm_up(lambda: counted.append(prompts.by_library()))
    assert counted == [False] and not prompts.by_library()
    compiler.end()
    assert prompts.by_library()
    assert compiler.asked == [("fa3", torch.float32, torch.float32, torch.float32, torch.int32, 16, 16, 0, False, False,
                               False)]


def test_kernels_of_an_earlier_start_are_used_at_once(backend_of, monkeypatch):
    compiler, prompts = Compiler(monkeypatch, compiled=True), Prompts(backend_of)
    prompts.backend.compile_meanwhile()
    assert prompts.by_library() and not compiler.asked


def test_a_machine_without_a_compiler_keeps_the_other_kernels(backend_of, monkeypatch, caplog):
    compiler = Compiler(monkeypatch, error=RuntimeError("Ninja build failed.\nnvcc: not found"))
    prompts = Prompts(backend_of)
    prompts.backend.compile_meanwhile()
    compiler.end()
    assert not prompts.by_library()
    assert [record.levelname for record in caplog.records] == ["WARNING"] and "nvcc: not found" in caplog.text


def test_a_warm_up_computes_prompts_by_both_kernels(backend_of):
    """No later batch is treated in another way because it is the first."""
    layout = KVLayout((1,), num_kv_heads=2, head_dim=16, page_size=16, dtype="float8_e4m3fn", scales=SCALES[:1])
    backend, pages = backend_of(KVPool(layout, 60, CPU), 8, torch.float32), np.arange(4)[None]
    before, by_library, workspace = Wrapper.runs, [], AttentionWorkspace(CPU)

    def compute_prompt() -> None:
        plan = backend.plan(build_forward_batch([Row([0, 0], 0, row) for row in pages], 16, CPU), workspace)
        results_of([plan], pages, 0, 2, 0)
        by_library.append(Wrapper.runs - before)

    backend.warm_up(compute_prompt)
    assert by_library == [1, 1]
    compute_prompt()
    assert by_library == [1, 1, 2]


def test_backends_of_several_windows_are_all_warmed_up():
    """Each by the kernels of prompts alone."""
    computed = []

    class Backend:
        def __init__(self, name: str):
            self.name = name

        def warm_up(self, compute_prompt) -> None:
            computed.append(self.name)
            compute_prompt()

    both = [PrefillDecodeBackend(Backend(f"prefill {window}"), Backend("decode")) for window in (None, 128)]
    places = [LayerPlace(0, 0), LayerPlace(1, 1), LayerPlace(0, 2)]
    PerLayerBackend(both, [0, 0], places).warm_up(lambda: computed.append("prompt"))
    assert computed == ["prefill None", "prompt", "prefill 128", "prompt"]
