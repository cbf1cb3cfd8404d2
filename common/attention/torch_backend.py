"""Attention in plain torch: for CPUs, and as the reference of the other backends.

Keys and values are gathered out of the pool straight into the ``[.., heads, tokens, head_dim]`` layout that
scaled_dot_product_attention takes. The pool's memory is viewed as rows of one page and head,
``[pages * layers * 2 * heads, page_size * head_dim]``, so that a gather copies ``page_size * head_dim`` values at once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention

from ...kernels.arguments import HeadNorms, RowMask
from ...kernels.reference import visible_by_words
from ...kernels.tuning.policy import policy_of
from ..config.scores import PLAIN_SCORES, Scores
from ..config.server.kernels import ATTENTION_BACKENDS
from ..forward.forward_batch import ForwardBatch
from ..kvcache.pool import KVPool
from .base import AttentionBackend, AttentionFacts, store
from .invariant_torch_backend import InvariantTorchBackend
from .workspace import AttentionWorkspace

QUERY_BLOCK = 1024
"""Rows of an extend's score mask: 8,192 x 8,192 at once would take 64 MiB a request."""


@dataclass
class _Bucket:
    """Requests gathered together, padded to the longest: ``first_rows`` [2, b, heads, n] index layer 0's pool rows."""

    requests: torch.Tensor
    first_rows: dict[int, torch.Tensor]
    mask: torch.Tensor | None
    lengths: list[int]


