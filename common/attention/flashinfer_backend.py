"""Attention by FlashInfer's paged kernels, which are compiled once a machine: see prompt_kernels.py."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ...kernels.arguments import HeadNorms
from ...kernels.attention.dequantize_pages import dequantize_pages
from ...kernels.attention.scale_by_sinks import scale_by_sinks
from ..api.errors import ConfigError
from ..config.scores import PLAIN_SCORES, Scores
from ..config.server.kernels import ATTENTION_BACKENDS
from ..forward.forward_batch import ForwardBatch
from ..forward.step_context import AttentionPlan
from ..kvcache.pool import KVPool
from .base import AttentionBackend, AttentionFacts, check_gpu, store
from .prompt_kernels import PromptKernels, flashinfer_prompts
from .triton_backend import TritonBackend
from .workspace import AttentionWorkspace

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


@ATTENTION_BACKENDS.register("flashinfer", needs={"flashinfer": "flashinfer-python"}, traits=("gpu",))
class FlashInferBackend:
    """Plans by the library's wrappers, which a workspace has: a batch is planned once and run by every layer. A
    wrapper keeps its last plan only.

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
    def make(pool: KVPool, num_heads: int, dtype: torch.dtype, window: int | None,
             scores: Scores) -> AttentionBackend:
        if window is not None and window < _MIN_WINDOW:
            return TritonBackend(pool, num_heads, window, scores)
        return FlashInferBackend(pool, num_heads, dtype, window, scores)

    def __init__(self, pool: KVPool, num_heads: int, dtype: torch.dtype, window: int | None = None,
                 scores: Scores = PLAIN_SCORES):
        """``dtype`` is the model's; the pool's may be float8."""
        layout = pool.layout
        self.pool = pool
        # FlashInfer counts the tokens before a query's own.
        self._heads: dict[str, float] = {"num_qo_heads": num_heads, "num_kv_heads": layout.num_kv_heads,
                       "window_left": -1 if window is None else window - 1}
        # Passed only where a model has them, so that other models' calls stay as they were measured.
        if scores.scale is not None:
            self._heads["sm_scale"] = scores.scale
        if scores.softcap:
            self._heads["logits_soft_cap"] = scores.softcap
        stored = pool.groups[0].dtype
        self.stores_other_type = stored != dtype
        self._types = {"q_data_type": dtype, "kv_data_type": stored}
        self._tensor_cores = num_heads // layout.num_kv_heads > _LARGEST_PLAIN_GROUP
        self._fa3 = torch.cuda.get_device_capability(pool.groups[0].device) == (9, 0)
        # FA3's kernels take queries and keys of one type: float8 pages of a prompt are dequantized, which costs far
        # less than FA2 loses. Prompts for which that takes too much memory are our kernel's, and so are drafts.
        self.dequantizes = self._fa3 and self.stores_other_type
        self._max_dequantized_pages = _DEQUANTIZED_BYTES // (
            2 * layout.num_kv_heads * layout.page_size * layout.head_dim * dtype.itemsize)
        self._triton = TritonBackend(pool, num_heads, window, scores)
        self._prompts: PromptKernels | None = None

    def compile_meanwhile(self) -> None:
        self._prompts = flashinfer_prompts(self._fa3, self._prompt_types, self.pool.layout.head_dim,
                                           window=self._heads["window_left"] >= 0,
                                           softcap=bool(self._heads.get("logits_soft_cap")))

    @property
    def _prompt_types(self) -> dict[str, torch.dtype]:
        """Types of a prompt's queries and pages as attention reads them."""
        return self._types | {"kv_data_type": self._types["q_data_type"]} if self.dequantizes else self._types

    @property
    def _compiling(self) -> bool:
        return self._prompts is not None and not self._prompts.ready

    def _wrappers(self, workspace: AttentionWorkspace) -> _Wrappers:
        """Makes the wrappers of a workspace."""
        import flashinfer
        scratch = workspace.scratch(_WORKSPACE_BYTES)
        decode = flashinfer.BatchDecodeWithPagedKVCacheWrapper(scratch, "HND", use_tensor_cores=self._tensor_cores)
        prefill = flashinfer.BatchPrefillWithPagedKVCacheWrapper(scratch, "HND", backend="fa3" if self._fa3 else "fa2")
        # For whole prompts FA3 is faster on the step's own contiguous keys and values than on pages.
        whole = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(
            scratch, "NHD", backend="fa3") if self._fa3 and not self.stores_other_type else None
        return _Wrappers(scratch, decode, prefill, whole, torch.cuda.Event())

    def plan(self, batch: ForwardBatch, workspace: AttentionWorkspace, *, max_length: int | None = None,
             out: torch.Tensor | None = None) -> AttentionPlan:
        if self._compiling:  # takes the memory now that prompts need later
            workspace.of(self, lambda: self._wrappers(workspace))
        if self.verifies(batch) or (not batch.is_decode and (self._compiling or (
                self.dequantizes and batch.kv_indptr_cpu[-1] > self._max_dequantized_pages))):
            plan = self._triton.plan(batch, workspace, max_length=max_length)
            return dataclasses.replace(plan, attends_last_tokens=False)
        wrappers = workspace.of(self, lambda: self._wrappers(workspace))
        lengths = self._lengths(batch)
        if max_length is not None:
            wrapper = self._over_tensors_of(batch, wrappers)
        elif batch.is_decode:
            wrapper = wrappers.decode
        elif wrappers.whole is not None and np.array_equal(np.diff(batch.qo_indptr_cpu), lengths):
            wrapper = wrappers.whole
        else:
            wrapper = wrappers.prefill
        made = FlashInferPlan(self, batch, wrappers, wrapper, out)
        made.pages = self.fill(made, batch, lengths)
        return made

    def verifies(self, batch: ForwardBatch) -> bool:
        return self._triton.verifies(batch)

    def warm_up(self, compute_prompt: Callable[[], None]) -> None:
        compute_prompt()
        if self.dequantizes and not self._compiling:
            max_pages, self._max_dequantized_pages = self._max_dequantized_pages, 0  # every prompt is a long one
            try:
                compute_prompt()
            finally:
                self._max_dequantized_pages = max_pages

    def fill(self, plan: FlashInferPlan, batch: ForwardBatch, of_requests: np.ndarray | None = None) -> torch.Tensor:
        """Plans ``batch`` by the plan's wrapper; returns its pages. ``of_requests`` are its ``_lengths``."""
        # A plan is copied to the device from the wrapper's pinned buffer: written again before that copy has run, as
        # when chunks without logits are enqueued back to back, it would change the batch still in flight.
        planned, wrapper = plan.wrappers.planned, plan.wrapper
        planned.synchronize()
        layout = self.pool.layout
        of_requests = self._lengths(batch) if of_requests is None else of_requests
        qo_indptr, kv_indptr, last_page_len, lengths = self._host_copies(batch, of_requests)
        pages = read = batch.kv_indices[:int(batch.kv_indptr_cpu[-1])]
        types = self._types
        if plan.is_paged_prefill and self.dequantizes:
            read = torch.arange(len(pages), dtype=torch.int32, device=pages.device)
            types = self._prompt_types
        table = (kv_indptr, read, last_page_len)
        if plan.is_whole:
            wrapper.plan(qo_indptr, qo_indptr, head_dim_qk=layout.head_dim, causal=True, **self._heads, **types)
        elif plan.is_paged_prefill:
            wrapper.plan(qo_indptr, *table, head_dim_qk=layout.head_dim, page_size=layout.page_size, causal=True,
                         max_token_per_sequence=int(np.diff(batch.qo_indptr_cpu).max()), seq_lens=lengths,
                         **self._heads, **types)
        else:
            wrapper.plan(*table, head_dim=layout.head_dim, page_size=layout.page_size, **self._heads, **types)
        planned.record()
        return pages

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
        lengths: np.ndarray = full_pages * self.pool.layout.page_size + batch.kv_last_page_len_cpu
        return lengths

    def _over_tensors_of(self, batch: ForwardBatch, wrappers: _Wrappers) -> Any:
        """Makes a wrapper that reads the page table of a graph, and plans into the memory that all graphs share."""
        scratch = wrappers.scratch
        if wrappers.captured_plans is None:
            wrappers.captured_plans = torch.empty(_PLAN_BYTES, dtype=torch.uint8, device=scratch.device)
        import flashinfer
        wrapper = flashinfer.CUDAGraphBatchDecodeWithPagedKVCacheWrapper(
            scratch, batch.kv_indptr, batch.kv_indices, batch.kv_last_page_len, "HND",
            use_tensor_cores=self._tensor_cores)
        wrapper.reset_workspace_buffer(scratch, wrappers.captured_plans)
        return wrapper

    def run_last_tokens(self, *args: Any) -> torch.Tensor:
        raise AssertionError("this backend does not attend to ends alone")


