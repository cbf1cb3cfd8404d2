"""Multi-head latent attention in plain torch, for CPUs.

Latents are gathered out of the pool a page at a time: the memory of a layer group is viewed as rows of one page and
layer, ``[pages * layers, page_size * latent_dim]``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.nn.functional import linear, scaled_dot_product_attention

from ....kernels.reference import visible_by_words
from ....kernels.tuning.policy import policy_of
from ...config.mla import MLASpec
from ...config.server.kernels import LATENT_BACKENDS
from ...forward.forward_batch import ForwardBatch
from ...kvcache.pool import KVPool
from ..base import gather
from ..torch_backend import QUERY_BLOCK, similar
from ..workspace import AttentionWorkspace
from .base import LatentBackend, absorb, store, values_of
from .invariant_torch_backend import InvariantMLATorchBackend


@dataclass
class _Bucket:
    """Requests gathered together, padded to the longest: their ``pages`` [b, n], and the ``mask`` [b, 1, 1, tokens] of
    the n pages' tokens that they see."""

    requests: torch.Tensor
    pages: torch.Tensor
    mask: torch.Tensor
    lengths: list[int]


@LATENT_BACKENDS.register("torch")
class MLATorchBackend:
    attends_last_tokens = True
    takes_prompts = True
    captures = False

    @staticmethod
    def check(device: torch.device) -> None:
        """Runs everywhere."""

    @staticmethod
    def check_decode(device: torch.device, mla: MLASpec, dtype: str, stored: str) -> None:
        """Takes all types."""

    @staticmethod
    def make(pool: KVPool, mla: MLASpec, num_heads: int, dtype: torch.dtype) -> LatentBackend:
        if policy_of(pool.groups[0].device).batch_invariant:
            return InvariantMLATorchBackend(pool, mla, num_heads)
        return MLATorchBackend(pool, mla)

    def __init__(self, pool: KVPool, mla: MLASpec):
        self.pool = pool
        self.mla = mla

    def plan(self, batch: ForwardBatch, workspace: AttentionWorkspace, *, max_length: int | None = None,
             out: torch.Tensor | None = None) -> MLATorchPlan:
        pages = np.diff(batch.kv_indptr_cpu)
        lengths = (pages - 1) * self.pool.layout.page_size + batch.kv_last_page_len_cpu
        members = similar(pages) if batch.is_decode else [np.array([b]) for b in range(batch.num_reqs)]
        return MLATorchPlan(self, batch, workspace, [self._bucket(batch, requests, pages, lengths)
                                                     for requests in members])

    def _bucket(self, batch: ForwardBatch, requests: np.ndarray, pages: np.ndarray, lengths: np.ndarray) -> _Bucket:
        device = batch.input_ids.device
        padded = np.zeros((len(requests), pages[requests].max()), np.int64)
        for row, b in enumerate(requests):
            begin = batch.kv_indptr_cpu[b]
            padded[row, :pages[b]] = batch.kv_indices_cpu[begin:begin + pages[b]]
        tokens = np.arange(padded.shape[1] * self.pool.layout.page_size)
        mask = torch.from_numpy(tokens < lengths[requests][:, None])[:, None, None].to(device)
        return _Bucket(torch.from_numpy(requests).to(device), torch.from_numpy(padded).to(device), mask,
                       lengths[requests].tolist())

    def verifies(self, batch: ForwardBatch) -> bool:
        return False

    def warm_up(self, compute_prompt: Callable[[], None]) -> None:
        compute_prompt()

    def run_last_tokens(self, batch: ForwardBatch, workspace: AttentionWorkspace, layer: int, q: torch.Tensor,
                        latent: torch.Tensor, k_rope: torch.Tensor, up: torch.Tensor,
                        cos_sin: torch.Tensor) -> torch.Tensor:
        assert batch.last_tokens is not None
        store(self.pool, self.mla, batch, layer, q, latent, k_rope, cos_sin)
        return self.attend(self.plan(batch.last_tokens, workspace), layer, q[batch.logits_rows], up)

    def attend(self, plan: MLATorchPlan, layer: int, q: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        """Attends to the stored latents of the plan's batch."""
        attend = self._decode if plan.batch.is_decode else self._extend
        out = torch.empty((*q.shape[:2], self.mla.v_dim), dtype=q.dtype, device=q.device)
        for bucket in plan.buckets:
            attend(plan.batch, bucket, self._gather(bucket, layer, q.dtype), q, up, out)
        return out

    def _gather(self, bucket: _Bucket, layer: int, dtype: torch.dtype) -> torch.Tensor:
        """``[b, tokens, latent_dim]``; tokens beyond a request's length are arbitrary."""
        layout = self.pool.layout
        group, index = layout.locate(layer)
        memory = self.pool.groups[group].view(-1, layout.page_size * layout.head_dim)
        rows = bucket.pages * layout.groups[group] + index
        scale, _ = layout.scales_of(layer)
        return gather(memory, rows.flatten(), dtype, scale).view(len(rows), -1, layout.head_dim)

    def _decode(self, batch: ForwardBatch, bucket: _Bucket, context: torch.Tensor, q: torch.Tensor, up: torch.Tensor,
                out: torch.Tensor) -> None:
        """Decode in the absorbed form: the heads are query rows over one key and value, the latents."""
        nope, keys, rows = self.mla.nope_dim, context[:, None], q[bucket.requests]
        queries = torch.cat((absorb(rows, up, nope), rows[..., nope:]), dim=-1)[:, None]
        latents = scaled_dot_product_attention(queries, keys, keys[..., :self.mla.kv_lora_rank],
                                               attn_mask=bucket.mask, scale=self.mla.scale)
        out[bucket.requests] = values_of(latents[:, 0], up, nope)

    def _extend(self, batch: ForwardBatch, bucket: _Bucket, context: torch.Tensor, q: torch.Tensor, up: torch.Tensor,
                out: torch.Tensor) -> None:
        """Extend in the expanded form: each head's keys and values are made of the latents."""
        mla = self.mla
        (b,), (length,) = bucket.requests.tolist(), bucket.lengths
        begin, end = batch.qo_indptr_cpu[b:b + 2].tolist()
        context = context[0, :length]
        kv = linear(context[:, :mla.kv_lora_rank], up.flatten(0, 1)).unflatten(-1, up.shape[:2]).transpose(0, 1)
        shared = context[None, :, mla.kv_lora_rank:].expand(len(up), -1, -1)
        keys = torch.cat((kv[..., :mla.nope_dim], shared), dim=-1)  # [H, tokens, N + R]
        values = kv[..., mla.nope_dim:]
        for row in range(begin, end, QUERY_BLOCK):
            stop = min(row + QUERY_BLOCK, end)
            if batch.mask is None:
                seen = length - (end - stop)
                mask = torch.ones(stop - row, seen, dtype=torch.bool, device=q.device).tril_(seen - (stop - row))
            else:
                seen = length
                mask = visible_by_words(batch.mask.words[row:stop], length, int(batch.mask.counts[b]), None)
            result = scaled_dot_product_attention(q[row:stop].transpose(0, 1), keys[:, :seen], values[:, :seen],
                                                  attn_mask=mask, scale=mla.scale)
            out[row:stop] = result.transpose(0, 1)


class MLATorchPlan:
    """A batch's buckets."""

    attends_last_tokens = True

    def __init__(self, backend: MLATorchBackend, batch: ForwardBatch, workspace: AttentionWorkspace,
                 buckets: list[_Bucket]):
        self.batch = batch
        self.workspace = workspace
        self.buckets = buckets
        self._backend = backend

    def run(self, layer: int, q: torch.Tensor, latent: torch.Tensor, k_rope: torch.Tensor, up: torch.Tensor,
            cos_sin: torch.Tensor) -> torch.Tensor:
        store(self._backend.pool, self._backend.mla, self.batch, layer, q, latent, k_rope, cos_sin)
        return self._backend.attend(self, layer, q, up)

    def run_last_tokens(self, *inputs: Any) -> torch.Tensor:
        return self._backend.run_last_tokens(self.batch, self.workspace, *inputs)

    def refresh(self, batch: ForwardBatch) -> None:
        raise AssertionError("this backend is never captured")