@ATTENTION_BACKENDS.register("torch")
class TorchBackend:
    attends_last_tokens = True
    captures = False

    @staticmethod
    def check(facts: AttentionFacts) -> None:
        """Runs everywhere."""

    @staticmethod
    def make(pool: KVPool, num_heads: int, dtype: torch.dtype, window: int | None,
             scores: Scores) -> AttentionBackend:
        if policy_of(pool.groups[0].device).batch_invariant:
            return InvariantTorchBackend(pool, num_heads, window, scores)
        return TorchBackend(pool, window, scores)

    def __init__(self, pool: KVPool, window: int | None = None, scores: Scores = PLAIN_SCORES):
        self.pool = pool
        self._scale, self._softcap = scores.scale_of(pool.layout.head_dim), scores.softcap
        self._window = window
        self._layout = pool.layout
        dtype = pool.groups[0].dtype
        self._float8 = dtype if dtype.itemsize == 1 else None  # gathered as bytes: not every device indexes float8
        self._gathered_dtype = torch.uint8 if self._float8 else dtype

    def plan(self, batch: ForwardBatch, workspace: AttentionWorkspace, *, max_length: int | None = None,
             out: torch.Tensor | None = None) -> TorchPlan:
        pages = np.diff(batch.kv_indptr_cpu)
        lengths = (pages - 1) * self._layout.page_size + batch.kv_last_page_len_cpu
        begins = batch.kv_indptr_cpu[:-1]
        if self._window is not None:  # whole pages before the first token that a row sees are left out
            newest = np.diff(batch.qo_indptr_cpu) if batch.mask is None else batch.mask.counts.numpy(force=True)
            unseen = lengths - newest + 1 - self._window
            unseen = np.maximum(unseen, 0) // self._layout.page_size
            begins, pages, lengths = begins + unseen, pages - unseen, lengths - unseen * self._layout.page_size
        members = similar(pages) if batch.is_decode else [np.array([b]) for b in range(batch.num_reqs)]
        buckets = [self._bucket(batch, requests, begins, pages, lengths) for requests in members]
        # Memory that is reused by all steps: page faults of new memory would make a 40 MB gather 20 times slower.
        rows = max((next(iter(bucket.first_rows.values())).numel() for bucket in buckets), default=0)
        values = rows * self._layout.page_size * self._layout.head_dim
        scratch = workspace.scratch(values * self._gathered_dtype.itemsize).view(self._gathered_dtype)
        return TorchPlan(self, batch, workspace, buckets, scratch)

    def _bucket(self, batch: ForwardBatch, requests: np.ndarray, begins: np.ndarray, pages: np.ndarray,
                lengths: np.ndarray) -> _Bucket:
        heads, device = self._layout.num_kv_heads, batch.input_ids.device
        padded = np.zeros((len(requests), pages[requests].max()), np.int64)
        for row, b in enumerate(requests):
            padded[row, :pages[b]] = batch.kv_indices_cpu[begins[b]:begins[b] + pages[b]]
        rows = {}
        for size in set(self._layout.groups):
            keys = padded[:, None] * (size * 2 * heads) + np.arange(heads)[:, None]
            rows[size] = torch.from_numpy(np.stack((keys, keys + heads))).to(device)
        mask = None
        if batch.is_decode:
            tokens = np.arange(padded.shape[1] * self._layout.page_size)
            seen = tokens < lengths[requests][:, None]
            if self._window is not None:
                seen &= tokens >= lengths[requests][:, None] - self._window
            mask = torch.from_numpy(seen)[:, None, None].to(device)
        return _Bucket(torch.from_numpy(requests).to(device), rows, mask, lengths[requests].tolist())

    def verifies(self, batch: ForwardBatch) -> bool:
        return False

    def warm_up(self, compute_prompt: Callable[[], None]) -> None:
        compute_prompt()

    def run_last_tokens(self, batch: ForwardBatch, workspace: AttentionWorkspace, layer: int, q: torch.Tensor,
                        k: torch.Tensor, v: torch.Tensor, cos_sin: torch.Tensor | None = None,
                        norms: HeadNorms | None = None, sinks: torch.Tensor | None = None) -> torch.Tensor:
        assert batch.last_tokens is not None
        store(self.pool, batch, layer, q, k, v, cos_sin, norms)
        return self.attend(self.plan(batch.last_tokens, workspace), layer, q[batch.logits_rows], sinks)

    def attend(self, plan: TorchPlan, layer: int, q: torch.Tensor, sinks: torch.Tensor | None) -> torch.Tensor:
        """Attends to the stored keys and values of the plan's batch."""
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        attend = self._decode if plan.batch.is_decode else self._extend
        of_heads = None if sinks is None else sinks.to(q.dtype).unflatten(0, (self._layout.num_kv_heads, -1))
        for bucket in plan.buckets:
            attend(plan, bucket, *self._gather(plan, bucket, layer, q.dtype), q, of_heads, out)
        return out

    def _gather(self, plan: TorchPlan, bucket: _Bucket, layer: int,
                dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values ``[b, heads, tokens, D]`` of a bucket; tokens beyond a request's length are arbitrary."""
        layout = self._layout
        group, index = layout.locate(layer)
        memory = self.pool.groups[group].view(self._gathered_dtype).view(-1, layout.page_size * layout.head_dim)
        rows = bucket.first_rows[layout.groups[group]] + index * 2 * layout.num_kv_heads
        out = plan.scratch[:rows.numel() * memory.shape[1]].view(rows.numel(), memory.shape[1])
        gathered = torch.index_select(memory, 0, rows.flatten(), out=out)
        if self._float8 is not None:
            gathered = gathered.view(self._float8).to(dtype)
        keys, values = gathered.view(*rows.shape[:3], -1, layout.head_dim).unbind(0)
        if self._float8 is not None:
            k_scale, v_scale = layout.scales_of(layer)
            keys, values = keys * k_scale, values * v_scale
        return keys, values

    def _decode(self, plan: TorchPlan, bucket: _Bucket, keys: torch.Tensor, values: torch.Tensor, q: torch.Tensor,
                sinks: torch.Tensor | None, out: torch.Tensor) -> None:
        # The query heads that share a KV head are passed as query rows: no key is repeated.
        grouped = q[bucket.requests].unflatten(1, (self._layout.num_kv_heads, -1))
        result = self._products(grouped, keys, values, bucket.mask, sinks)
        out[bucket.requests] = result.flatten(1, 2)

    def _extend(self, plan: TorchPlan, bucket: _Bucket, keys: torch.Tensor, values: torch.Tensor, q: torch.Tensor,
                sinks: torch.Tensor | None, out: torch.Tensor) -> None:
        (b,), (length,) = bucket.requests.tolist(), bucket.lengths
        begin, end = plan.batch.qo_indptr_cpu[b:b + 2].tolist()
        if plan.batch.mask is not None:
            self._attend_masked(plan.batch.mask, b, slice(begin, end), keys[..., :length, :], values[..., :length, :],
                                q, sinks, out)
            return
        prefix = length - (end - begin)
        group = q.shape[1] // self._layout.num_kv_heads
        for row in range(begin, end, QUERY_BLOCK):
            stop = min(row + QUERY_BLOCK, end)
            seen = prefix + stop - begin
            block_keys, block_values = (x[0, :, None, :seen].expand(-1, group, -1, -1) for x in (keys, values))
            queries = q[row:stop].unflatten(1, (self._layout.num_kv_heads, group)).permute(1, 2, 0, 3)
            first = seen - (stop - row)
            mask = None
            if first > 0 or self._window is not None or sinks is not None or self._softcap:
                mask = torch.ones(stop - row, seen, dtype=torch.bool, device=q.device).tril_(first)
                if self._window is not None:
                    mask.triu_(first - self._window + 1)
            level = None if sinks is None else sinks[..., None]
            result = self._products(queries, block_keys, block_values, mask, level)
            out[row:stop] = result.permute(2, 0, 1, 3).flatten(1, 2)

    def _attend_masked(self, mask: RowMask, request: int, rows: slice, keys: torch.Tensor, values: torch.Tensor,
                       q: torch.Tensor, sinks: torch.Tensor | None, out: torch.Tensor) -> None:
        """Attends to ``keys`` and ``values`` [1, heads, slots, D] of a request, of which its rows see what ``mask``
        says."""
        group = q.shape[1] // self._layout.num_kv_heads
        seen = visible_by_words(mask.words[rows], keys.shape[2], int(mask.counts[request]), self._window)
        queries = q[rows].unflatten(1, (self._layout.num_kv_heads, group)).permute(1, 2, 0, 3)
        keys, values = (x[0, :, None].expand(-1, group, -1, -1) for x in (keys, values))
        result = self._products(queries, keys, values, seen, None if sinks is None else sinks[..., None])
        out[rows] = result.permute(2, 0, 1, 3).flatten(1, 2)

    def _products(self, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor | None,
                  sinks: torch.Tensor | None) -> torch.Tensor:
        """Attends where ``mask`` is set, or without one causally."""
        if mask is None:
            return scaled_dot_product_attention(q, keys, values, is_causal=True, scale=self._scale)
        if self._softcap:
            assert sinks is None, "no model has both"
            return _capped(q, keys, values, mask, self._scale, self._softcap)
        if sinks is not None:
            return _with_sinks(q, keys, values, mask, sinks, self._scale)
        return scaled_dot_product_attention(q, keys, values, attn_mask=mask, scale=self._scale)


class TorchPlan:
    """A batch's buckets, and memory for the keys and values of one of them."""

    attends_last_tokens = True

    def __init__(self, backend: TorchBackend, batch: ForwardBatch, workspace: AttentionWorkspace,
                 buckets: list[_Bucket], scratch: torch.Tensor):
        self.batch = batch
        self.workspace = workspace
        self.buckets = buckets
        self.scratch = scratch
        self._backend = backend

    def run(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cos_sin: torch.Tensor | None = None,
            norms: HeadNorms | None = None, sinks: torch.Tensor | None = None) -> torch.Tensor:
        store(self._backend.pool, self.batch, layer, q, k, v, cos_sin, norms)
        return self._backend.attend(self, layer, q, sinks)

    def run_last_tokens(self, *inputs: Any) -> torch.Tensor:
        return self._backend.run_last_tokens(self.batch, self.workspace, *inputs)

    def refresh(self, batch: ForwardBatch) -> None:
        raise AssertionError("this backend is never captured")


def _with_sinks(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor,
                sinks: torch.Tensor, scale: float) -> torch.Tensor:
    """Attention where ``mask`` is set, over one more key and value of zeros, whose score is ``sinks`` [..., row], one
    for each query of ``q`` [..., row, D]."""
    keys, values = (torch.nn.functional.pad(x, (0, 0, 0, 1)) for x in (keys, values))
    rows = (*q.shape[:-1], 1)
    bias = torch.zeros(mask.shape, dtype=q.dtype, device=q.device).masked_fill_(~mask, float("-inf"))
    bias = torch.cat((bias.expand(*rows[:-1], -1), sinks[..., None].expand(rows)), -1)
    return scaled_dot_product_attention(q, keys, values, attn_mask=bias, scale=scale)


def _capped(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor, scale: float,
            softcap: float) -> torch.Tensor:
    """Attention where ``mask`` is set, with scores below ``softcap`` (Gemma 2, arXiv:2408.00118, section 2)."""
    scores = torch.tanh(q @ keys.transpose(-1, -2) * (scale / softcap)) * softcap
    weights: torch.Tensor = scores.float().masked_fill(~mask, float("-inf")).softmax(-1).to(q.dtype) @ values
    return weights


def similar(pages: np.ndarray) -> list[np.ndarray]:
    """Group requests into buckets whose longest has at most about twice the pages of the shortest: this bounds the
    padding."""
    order = np.argsort(pages, kind="stable")
    buckets = []
    while len(order):
        count = int(np.searchsorted(pages[order], 2 * pages[order[0]] + 4, side="right"))
        buckets.append(order[:count])
        order = order[count:]
    return buckets
