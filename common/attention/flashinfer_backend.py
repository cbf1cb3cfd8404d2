"""Attention by FlashInfer's paged kernels (compiled at first use, about 100 s, then cached on disk)."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
import torch
from flashinfer import (
    BatchDecodeWithPagedKVCacheWrapper,
    BatchPrefillWithPagedKVCacheWrapper,
    BatchPrefillWithRaggedKVCacheWrapper,
    CUDAGraphBatchDecodeWithPagedKVCacheWrapper,
)

from ...kernels.arguments import HeadNorms
from ...kernels.attention.dequantize_pages import widen_pages
from ...kernels.attention.scale_by_sinks import scale_by_sinks
from ..forward.forward_batch import ForwardBatch
from ..kvcache.pool import KVPool
from .base import store
from .triton_backend import TritonBackend

_WORKSPACE_BYTES = 256 << 20
_PLAN_BYTES = 8 << 20  # FlashInfer's own size for what a plan holds
_WIDE_BYTES = 256 << 20  # of a layer's keys and values in the model's type
# The plain decode kernel is made for small groups; from 3 query heads a KV head the tensor cores win.
_LARGEST_PLAIN_GROUP = 2


class FlashInferBackend:
    """One decode and one prefill wrapper over a shared workspace: a batch is planned once and run by every layer.

    A captured decode step has a wrapper of its own, over the graph's tensors: its plan is made anew before each replay.
    Plans of all sizes take turns in one piece of memory.
    """

    attends_ends = False  # its plan would wait for the step before

    def __init__(self, pool: KVPool, num_heads: int, dtype: torch.dtype, window: int | None = None):
        """``dtype`` is the model's; the pool's may be float8."""
        layout = pool.layout
        device = pool.groups[0].device
        self._pool = pool
        # FlashInfer counts the tokens before a query's own.
        self._heads = {"num_qo_heads": num_heads, "num_kv_heads": layout.num_kv_heads,
                       "window_left": -1 if window is None else window - 1}
        stored = pool.groups[0].dtype
        self._types = {"q_data_type": dtype, "kv_data_type": stored}
        workspace = self._workspace = _workspace_of(device)
        tensor_cores = self._tensor_cores = num_heads // layout.num_kv_heads > _LARGEST_PLAIN_GROUP
        fa3 = torch.cuda.get_device_capability(device) == (9, 0)
        self._decode = BatchDecodeWithPagedKVCacheWrapper(workspace, "HND", use_tensor_cores=tensor_cores)
        self._prefill = BatchPrefillWithPagedKVCacheWrapper(workspace, "HND", backend="fa3" if fa3 else "fa2")
        # FA3's kernels take queries and keys of one type: float8 pages of a prompt are brought to it, which costs far
        # less than FA2 loses. Prompts for which that takes too much room are our kernel's.
        self._widens = fa3 and stored != dtype
        # Of whole prompts FA3 had rather have the step's own keys and values, by tiles, than find tokens by pages.
        self._whole: Any = BatchPrefillWithRaggedKVCacheWrapper(
            workspace, "NHD", backend="fa3") if fa3 and stored == dtype else None
        self._pages = torch.empty(0, dtype=torch.int32, device=device)  # of the planned batch
        self._most_pages = _WIDE_BYTES // (
            2 * layout.num_kv_heads * layout.page_size * layout.head_dim * dtype.itemsize)
        self._long_prompts = TritonBackend(pool, num_heads, window) if self._widens else None
        self._warmed = False
        self._captured: dict[int, Any] = {}  # by batch size
        self._captured_plans: torch.Tensor | None = None
        self._wrapper: Any = None
        self._batch: ForwardBatch | None = None
        self._planned = torch.cuda.Event()

    def plan(self, batch: ForwardBatch, max_length: int | None = None) -> None:
        self._batch = batch
        if max_length is not None:
            self._captured[batch.num_reqs] = self._over_tensors_of(batch)
            self.refresh(batch)
        elif batch.is_decode:
            self._plan(self._decode, batch, self._lengths(batch))
        else:
            self._plan_prompts(batch)

    def _plan_prompts(self, batch: ForwardBatch) -> None:
        # The first batch is a server's warm-up, and the second: both ways are compiled.
        ours = not self._warmed or batch.kv_indptr_cpu[-1] > self._most_pages
        self._warmed = True
        if self._long_prompts is not None and ours:
            self._wrapper = None
            self._long_prompts.plan(batch)
        else:
            lengths = self._lengths(batch)
            whole = self._whole is not None and np.array_equal(np.diff(batch.qo_indptr_cpu), lengths)
            self._plan(self._whole if whole else self._prefill, batch, lengths)

    def refresh(self, batch: ForwardBatch) -> None:
        self._plan(self._captured[batch.num_reqs], batch, self._lengths(batch))

    def _plan(self, wrapper: Any, batch: ForwardBatch, of_requests: np.ndarray) -> None:
        """``of_requests`` are the batch's ``_lengths``."""
        # A plan is copied to the device from the wrapper's pinned buffer: written again before that copy has run, as
        # when chunks without logits are enqueued back to back, it would change the batch still in flight.
        self._planned.synchronize()
        layout = self._pool.layout
        self._wrapper = wrapper
        qo_indptr, kv_indptr, last_page_len, lengths = self._host_copies(batch, of_requests)
        pages = self._pages = batch.kv_indices[:int(batch.kv_indptr_cpu[-1])]
        types = self._types
        if wrapper is self._prefill and self._widens:
            pages = torch.arange(len(pages), dtype=torch.int32, device=pages.device)
            types = types | {"kv_data_type": types["q_data_type"]}
        table = (kv_indptr, pages, last_page_len)
        if wrapper is self._whole:
            wrapper.plan(qo_indptr, qo_indptr, head_dim_qk=layout.head_dim, causal=True, **self._heads, **types)
        elif wrapper is self._prefill:
            wrapper.plan(qo_indptr, *table, head_dim_qk=layout.head_dim, page_size=layout.page_size, causal=True,
                         max_token_per_sequence=int(np.diff(batch.qo_indptr_cpu).max()), seq_lens=lengths,
                         **self._heads, **types)
        else:
            wrapper.plan(*table, head_dim=layout.head_dim, page_size=layout.page_size, **self._heads, **types)
        self._planned.record()

    @staticmethod
    def _host_copies(batch: ForwardBatch, lengths: np.ndarray) -> list[torch.Tensor]:
        """``qo_indptr``, ``kv_indptr``, ``kv_last_page_len`` and the lengths of the sequences, int32 in pinned memory:
        a plan copies them to the device, and from pageable memory a copy may wait for what runs there."""
        arrays = (batch.qo_indptr_cpu, batch.kv_indptr_cpu, batch.kv_last_page_len_cpu, lengths)
        packed = torch.empty(sum(map(len, arrays)), dtype=torch.int32, pin_memory=True)
        np.concatenate(arrays, out=packed.numpy(), casting="same_kind")
        return list(packed.split([len(array) for array in arrays]))

    def _lengths(self, batch: ForwardBatch) -> np.ndarray:
        """Of each request, with what is computed in this step."""
        full_pages: np.ndarray = np.diff(batch.kv_indptr_cpu) - 1
        lengths: np.ndarray = full_pages * self._pool.layout.page_size + batch.kv_last_page_len_cpu
        return lengths

    def _over_tensors_of(self, batch: ForwardBatch) -> Any:
        """A wrapper that reads the page table where a graph finds it, and plans into the memory all graphs share."""
        if self._captured_plans is None:
            self._captured_plans = torch.empty(_PLAN_BYTES, dtype=torch.uint8, device=self._workspace.device)
        wrapper = CUDAGraphBatchDecodeWithPagedKVCacheWrapper(
            self._workspace, batch.kv_indptr, batch.kv_indices, batch.kv_last_page_len, "HND",
            use_tensor_cores=self._tensor_cores)
        wrapper.reset_workspace_buffer(self._workspace, self._captured_plans)
        return wrapper

    def run(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cos_sin: torch.Tensor | None = None,
            norms: HeadNorms | None = None, sinks: torch.Tensor | None = None) -> torch.Tensor:
        assert self._batch is not None
        if self._wrapper is None and self._long_prompts is not None:
            return self._long_prompts.run(layer, q, k, v, cos_sin, norms, sinks)
        whole = self._wrapper is self._whole
        pages = store(self._pool, self._batch, layer, q, k, v, cos_sin, norms, turn_keys=whole)
        held = (k, v) if whole else pages
        given = self._batch.heads
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device) if given is None else given.view(q.shape)
        if sinks is None:
            self._attend(layer, q, held, {"out": out})
        else:
            lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
            self._attend(layer, q, held, {"out": out, "lse": lse, "return_lse": True})
            scale_by_sinks(out, lse, sinks)
        return out

    def _attend(self, layer: int, q: torch.Tensor, pages: tuple[torch.Tensor, torch.Tensor],
                into: dict[str, Any]) -> None:
        """``pages``: keys and values, of whole prompts those of the step's rows."""
        if self._wrapper is self._whole:
            self._whole.run(q, *pages, **into)
            return
        if self._types["kv_data_type"] == q.dtype:
            self._wrapper.run(q, pages, **into)
            return
        k_scale, v_scale = self._pool.layout.scales_of(layer)
        if self._widens and self._wrapper is self._prefill:
            wide = widen_pages(*pages, self._pages, q.dtype, k_scale, v_scale)
            self._wrapper.run(q, (wide[:, 0], wide[:, 1]), **into)
            return
        # A scale of values is a kernel of its own behind the attention.
        self._wrapper.run(q, pages, k_scale=k_scale, v_scale=None if v_scale == 1.0 else v_scale, **into)

    def run_ends(self, *args: Any) -> torch.Tensor:
        raise AssertionError("this backend does not attend to ends alone")


@lru_cache
def _workspace_of(device: torch.device) -> torch.Tensor:
    """What kernels of one device leave each other in: they follow each other on one stream, of whatever backend."""
    return torch.empty(_WORKSPACE_BYTES, dtype=torch.uint8, device=device)
