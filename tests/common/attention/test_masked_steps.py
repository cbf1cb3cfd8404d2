"""Steps whose rows are trees of drafts: each row attends as a decode row does whose context is its own path."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from baton.common.attention.mla.torch_backend import MLATorchBackend
from baton.common.attention.per_layer_backend import LayerPlace, PerLayerBackend
from baton.common.attention.prefill_decode_backend import PrefillDecodeBackend
from baton.common.attention.torch_backend import TorchBackend
from baton.common.attention.workspace import AttentionWorkspace
from baton.common.config.mla import MLASpec
from baton.common.forward.forward_batch import Row, build_forward_batch
from baton.common.kvcache.layout import KVLayout
from baton.common.kvcache.pool import KVPool
from baton.tests.helpers.masked_steps import batch_of, random_tree, tree_columns

CPU = torch.device("cpu")
PREFIXES, SIZES = (0, 9, 40), (1, 6, 11)


def steps(page_size: int, seed: int):
    generator = np.random.default_rng(seed)
    trees = [random_tree(size, generator) for size in SIZES]
    pages = generator.permutation(180).reshape(3, 60)[:, :-(-51 // page_size)]
    return trees, pages


def path_of(tree: list[int], node: int) -> list[int]:
    path = [node]
    while tree[path[0]] >= 0:
        path.insert(0, tree[path[0]])
    return path


def alone(make, page_size: int, pages: np.ndarray, prefix: int, tree: list[int], fill, run) -> list[torch.Tensor]:
    """Each node's row, computed as the last of a chain: its path. ``fill(prefix tokens)`` and ``run(batch, nodes)``
    compute the prefix and rows."""
    found = []
    for node in range(len(tree)):
        backend = make()
        path = path_of(tree, node)
        if prefix:
            fill(backend, build_forward_batch([Row([0] * prefix, 0, pages)], page_size, CPU))
        found.append(run(backend, build_forward_batch([Row([0] * len(path), prefix, pages)], page_size, CPU), path)[-1])
    return found


@pytest.mark.parametrize("dtype", ["float32", "float8_e4m3fn"])
@pytest.mark.parametrize("page_size,window,sinks", [(1, None, False), (4, 7, True), (16, 20, False), (4, None, True)])
def test_rows_attend_to_their_paths(page_size, window, sinks, dtype):
    trees, pages = steps(page_size, page_size)
    layout = KVLayout((2,), 2, 8, page_size, dtype, scales=((0.5, 0.25), (2.0, 1.0)) if "8" in dtype else ())
    generator = torch.Generator().manual_seed(1)
    given = torch.randn(4, generator=generator) if sinks else None
    table = torch.randn(80, 8, generator=generator)
    filled = torch.randn(3, 40, 8, 8, generator=generator)
    values = torch.randn(sum(SIZES), 8, 8, generator=generator)

    def make():
        return TorchBackend(KVPool(layout, 180, CPU), window)

    def run(backend, batch, rows):
        q, k, v = rows.clone().split([4, 2, 2], 1)
        return backend.plan(batch, AttentionWorkspace(CPU)).run(1, q.contiguous(), k, v, table, sinks=given)

    together = make()
    for b, prefix in enumerate(PREFIXES):
        if prefix:
            run(together, build_forward_batch([Row([0] * prefix, 0, pages[b])], page_size, CPU), filled[b, :prefix])
    got = run(together, batch_of(tree_columns(PREFIXES, trees, pages, page_size), CPU), values)
    first = 0
    for b, (prefix, tree) in enumerate(zip(PREFIXES, trees)):
        own = values[first:first + len(tree)]
        want = alone(make, page_size, pages[b], prefix, tree,
                     lambda backend, batch, b=b: run(backend, batch, filled[b, :batch.num_tokens]),
                     lambda backend, batch, path, own=own: run(backend, batch, own[path]))
        torch.testing.assert_close(got[first:first + len(tree)], torch.stack(want), atol=1e-5, rtol=1e-5)
        first += len(tree)


def test_latents_of_paths():
    mla = MLASpec(kv_lora_rank=12, nope_dim=6, rope_dim=4, v_dim=5, q_lora_rank=None, interleaved=False, scale=0.3)
    trees, pages = steps(4, 3)
    layout = KVLayout((1,), 1, 16, 4, "float32", form="latent")
    generator = torch.Generator().manual_seed(1)
    table, up = torch.randn(80, 4, generator=generator), torch.randn(3, 11, 12, generator=generator)
    filled, values = torch.randn(3, 40, 46, generator=generator), torch.randn(sum(SIZES), 46, generator=generator)

    def make():
        return MLATorchBackend(KVPool(layout, 180, CPU), mla)

    def run(backend, batch, rows):
        q, latent, rope = rows.clone().split([30, 12, 4], 1)
        return backend.plan(batch, AttentionWorkspace(CPU)).run(0, q.unflatten(1, (3, 10)), latent, rope, up, table)

    together = make()
    for b, prefix in enumerate(PREFIXES):
        if prefix:
            run(together, build_forward_batch([Row([0] * prefix, 0, pages[b])], 4, CPU), filled[b, :prefix])
    got = run(together, batch_of(tree_columns(PREFIXES, trees, pages, 4), CPU), values)
    first = 0
    for b, (prefix, tree) in enumerate(zip(PREFIXES, trees)):
        own = values[first:first + len(tree)]
        want = alone(make, 4, pages[b], prefix, tree,
                     lambda backend, batch, b=b: run(backend, batch, filled[b, :batch.num_tokens]),
                     lambda backend, batch, path, own=own: run(backend, batch, own[path]))
        torch.testing.assert_close(got[first:first + len(tree)], torch.stack(want), atol=1e-5, rtol=1e-5)
        first += len(tree)


def test_the_decode_backend_computes_what_it_has_kernels_for():
    """Of two backends, and of one for each layer."""
    def backend(verifies: bool):
        return SimpleNamespace(verifies=lambda batch: verifies, plan=lambda *args, **options: verifies)

    batch = batch_of(tree_columns((3,), [[-1, 0]], [np.arange(4)], 4), CPU)
    assert not batch.is_decode and batch.verifies
    for kernels in (False, True):
        both = PrefillDecodeBackend(backend(False), backend(kernels))  # type: ignore[arg-type]
        assert both.verifies(batch) is kernels
        layers = PerLayerBackend([both, backend(True)], [0, 0], [LayerPlace(0, 0)])  # type: ignore[list-item]
        assert layers.verifies(batch) is kernels
    assert both.plan(batch, AttentionWorkspace(CPU)) is True