@dataclass(eq=False)
class _Wrappers:
    """The library's wrappers in one workspace. ``planned`` is recorded once their plan is enqueued."""

    scratch: torch.Tensor
    decode: Any
    prefill: Any
    whole: Any  # None: prompts are computed by ``prefill``
    planned: torch.cuda.Event
    captured_plans: torch.Tensor | None = None


class FlashInferPlan:
    """A batch that ``wrapper`` has planned; ``pages`` are its own."""

    attends_last_tokens = False  # its plan would wait for the last step

    def __init__(self, backend: FlashInferBackend, batch: ForwardBatch, wrappers: _Wrappers, wrapper: Any,
                 out: torch.Tensor | None):
        self.wrappers = wrappers
        self.wrapper = wrapper
        self.is_whole = wrapper is wrappers.whole
        self.is_paged_prefill = wrapper is wrappers.prefill
        self.pages = batch.kv_indices
        self._backend = backend
        self._batch = batch
        self._out = out

    def refresh(self, batch: ForwardBatch) -> None:
        self._backend.fill(self, batch)

    def run(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cos_sin: torch.Tensor | None = None,
            norms: HeadNorms | None = None, sinks: torch.Tensor | None = None) -> torch.Tensor:
        whole, out = self.is_whole, self._out
        pages = store(self._backend.pool, self._batch, layer, q, k, v, cos_sin, norms, rope_keys_in_place=whole)
        kv = (k, v) if whole else pages
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device) if out is None else out.view(q.shape)
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
        backend = self._backend
        if self.is_whole:
            self.wrapper.run(q, *pages, **into)
            return
        if not backend.stores_other_type:
            self.wrapper.run(q, pages, **into)
            return
        k_scale, v_scale = backend.pool.layout.scales_of(layer)
        if backend.dequantizes and self.is_paged_prefill:
            dequantized = dequantize_pages(*pages, self.pages, q.dtype, k_scale, v_scale)
            self.wrapper.run(q, (dequantized[:, 0], dequantized[:, 1]), **into)
            return
        # A scale of values is a separate kernel after the attention.
        self.wrapper.run(q, pages, k_scale=k_scale, v_scale=None if v_scale == 1.0 else v_scale, **into)

    def run_last_tokens(self, *args: Any) -> torch.Tensor:
        raise AssertionError("this backend does not attend to ends alone")
