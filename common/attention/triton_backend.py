"""Attention by Baton's own Triton kernels."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ...kernels._triton import INTERPRETED
from ...kernels.arguments import HeadNorms
from ...kernels.attention.current_kv import CurrentKV
from ...kernels.attention.decode_plan import DecodePlan, plan_decode
from ...kernels.attention.paged_decode import paged_decode
from ...kernels.attention.paged_prefill import PrefillBlocks, paged_prefill, plan_prefill
from ...kernels.attention.verify_attention import VerifyPlan, plan_verify, verify_attention, verify_tile
from ...kernels.device import num_sms
from ...kernels.tuning.policy import policy_of
from ..config.scores import PLAIN_SCORES, Scores
from ..config.server.kernels import ATTENTION_BACKENDS
from ..forward.forward_batch import ForwardBatch
from ..kvcache.pool import KVPool
from .base import ANY_LENGTH, AttentionBackend, AttentionFacts, check_gpu, store
from .invariant_triton_backend import InvariantTritonBackend
from .workspace import AttentionWorkspace


@ATTENTION_BACKENDS.register("triton", needs={"triton": "triton"}, traits=("gpu",))
class TritonBackend:
    attends_last_tokens = True
    captures = True

    @staticmethod
    def check(facts: AttentionFacts) -> None:
        if not INTERPRETED:
            check_gpu("triton", facts.device)

    @staticmethod
    def make(pool: KVPool, num_heads: int, dtype: torch.dtype, window: int | None,
             scores: Scores) -> AttentionBackend:
        if policy_of(pool.groups[0].device).batch_invariant:
            return InvariantTritonBackend(pool, num_heads, dtype, window, scores)
        return TritonBackend(pool, num_heads, window, scores)

    def __init__(self, pool: KVPool, num_heads: int, window: int | None = None, scores: Scores = PLAIN_SCORES):
        self.pool = pool
        self._window = window
        self._group = num_heads // pool.layout.num_kv_heads
        self._scale, self._softcap = scores.scale_of(pool.layout.head_dim), scores.softcap
        device = pool.groups[0].device
        self._num_sms = num_sms(device)
        self._policy = policy_of(device).attention

    def plan(self, batch: ForwardBatch, workspace: AttentionWorkspace, *, max_length: int | None = None,
             out: torch.Tensor | None = None) -> TritonPlan:
        if batch.is_decode or self.verifies(batch):
            longest = max_length or int(np.diff(batch.kv_indptr_cpu).max()) * self.pool.layout.page_size
            return TritonPlan(self, batch, workspace, longest=longest)
        blocks = plan_prefill(batch.qo_indptr_cpu, self._group, batch.input_ids.device)
        return TritonPlan(self, batch, workspace, blocks=blocks)

    def verifies(self, batch: ForwardBatch) -> bool:
        return batch.mask is not None or (batch.verifies and self._policy.verifies(batch.max_q_len))

    def warm_up(self, compute_prompt: Callable[[], None]) -> None:
        compute_prompt()

    def run_last_tokens(self, batch: ForwardBatch, workspace: AttentionWorkspace, layer: int, q: torch.Tensor,
                        k: torch.Tensor, v: torch.Tensor, cos_sin: torch.Tensor | None = None,
                        norms: HeadNorms | None = None, sinks: torch.Tensor | None = None) -> torch.Tensor:
        assert batch.last_tokens is not None
        store(self.pool, batch, layer, q, k, v, cos_sin, norms)
        if not batch.last_tokens.num_reqs:
            return q[:0]
        plan = self.plan(batch.last_tokens, workspace, max_length=ANY_LENGTH)
        return self.attend(plan, layer, q[batch.logits_rows], sinks)

    def stores_current_kv(self, q: torch.Tensor, cos_sin: torch.Tensor) -> bool:
        """Says whether attention is to apply rope and store the step's rows, too. It rotates whole heads only."""
        if cos_sin.shape[-1] < q.shape[-1]:
            return False
        pages = self.pool.groups[0]
        heads = len(q) * self.pool.layout.num_kv_heads
        return pages.dtype == q.dtype and self._policy.stores_current_kv(q.shape[-1], q.element_size(),
                                                                         pages.element_size(), heads)

    def attend(self, plan: TritonPlan, layer: int, q: torch.Tensor, sinks: torch.Tensor | None,
               inputs_ready: bool = False, current_kv: CurrentKV | None = None) -> torch.Tensor:
        """Attends to the stored keys and values of the plan's batch, and to ``current_kv``."""
        batch = plan.batch
        k_pages, v_pages = self.pool.layer(layer)
        table = (batch.kv_indptr, batch.kv_indices, batch.kv_last_page_len)
        k_scale, v_scale = self.pool.layout.scales_of(layer)
        if batch.is_decode:
            if plan.splits is None:
                kv_heads = self.pool.layout.num_kv_heads
                splits = self._policy.decode_splits(q.shape[-1], q.element_size(), k_pages.element_size(),
                                                    len(q) * kv_heads)
                plan.splits = plan_decode(batch.kv_indptr, batch.kv_last_page_len, self.pool.layout.page_size, kv_heads,
                                         self._num_sms, plan.longest, **splits._asdict(), window=self._window)
            return paged_decode(q, k_pages, v_pages, *table, self._scale * k_scale, plan.splits, v_scale=v_scale,
                                inputs_ready=inputs_ready, window=self._window, sinks=sinks, current_kv=current_kv,
                                softcap=self._softcap)
        if plan.blocks is None:
            return self._verify(plan, q, k_pages, v_pages, self._scale * k_scale, v_scale, sinks, inputs_ready)
        return paged_prefill(q, k_pages, v_pages, plan.blocks, batch.qo_indptr, *table, self._scale * k_scale, v_scale,
                             self._window, sinks, self._softcap)

    def _verify(self, plan: TritonPlan, q: torch.Tensor, k_pages: torch.Tensor, v_pages: torch.Tensor, scale: float,
                v_scale: float, sinks: torch.Tensor | None, inputs_ready: bool) -> torch.Tensor:
        batch = plan.batch
        tile, splits = verify_tile(q, k_pages, batch.num_reqs, batch.max_q_len)
        table = (batch.qo_indptr, batch.kv_indptr, batch.kv_last_page_len)
        if plan.verify is None:
            plan.verify = plan_verify(*table, k_pages.shape[2], k_pages.shape[1], self._num_sms, batch.max_q_len,
                                      plan.longest, tile, splits, self._window, batch.mask is not None)
        return verify_attention(q, k_pages, v_pages, batch.qo_indptr, batch.kv_indptr, batch.kv_indices,
                                batch.kv_last_page_len, scale, plan.verify, tile, v_scale, self._window, sinks,
                                batch.mask, inputs_ready, self._softcap)


