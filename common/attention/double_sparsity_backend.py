"""Decode attention that reads a part of long contexts (double sparsity), around a backend that reads all of them.

"Post-Training Sparse Attention with Double Sparsity" (Yang et al., arXiv:2408.07092): approximate scores from the heavy
channels of each key select the tokens that a head reads. The paper keeps these channels a second time, in a label cache
beside the keys. Here the pool stores each key with its heavy channels first, and queries are reordered alike, which no
product of the two notices: the label is the beginning of the key. So there is nothing to keep up to date where pages
come from a prefix cache, from host memory or from another server, and no memory beside the pool. (A gather of the
channels where they are would read all of the key: 32 of 128 channels in 16 bits touch nearly each of its sectors of 32
bytes.)

Prompts, and requests up to the threshold, are the exact backend's. Which requests are longer is decided on the device,
so that both kinds run in one captured graph.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch

from ...kernels.arguments import HeadNorms
from ...kernels.attention.decode_plan import DecodePlan, plan_decode
from ...kernels.attention.label_scores import label_scores
from ...kernels.attention.order_channels import order_channels
from ...kernels.attention.select_tokens import select_tokens
from ...kernels.attention.sparse_decode import sparse_decode
from ...kernels.attention.sparse_decode_plan import SCORE_BLOCK, SparseDecodePlan, TokenScores, plan_sparse_decode
from ...kernels.device import num_sms
from ..forward.forward_batch import ForwardBatch
from ..forward.step_context import AttentionPlan
from ..kvcache.pool import KVPool
from .base import AttentionBackend
from .workspace import AttentionWorkspace

SPARSE_WITHIN = ("triton", "torch")
"""Backends of decode steps that take page tables with more pages than a request's tokens need."""

_PROGRAMS_PER_SM = 8
_MIN_SPLIT_TOKENS = 1024
"""Tokens of a program of label_scores.py: 64 KiB of 32 channels."""


class Sparsity(NamedTuple):
    """Numbers of the selection: requests of more than ``threshold`` tokens read ``num_tokens`` of them, which the first
    ``num_channels`` of each key choose."""

    num_channels: int
    num_tokens: int
    threshold: int


