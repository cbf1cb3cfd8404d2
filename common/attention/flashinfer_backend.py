"""Attention by FlashInfer's paged kernels (compiled at first use, about 100 s, then cached on disk)."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from ...kernels.arguments import HeadNorms
from ...kernels.attention.dequantize_pages import dequantize_pages
from ...kernels.attention.scale_by_sinks import scale_by_sinks
from ..api.errors import ConfigError
from ..config.server.kernels import ATTENTION_BACKENDS
from ..forward.forward_batch import ForwardBatch
from ..forward.step_context import AttentionPlan
from ..kvcache.pool import KVPool
from .base import AttentionBackend, AttentionFacts, check_gpu, store
from .triton_backend import TritonBackend

_DTYPES = ("float16", "bfloat16")
_HEAD_DIMS = (64, 128, 256)
_MIN_WINDOW = 1024
"""With a shorter window a prompt's rows see a few tiles, which our kernel shares among the query heads of a KV head;
FlashInfer's would be compiled for windows, a minute at a server's first start."""
_WORKSPACE_BYTES = 256 << 20
_PLAN_BYTES = 8 << 20
"""FlashInfer's own size of the buffer of a plan."""
_DEQUANTIZED_BYTES = 256 << 20
"""The most memory that a layer's keys and values take in the model's type."""
# The plain decode kernel is made for small groups; from 3 query heads a KV head the tensor cores win.
_LARGEST_PLAIN_GROUP = 2


@ATTENTION_BACKENDS.register("flashinfer", needs={"flashinfer": "flashinfer-python"})
class FlashInferBackend:
    """One decode and one prefill wrapper over a shared workspace: a batch is planned once and run by every layer.

    A captured decode step has a wrapper of its own, over the graph's tensors: its plan is made again before each
    replay. Plans of all sizes share one buffer.
    """

    attends_last_tokens = False  # its plan would wait for the last step
    captures = True

    @staticmethod
    def check(facts: AttentionFacts) -> None:
        if facts.dtype not in _DTYPES:
            raise ConfigError(f"--attention-backend flashinfer takes --dtype float16 or bfloat16, not {facts.dtype}.")
        if facts.head_dim not in _HEAD_DIMS:
            raise ConfigError(f"--attention-backend flashinfer takes heads of {_HEAD_DIMS} values, not "
                              f"{facts.head_dim}: use triton.")
        check_gpu("flashinfer", facts.device)

    @staticmethod
    def make(pool: KVPool, num_heads: int, dtype: torch.dtype, window: int | None) -> AttentionBackend:
        if window is not None and window < _MIN_WINDOW:
            return TritonBackend(pool, num_heads, window)
        return FlashInferBackend(pool, num_heads, dtype, window)

    def __init__(self, pool: KVPool, num_heads: int, dtype: torch.dtype, window: int | None = None):
        """``dtype`` is the model's; the pool's may be float8."""
        import flashinfer
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
        self._decode = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, "HND", use_tensor_cores=tensor_cores)
        self._prefill = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, "HND",
                                                                       backend="fa3" if fa3 else "fa2")
        # FA3's kernels take queries and keys of one type: float8 pages of a prompt are dequantized, which costs far
        # less than FA2 loses. Prompts for which that takes too much memory are our kernel's.
        self._dequantizes = fa3 and stored != dtype
        # For whole prompts FA3 is faster on the step's own contiguous keys and values than on pages.
        self._whole: Any = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(
            workspace, "NHD", backend="fa3") if fa3 and stored == dtype else None
        self._pages = torch.empty(0, dtype=torch.int32, device=device)  # of the planned batch
        self._max_dequantized_pages = _DEQUANTIZED_BYTES // (
            2 * layout.num_kv_heads * layout.page_size * layout.head_dim * dtype.itemsize)
        self._long_prompts = TritonBackend(pool, num_heads, window) if self._dequantizes else None
        self._captured: dict[int, Any] = {}  # by batch size
        self._captured_plans: torch.Tensor | None = None
        self._wrapper: Any = None
        self._batch: ForwardBatch | None = None
        self._planned = torch.cuda.Event()

    def plan(self, batch: ForwardBatch, max_length: int | None = None) -> AttentionPlan:
        self._batch = batch
        if max_length is not None:
            self._captured[batch.num_reqs] = self._over_tensors_of(batch)
            self.refresh(batch)
        elif batch.is_decode:
            self._plan(self._decode, batch, self._lengths(batch))
        else:
            self._plan_prompts(batch)
        return self

    def warm_up(self, compute_prompt: Callable[[], None]) -> None:
        compute_prompt()
        if self._long_prompts is not None:
            max_pages, self._max_dequantized_pages = self._max_dequantized_pages, 0  # every prompt is a long one
            try:
                compute_prompt()
            finally:
                self._max_dequantized_pages = max_pages

    def _plan_prompts(self, batch: ForwardBatch) -> None:
        if self._long_prompts is not None and batch.kv_indptr_cpu[-1] > self._max_dequantized_pages:
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
        if wrapper is self._prefill and self._dequantizes:
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
        """The length of each request, with the tokens of this step."""
        full_pages: np.ndarray = np.diff(batch.kv_indptr_cpu) - 1
        lengths: np.ndarray = full_pages * self._pool.layout.page_size + batch.kv_last_page_len_cpu
        return lengths

    def _over_tensors_of(self, batch: ForwardBatch) -> Any:
        """Makes a wrapper that reads the page table of a graph, and plans into the memory that all graphs share."""
        if self._captured_plans is None:
            self._captured_plans = torch.empty(_PLAN_BYTES, dtype=torch.uint8, device=self._workspace.device)
        import flashinfer
        wrapper = flashinfer.CUDAGraphBatchDecodeWithPagedKVCacheWrapper(
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
        pages = store(self._pool, self._batch, layer, q, k, v, cos_sin, norms, rope_keys_in_place=whole)
        kv = (k, v) if whole else pages
        buffer = self._batch.attention_out
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device) if buffer is None else buffer.view(q.shape)
        if sinks is None:
            self._attend(layer, q, kv, {"out": out})
        else:
            lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
            self._attend(layer, q, kv, {"out": out, "lse": lse, "return_lse": True})
            scale_by_sinks(out, lse, sinks)
        return out

    def _attend(self, layer: int, q: torch.Tensor, pages: tuple[torch.Tensor, torch.Tensor],
                into: dict[str, Any]) -> None:
        """Attend to ``pages``: keys and values, for whole prompts those of the step's rows."""
        if self._wrapper is self._whole:
            self._whole.run(q, *pages, **into)
            return
        if self._types["kv_data_type"] == q.dtype:
            self._wrapper.run(q, pages, **into)
            return
        k_scale, v_scale = self._pool.layout.scales_of(layer)
        if self._dequantizes and self._wrapper is self._prefill:
            dequantized = dequantize_pages(*pages, self._pages, q.dtype, k_scale, v_scale)
            self._wrapper.run(q, (dequantized[:, 0], dequantized[:, 1]), **into)
            return
        # A scale of values is a separate kernel after the attention.
        self._wrapper.run(q, pages, k_scale=k_scale, v_scale=None if v_scale == 1.0 else v_scale, **into)

    def run_last_tokens(self, *args: Any) -> torch.Tensor:
        raise AssertionError("this backend does not attend to ends alone")


@lru_cache
def _workspace_of(device: torch.device) -> torch.Tensor:
    """The workspace of all backends on a device: their kernels follow each other on one stream."""
    return torch.empty(_WORKSPACE_BYTES, dtype=torch.uint8, device=device)
