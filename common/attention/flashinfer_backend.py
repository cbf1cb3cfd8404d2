"""Attention by FlashInfer's paged kernels (compiled at first use, about 100 s, then cached on disk)."""

from __future__ import annotations

from typing import Any

import torch
from flashinfer import BatchDecodeWithPagedKVCacheWrapper, BatchPrefillWithPagedKVCacheWrapper

from ..engine.forward_batch import ForwardBatch
from ..kvcache.pool import KVPool
from .base import store

_WORKSPACE_BYTES = 256 << 20
# The plain decode kernel is made for small groups; from 3 query heads a KV head the tensor cores win.
_LARGEST_PLAIN_GROUP = 2


class FlashInferBackend:
    """One decode and one prefill wrapper over a shared workspace: a batch is planned once and run by every layer."""

    def __init__(self, pool: KVPool, num_heads: int, dtype: torch.dtype):
        """``dtype`` is the model's; the pool's may be float8."""
        layout = pool.layout
        device = pool.groups[0].device
        self._pool = pool
        self._heads = {"num_qo_heads": num_heads, "num_kv_heads": layout.num_kv_heads}
        stored = pool.groups[0].dtype
        self._types = {"q_data_type": dtype, "kv_data_type": stored}
        workspace = torch.empty(_WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        tensor_cores = num_heads // layout.num_kv_heads > _LARGEST_PLAIN_GROUP
        # FA3's kernels take queries and keys of one type.
        fa3 = torch.cuda.get_device_capability(device) == (9, 0) and stored == dtype
        self._decode = BatchDecodeWithPagedKVCacheWrapper(workspace, "HND", use_tensor_cores=tensor_cores)
        self._prefill = BatchPrefillWithPagedKVCacheWrapper(workspace, "HND", backend="fa3" if fa3 else "fa2")
        self._wrapper: Any = None
        self._batch: ForwardBatch | None = None
        self._planned = torch.cuda.Event()

    def plan(self, batch: ForwardBatch, max_length: int | None = None) -> None:
        assert max_length is None, "this backend's plans hold the page table, and cannot be captured"
        # A plan is copied to the device from the wrapper's pinned buffer: written again before that copy has run, as
        # when chunks without logits are enqueued back to back, it would change the batch still in flight.
        self._planned.synchronize()
        layout = self._pool.layout
        table = (torch.from_numpy(batch.kv_indptr_cpu), batch.kv_indices,
                 torch.from_numpy(batch.kv_last_page_len_cpu))
        self._batch = batch
        if batch.is_decode:
            self._wrapper = self._decode
            self._decode.plan(*table, head_dim=layout.head_dim, page_size=layout.page_size, **self._heads,
                              **self._types)
        else:
            self._wrapper = self._prefill
            self._prefill.plan(torch.from_numpy(batch.qo_indptr_cpu), *table, head_dim_qk=layout.head_dim,
                               page_size=layout.page_size, causal=True, **self._heads, **self._types)
        self._planned.record()

    def run(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
            cos_sin: torch.Tensor | None = None) -> torch.Tensor:
        assert self._batch is not None
        pages = store(self._pool, self._batch, layer, q, k, v, cos_sin)
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        if self._types["kv_data_type"] == q.dtype:
            return self._wrapper.run(q, pages, out=out)
        k_scale, v_scale = self._pool.layout.scales_of(layer)
        return self._wrapper.run(q, pages, k_scale=k_scale, v_scale=v_scale, out=out)
