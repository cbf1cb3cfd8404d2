"""Attention by Baton's own Triton kernels."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from ...kernels._triton import INTERPRETED
from ...kernels.arguments import HeadNorms
from ...kernels.attention.current_kv import CurrentKV
from ...kernels.attention.decode_plan import DecodePlan, plan_decode
from ...kernels.attention.paged_decode import paged_decode
from ...kernels.attention.paged_prefill import PrefillBlocks, paged_prefill, plan_prefill
from ...kernels.device import num_sms
from ...kernels.tuning.policy import policy_of
from ..config.server.kernels import ATTENTION_BACKENDS
from ..forward.forward_batch import ForwardBatch
from ..forward.step_context import AttentionPlan
from ..kvcache.pool import KVPool
from .base import ANY_LENGTH, AttentionBackend, AttentionFacts, check_gpu, store


@ATTENTION_BACKENDS.register("triton", needs={"triton": "triton"})
class TritonBackend:
    attends_last_tokens = True
    captures = True

    @staticmethod
    def check(facts: AttentionFacts) -> None:
        if not INTERPRETED:
            check_gpu("triton", facts.device)

    @staticmethod
    def make(pool: KVPool, num_heads: int, dtype: torch.dtype, window: int | None) -> AttentionBackend:
        return TritonBackend(pool, num_heads, window)

    def __init__(self, pool: KVPool, num_heads: int, window: int | None = None):
        self._pool = pool
        self._window = window
        self._group = num_heads // pool.layout.num_kv_heads
        self._scale = pool.layout.head_dim ** -0.5
        device = pool.groups[0].device
        self._num_sms = num_sms(device)
        self._policy = policy_of(device).attention
        self._batch: ForwardBatch | None = None
        self._longest = 0
        self._plan: DecodePlan | None = None
        self._blocks: PrefillBlocks | None = None

    def plan(self, batch: ForwardBatch, max_length: int | None = None) -> AttentionPlan:
        self._batch = batch
        if batch.is_decode:
            # The first layer makes it, so that a graph that captures the layers holds it, and makes it in every replay.
            self._plan = None
            self._longest = max_length or int(np.diff(batch.kv_indptr_cpu).max()) * self._pool.layout.page_size
        else:
            self._blocks = plan_prefill(batch.qo_indptr_cpu, self._group, batch.input_ids.device)
        return self

    def warm_up(self, compute_prompt: Callable[[], None]) -> None:
        compute_prompt()

    def refresh(self, batch: ForwardBatch) -> None:
        """Does nothing: the plan is made on the device."""

    def run(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cos_sin: torch.Tensor | None = None,
            norms: HeadNorms | None = None, sinks: torch.Tensor | None = None) -> torch.Tensor:
        batch = self._batch
        assert batch is not None
        # The first layer's attention follows a plan, and starts when all before it has ended: see kernels/_triton.py.
        inputs_ready = batch.is_decode and self._plan is not None
        if batch.is_decode and cos_sin is not None and self._stores_current_kv(q):
            return self._attend(layer, q, sinks, inputs_ready, CurrentKV(k, v, cos_sin, batch.positions, norms))
        store(self._pool, batch, layer, q, k, v, cos_sin, norms, inputs_ready)
        return self._attend(layer, q, sinks, inputs_ready)

    def run_last_tokens(self, batch: ForwardBatch, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
                        cos_sin: torch.Tensor | None = None, norms: HeadNorms | None = None,
                        sinks: torch.Tensor | None = None) -> torch.Tensor:
        assert batch.last_tokens is not None
        store(self._pool, batch, layer, q, k, v, cos_sin, norms)
        if not batch.last_tokens.num_reqs:
            return q[:0]
        self.plan(batch.last_tokens, ANY_LENGTH)
        return self._attend(layer, q[batch.logits_rows], sinks)

    def _stores_current_kv(self, q: torch.Tensor) -> bool:
        """Says whether attention is to apply rope and store the step's rows, too."""
        pages = self._pool.groups[0]
        heads = len(q) * self._pool.layout.num_kv_heads
        return pages.dtype == q.dtype and self._policy.stores_current_kv(q.shape[-1], q.element_size(),
                                                                         pages.element_size(), heads)

    def _attend(self, layer: int, q: torch.Tensor, sinks: torch.Tensor | None, inputs_ready: bool = False,
                current_kv: CurrentKV | None = None) -> torch.Tensor:
        batch = self._batch
        assert batch is not None
        k_pages, v_pages = self._pool.layer(layer)
        table = (batch.kv_indptr, batch.kv_indices, batch.kv_last_page_len)
        k_scale, v_scale = self._pool.layout.scales_of(layer)
        if batch.is_decode:
            if self._plan is None:
                kv_heads = self._pool.layout.num_kv_heads
                splits = self._policy.decode_splits(q.shape[-1], q.element_size(), k_pages.element_size(),
                                                    len(q) * kv_heads)
                self._plan = plan_decode(batch.kv_indptr, batch.kv_last_page_len, self._pool.layout.page_size, kv_heads,
                                         self._num_sms, self._longest, **splits._asdict(), window=self._window)
            return paged_decode(q, k_pages, v_pages, *table, self._scale * k_scale, self._plan, v_scale=v_scale,
                                inputs_ready=inputs_ready, window=self._window, sinks=sinks, current_kv=current_kv)
        assert self._blocks is not None
        return paged_prefill(q, k_pages, v_pages, self._blocks, batch.qo_indptr, *table, self._scale * k_scale, v_scale,
                             self._window, sinks)
