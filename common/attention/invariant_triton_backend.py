"""The Triton backend of deterministic mode: one kernel for decode steps, prompts and rows that verify drafts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ...kernels.arguments import HeadNorms
from ...kernels.attention.fixed_split_attention import (
    FixedSplitPlan,
    fixed_split_attention,
    plan_decode_rows,
    plan_rows,
    plan_verified_rows,
)
from ...kernels.tuning.attention import FixedSplitTile
from ...kernels.tuning.policy import policy_of
from ..config.scores import PLAIN_SCORES, Scores
from ..forward.forward_batch import ForwardBatch
from ..kvcache.pool import KVPool
from .base import ANY_LENGTH, store
from .workspace import AttentionWorkspace


class InvariantTritonBackend:
    attends_last_tokens = True

    def __init__(self, pool: KVPool, num_heads: int, dtype: torch.dtype, window: int | None,
                 scores: Scores = PLAIN_SCORES):
        """``dtype`` is the model's."""
        self.pool = pool
        self._scale, self._softcap = scores.scale_of(pool.layout.head_dim), scores.softcap
        self._window = window
        self._group = num_heads // pool.layout.num_kv_heads
        self._policy = policy_of(pool.groups[0].device).attention
        self._head_size = pool.layout.head_dim, dtype.itemsize, pool.groups[0].itemsize

    def plan(self, batch: ForwardBatch, workspace: AttentionWorkspace, *, max_length: int | None = None,
             out: torch.Tensor | None = None) -> InvariantTritonPlan:
        assert batch.mask is None, "a tree's keys do not lie in the order of positions"
        device = batch.input_ids.device
        if self.verifies(batch):
            return InvariantTritonPlan(self, batch, workspace, max_length or int(self._lengths(batch).max()))
        if batch.is_decode:
            longest = max_length or int(self._lengths(batch).max())
            rows = plan_decode_rows(batch.num_reqs, self._group, self._tile(1), longest, self._window, device)
        else:
            q_lens = np.diff(batch.qo_indptr_cpu)
            rows = plan_rows(batch.qo_indptr_cpu, self._lengths(batch), self._group, self._tile(int(q_lens.max())),
                             self._window, device)
        return InvariantTritonPlan(self, batch, workspace, 0, rows)

    def _tile(self, q_len: int) -> FixedSplitTile:
        """Returns the tile of up to ``q_len`` rows a request."""
        return self._policy.fixed_split(*self._head_size, q_len * self._group)

    def _lengths(self, batch: ForwardBatch) -> np.ndarray:
        """Returns the tokens [B] of each request; a step that is captured has none in host memory."""
        lengths: np.ndarray = ((np.diff(batch.kv_indptr_cpu) - 1) * self.pool.layout.page_size
                               + batch.kv_last_page_len_cpu)
        return lengths

    def verifies(self, batch: ForwardBatch) -> bool:
        return batch.verifies and not batch.is_decode and self._policy.verifies(batch.max_q_len)

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

    def attend(self, plan: InvariantTritonPlan, layer: int, q: torch.Tensor, sinks: torch.Tensor | None,
               inputs_ready: bool = False) -> torch.Tensor:
        """Attends to the stored keys and values of the plan's batch."""
        batch, (k_scale, v_scale) = plan.batch, self.pool.layout.scales_of(layer)
        if plan.rows is None:
            plan.rows = plan_verified_rows(batch.qo_indptr, batch.positions, batch.max_q_len, self._group,
                                           self._tile(batch.max_q_len), plan.longest, self._window)
        return fixed_split_attention(q, *self.pool.layer(layer), plan.rows, batch.positions, batch.qo_indptr,
                                     batch.kv_indptr, batch.kv_indices, batch.kv_last_page_len,
                                     self._scale * k_scale, v_scale, self._window, sinks, inputs_ready, self._softcap)


@dataclass(eq=False)
class InvariantTritonPlan:
    """A batch's blocks of rows. Those of a step that verifies drafts, of sequences up to ``longest`` tokens, are made
    by the first layer, so that a graph that captures the layers makes them in every replay."""

    backend: InvariantTritonBackend
    batch: ForwardBatch
    workspace: AttentionWorkspace
    longest: int
    rows: FixedSplitPlan | None = None
    launched: bool = False
    """A layer's attention, which starts when all before it has ended, was launched: see kernels/_triton.py."""
    attends_last_tokens: bool = True

    def run(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cos_sin: torch.Tensor | None = None,
            norms: HeadNorms | None = None, sinks: torch.Tensor | None = None) -> torch.Tensor:
        inputs_ready, self.launched = self.launched, True
        store(self.backend.pool, self.batch, layer, q, k, v, cos_sin, norms, inputs_ready)
        return self.backend.attend(self, layer, q, sinks, inputs_ready)

    def run_last_tokens(self, *inputs: Any) -> torch.Tensor:
        return self.backend.run_last_tokens(self.batch, self.workspace, *inputs)

    def refresh(self, batch: ForwardBatch) -> None:
        """Does nothing: a decode step's blocks depend on the number of requests alone, and those of drafts are made on
        the device."""