@dataclass(eq=False)
class TritonPlan:
    """A batch's blocks of rows, or the splits of sequences up to ``longest`` tokens, of a decode step or of one that
    verifies drafts. The first layer makes these, so that a graph that captures the layers makes them in every
    replay."""

    backend: TritonBackend
    batch: ForwardBatch
    workspace: AttentionWorkspace
    longest: int = 0
    blocks: PrefillBlocks | None = None
    splits: DecodePlan | None = None
    verify: VerifyPlan | None = None
    attends_last_tokens: bool = True

    def run(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cos_sin: torch.Tensor | None = None,
            norms: HeadNorms | None = None, sinks: torch.Tensor | None = None) -> torch.Tensor:
        backend, batch = self.backend, self.batch
        # The first layer's attention follows a plan, and starts when all before it has ended: see kernels/_triton.py.
        inputs_ready = self.splits is not None or self.verify is not None
        if batch.is_decode and cos_sin is not None and backend.stores_current_kv(q, cos_sin):
            return backend.attend(self, layer, q, sinks, inputs_ready, CurrentKV(k, v, cos_sin, batch.positions, norms))
        store(backend.pool, batch, layer, q, k, v, cos_sin, norms, inputs_ready)
        return backend.attend(self, layer, q, sinks, inputs_ready)

    def run_last_tokens(self, *inputs: Any) -> torch.Tensor:
        return self.backend.run_last_tokens(self.batch, self.workspace, *inputs)

    def refresh(self, batch: ForwardBatch) -> None:
        """Does nothing: the splits are made on the device."""