class DoubleSparsityBackend:
    """Orders channels by ``channels`` [layers, Hkv, D] int32, on the pool's device, for the ``exact`` backend of the
    ``pool``; without ``sparsity`` that is all, as for prompts. ``num_heads`` counts this rank's query heads.

    Scores have as much memory as the pool has tokens. Where requests that share pages have more, the last ones of a
    batch are decoded exactly.
    """

    def __init__(self, exact: AttentionBackend, pool: KVPool, num_heads: int, channels: torch.Tensor,
                 sparsity: Sparsity | None, scale: float | None = None):
        """``scale`` multiplies scores; None: one over the root of a head's values."""
        self.exact = exact
        self.pool = pool
        self.sparsity = sparsity
        self.num_heads = num_heads
        self.capacity = pool.num_pages * pool.layout.page_size
        self._scale = pool.layout.head_dim ** -0.5 if scale is None else scale
        self._channels = channels.unbind()
        self._num_sms = num_sms(channels.device)
        self._compiled = False

    def plan(self, batch: ForwardBatch, workspace: AttentionWorkspace, *, max_length: int | None = None,
             out: torch.Tensor | None = None) -> DoubleSparsityPlan:
        if not batch.is_decode or self.sparsity is None:
            exact = self.exact.plan(batch, workspace, max_length=max_length, out=out)
            return DoubleSparsityPlan(self, batch, exact, None)
        device = batch.input_ids.device
        lengths = (np.diff(batch.kv_indptr_cpu) - 1) * self.pool.layout.page_size + batch.kv_last_page_len_cpu
        if max_length is None and self._compiled and lengths.max() <= self.sparsity.threshold:
            return DoubleSparsityPlan(self, batch, self.exact.plan(batch, workspace, out=out), None)
        self._compiled = True  # by the first decode step, which is a server's warm-up
        scores = workspace.of(self, lambda: TokenScores.empty(self.num_heads, self.capacity, device))
        sparse = SparseStep(SparseDecodePlan.empty(batch.num_reqs, device), scores, max_length or int(lengths.max()))
        short = replace(batch, kv_last_page_len=sparse.requests.exact, kv_last_page_len_cpu=self._exact_last_page_len(
            batch, lengths))
        exact = self.exact.plan(short, workspace, max_length=max_length, out=out)
        return DoubleSparsityPlan(self, batch, exact, sparse)

    def _exact_last_page_len(self, batch: ForwardBatch, lengths: np.ndarray) -> np.ndarray:
        """Returns ``SparseDecodePlan.exact`` in host memory, for backends that plan there."""
        assert self.sparsity is not None
        long = lengths > self.sparsity.threshold
        room = -(-lengths // SCORE_BLOCK) * SCORE_BLOCK
        sparse = long & (np.cumsum(room * long) <= self.capacity)
        last: np.ndarray = np.where(sparse, batch.kv_last_page_len_cpu - lengths + 1, batch.kv_last_page_len_cpu)
        return last.astype(np.int32)

    def verifies(self, batch: ForwardBatch) -> bool:
        return self.exact.verifies(batch)

    def warm_up(self, compute_prompt: Callable[[], None]) -> None:
        self.exact.warm_up(compute_prompt)

    @property
    def attends_last_tokens(self) -> bool:
        return self.exact.attends_last_tokens

    def order(self, batch: ForwardBatch, layer: int, q: torch.Tensor, k: torch.Tensor, cos_sin: torch.Tensor | None,
              norms: HeadNorms | None) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns queries and keys with rope applied, their channels in the pool's order."""
        return order_channels(q, k, self._channels[layer], cos_sin, batch.positions, norms)

    def run_last_tokens(self, batch: ForwardBatch, workspace: AttentionWorkspace, layer: int, q: torch.Tensor,
                        k: torch.Tensor, v: torch.Tensor, cos_sin: torch.Tensor | None = None,
                        norms: HeadNorms | None = None, sinks: torch.Tensor | None = None) -> torch.Tensor:
        q, k = self.order(batch, layer, q, k, cos_sin, norms)
        return self.exact.run_last_tokens(batch, workspace, layer, q, k, v, None, None, sinks)

    def plan_step(self, batch: ForwardBatch, step: SparseStep) -> None:
        """Decides on the device which requests are sparse, and how their scores are split among programs."""
        assert self.sparsity is not None
        page_size = self.pool.layout.page_size
        plan_sparse_decode(batch.kv_indptr, batch.kv_last_page_len, page_size, self.sparsity.threshold, self.capacity,
                           step.requests)
        step.splits = plan_decode(batch.kv_indptr, step.requests.sparse, page_size, self.pool.layout.num_kv_heads,
                                  self._num_sms, step.longest, programs_per_sm=_PROGRAMS_PER_SM,
                                  min_tokens=_MIN_SPLIT_TOKENS)

    def attend(self, batch: ForwardBatch, step: SparseStep, layer: int, q: torch.Tensor, out: torch.Tensor) -> None:
        """Overwrites the rows of ``out`` whose requests are sparse."""
        assert self.sparsity is not None and step.splits is not None
        k_pages, v_pages = self.pool.layer(layer)
        k_scale, v_scale = self.pool.layout.scales_of(layer)
        scale = self._scale * k_scale
        table, requests = (batch.kv_indptr, batch.kv_indices), step.requests
        label_scores(q, k_pages, *table, self.sparsity.num_channels, scale, requests, step.splits, step.scores)
        selected = select_tokens(step.scores, requests, self.sparsity.num_tokens)
        sparse_decode(q, k_pages, v_pages, *table, selected, requests.lengths, scale, v_scale, out)


class SparseStep:
    """A decode step with sparse ``requests``, up to ``longest`` tokens long. Its first layer plans it, so that a graph
    that captures the layers does so in every replay. ``scores`` hold nothing between layers."""

    def __init__(self, requests: SparseDecodePlan, scores: TokenScores, longest: int):
        self.requests = requests
        self.scores = scores
        self.longest = longest
        self.splits: DecodePlan | None = None


class DoubleSparsityPlan:
    """The ``exact`` backend's plan of a batch, and the ``sparse`` part of a decode step."""

    def __init__(self, backend: DoubleSparsityBackend, batch: ForwardBatch, exact: AttentionPlan,
                 sparse: SparseStep | None):
        self._backend = backend
        self._batch = batch
        self._exact = exact
        self._sparse = sparse
        self.attends_last_tokens = exact.attends_last_tokens

    def run(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cos_sin: torch.Tensor | None = None,
            norms: HeadNorms | None = None, sinks: torch.Tensor | None = None) -> torch.Tensor:
        sparse = self._sparse
        if sparse is not None and sparse.splits is None:
            self._backend.plan_step(self._batch, sparse)
        q, k = self._backend.order(self._batch, layer, q, k, cos_sin, norms)
        out = self._exact.run(layer, q, k, v, None, None, sinks)
        if sparse is not None:
            assert sinks is None, "a model with sinks has windows"
            self._backend.attend(self._batch, sparse, layer, q, out)
        return out

    def run_last_tokens(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
                        cos_sin: torch.Tensor | None = None, norms: HeadNorms | None = None,
                        *rest: Any) -> torch.Tensor:
        q, k = self._backend.order(self._batch, layer, q, k, cos_sin, norms)
        return self._exact.run_last_tokens(layer, q, k, v, None, None, *rest)

    def refresh(self, batch: ForwardBatch) -> None:
        self._exact.refresh(batch)
