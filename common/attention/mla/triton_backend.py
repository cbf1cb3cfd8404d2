"""Multi-head latent attention by Baton's own Triton kernels: absorbed for decode steps, expanded for prompts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.nn.functional import linear

from ....kernels._triton import INTERPRETED
from ....kernels.arguments import Segment
from ....kernels.attention.decode_plan import DecodePlan, plan_decode
from ....kernels.attention.mla_decode import mla_decode
from ....kernels.attention.mla_prefill import mla_prefill, plan_mla_prefill
from ....kernels.attention.mla_verify import fits_warp_groups, mla_verify
from ....kernels.attention.verify_attention import VerifyPlan, plan_verify
from ....kernels.device import num_sms
from ....kernels.tuning.attention import VerifyTile
from ....kernels.tuning.policy import policy_of
from ...config.mla import MLASpec
from ...config.server.kernels import LATENT_BACKENDS
from ...forward.forward_batch import ForwardBatch, rows_as_requests
from ...kvcache.pool import KVPool
from ..base import ANY_LENGTH, check_gpu, gather
from ..workspace import AttentionWorkspace
from .base import LatentBackend, absorb, store, values_of

_EXPANDED_BYTES = 256 << 20
"""The most memory of a context's keys and values at once: 32,768 tokens of 16 heads in bfloat16."""
_INVARIANT_ROWS = 256
"""Rows whose splits' results are in memory together in deterministic mode: 67 MB for 16 heads."""


_VerifyPart = tuple[torch.Tensor, torch.Tensor, torch.Tensor, VerifyPlan]
"""``qo_indptr``, ``kv_indptr`` and ``kv_last_page_len`` of some requests, and their plan."""


@LATENT_BACKENDS.register("triton", needs={"triton": "triton"}, traits=("gpu",))
class MLATritonBackend:
    attends_last_tokens = True
    takes_prompts = True
    captures = True

    @staticmethod
    def check(device: torch.device) -> None:
        if not INTERPRETED:
            check_gpu("triton", device)

    @staticmethod
    def check_decode(device: torch.device, mla: MLASpec, dtype: str, stored: str) -> None:
        """Takes all types."""

    @staticmethod
    def make(pool: KVPool, mla: MLASpec, num_heads: int, dtype: torch.dtype) -> LatentBackend:
        return MLATritonBackend(pool, mla, num_heads, dtype)

    def __init__(self, pool: KVPool, mla: MLASpec, num_heads: int, dtype: torch.dtype):
        """``num_heads`` counts this rank's heads; ``dtype`` is the model's. In deterministic mode every row is computed
        as one that verifies drafts, split by its own length alone, whatever step it is in."""
        self.pool = pool
        self.mla = mla
        device = pool.groups[0].device
        self._policy = policy = policy_of(device).attention
        self._num_heads = num_heads
        self._head_blocks = -(-num_heads // policy.mla_head_block(num_heads, dtype.itemsize))
        self._splits = policy.mla_splits(num_heads, dtype.itemsize)._asdict()
        self._most_tokens = _EXPANDED_BYTES // (num_heads * (mla.nope_dim + mla.v_dim) * dtype.itemsize)
        self._num_sms = num_sms(device)
        if device.type == "cuda":
            self.compile_merging(num_heads, dtype)

    def compile_merging(self, num_heads: int, dtype: torch.dtype) -> None:
        """Run the kernel that merges segments: the first long context would otherwise wait for its compilation."""
        mla, page_size, device = self.mla, self.pool.layout.page_size, self.pool.groups[0].device
        one = np.array([0, 1], np.int32)
        (segment,) = plan_mla_prefill(one, one, one[1:], page_size, page_size, device)
        q = torch.zeros(1, num_heads, mla.qk_dim, dtype=dtype, device=device)
        kv = torch.zeros(page_size, num_heads, mla.nope_dim + mla.v_dim, dtype=dtype, device=device)
        context = torch.zeros(page_size, mla.latent_dim, dtype=dtype, device=device)
        out = torch.zeros(1, num_heads, mla.v_dim, dtype=torch.float32, device=device)
        lse = torch.full((1, num_heads), float("-inf"), device=device)
        qo_indptr = torch.from_numpy(one).to(device)
        mla_prefill(q, kv, context[:, mla.kv_lora_rank:], segment, qo_indptr, mla.scale, out, lse)

    def plan(self, batch: ForwardBatch, workspace: AttentionWorkspace, *, max_length: int | None = None,
             out: torch.Tensor | None = None) -> MLATritonPlan:
        page_size = self.pool.layout.page_size
        if batch.is_decode or self.verifies(batch) or self._policy.batch_invariant:
            longest = max_length or int(np.diff(batch.kv_indptr_cpu).max()) * page_size
            rows = batch if batch.is_decode or self.verifies(batch) else rows_as_requests(batch, page_size)
            return MLATritonPlan(self, batch, workspace, rows, longest)
        segments = plan_mla_prefill(batch.qo_indptr_cpu, batch.kv_indptr_cpu, batch.kv_last_page_len_cpu, page_size,
                                    self._most_tokens, batch.input_ids.device)
        return MLATritonPlan(self, batch, workspace, segments=segments)

    def verifies(self, batch: ForwardBatch) -> bool:
        return batch.mask is not None or (batch.verifies and self._policy.verifies(batch.max_q_len))

    def warm_up(self, compute_prompt: Callable[[], None]) -> None:
        compute_prompt()

    def run_last_tokens(self, batch: ForwardBatch, workspace: AttentionWorkspace, layer: int, q: torch.Tensor,
                        latent: torch.Tensor, k_rope: torch.Tensor, up: torch.Tensor,
                        cos_sin: torch.Tensor) -> torch.Tensor:
        assert batch.last_tokens is not None
        store(self.pool, self.mla, batch, layer, q, latent, k_rope, cos_sin)
        if not batch.last_tokens.num_reqs:
            return q.new_empty(0, q.shape[1], self.mla.v_dim)
        plan = self.plan(batch.last_tokens, workspace, max_length=ANY_LENGTH)
        return self.attend(plan, layer, q[batch.logits_rows], up)

    def attend(self, plan: MLATritonPlan, layer: int, q: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        """Attends to the stored latents of the plan's batch."""
        rows, nope, pages = plan.rows, self.mla.nope_dim, self.pool.latents(layer)
        page_scale, _ = self.pool.layout.scales_of(layer)
        if rows is None:
            return self._extend(plan, q, pages, page_scale, up)
        absorbed, q_rope = absorb(q, up, nope), q[..., nope:]
        tile = self._verify_tile(rows, absorbed, q_rope, pages)
        if not rows.is_decode or self._policy.batch_invariant or tile.warp_specialized:
            return values_of(self._verify(plan, rows, absorbed, q_rope, pages, page_scale, tile), up, nope)
        if plan.splits is None:
            plan.splits = plan_decode(rows.kv_indptr, rows.kv_last_page_len, self.pool.layout.page_size,
                                      self._head_blocks, self._num_sms, plan.longest, **self._splits)
        latents = mla_decode(absorbed, q_rope, pages, rows.kv_indptr, rows.kv_indices, rows.kv_last_page_len,
                             self.mla.scale, plan.splits, page_scale=page_scale)
        return values_of(latents, up, nope)

    def _verify_tile(self, rows: ForwardBatch, q: torch.Tensor, q_rope: torch.Tensor,
                     pages: torch.Tensor) -> VerifyTile:
        """Returns the policy's tile; of the general kernel where warp groups do not take the rows."""
        tile = self._policy.mla_verify(self._num_heads, rows.max_q_len, q.element_size())
        block = min(tile.rows, 1 << (rows.max_q_len - 1).bit_length()) * min(tile.heads, self._num_heads)
        if tile.warp_specialized and (rows.mask is not None or not fits_warp_groups(q, q_rope, pages, block)):
            return tile._replace(warp_specialized=False)
        return tile

    def _verify(self, plan: MLATritonPlan, rows: ForwardBatch, q: torch.Tensor, q_rope: torch.Tensor,
                pages: torch.Tensor, page_scale: float, tile: VerifyTile) -> torch.Tensor:
        if plan.verify is None:
            plan.verify = [self._plan_verify(part, rows, plan.longest, tile) for part in self._parts(rows)]
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        for qo_indptr, kv_indptr, last_page_len, splits in plan.verify:
            mla_verify(q, q_rope, pages, qo_indptr, kv_indptr, rows.kv_indices, last_page_len, self.mla.scale, splits,
                       tile, page_scale, rows.mask, out)
        return out

    def _parts(self, rows: ForwardBatch) -> list[slice]:
        """Requests that are computed together; in deterministic mode, where each row has parts of its own, some."""
        at_once = rows.num_reqs
        if self._policy.batch_invariant:  # a multiple of 4: Triton compiles kernels anew for pointers without alignment
            at_once = max(4, _INVARIANT_ROWS // rows.max_q_len // 4 * 4)
        return [slice(start, start + at_once) for start in range(0, rows.num_reqs, at_once)]

    def _plan_verify(self, part: slice, rows: ForwardBatch, longest: int, tile: VerifyTile) -> _VerifyPart:
        ends = slice(part.start, part.stop + 1)
        table = rows.qo_indptr[ends], rows.kv_indptr[ends], rows.kv_last_page_len[part]
        return *table, plan_verify(*table, self.pool.layout.page_size, tile.head_blocks(self._num_heads), self._num_sms,
                                   rows.max_q_len, longest, tile, self._policy.mla_verify_splits(tile),
                                   masked=rows.mask is not None)

    def _extend(self, plan: MLATritonPlan, q: torch.Tensor, pages: torch.Tensor, page_scale: float,
                up: torch.Tensor) -> torch.Tensor:
        batch = plan.batch
        rank, shape = self.mla.kv_lora_rank, (*q.shape[:2], self.mla.v_dim)
        lse = None
        if len(plan.segments) == 1:
            out = torch.empty(shape, dtype=q.dtype, device=q.device)
        else:
            out = torch.zeros(shape, dtype=torch.float32, device=q.device)
            lse = torch.full(shape[:2], float("-inf"), dtype=torch.float32, device=q.device)
        for segment in plan.segments:
            indices = batch.kv_indices[segment.first_page:segment.last_page]
            context = gather(pages, indices, q.dtype, page_scale).flatten(0, 1)  # [S, L + R]
            kv = linear(context[:, :rank], up.flatten(0, 1)).unflatten(-1, up.shape[:2])  # [S, H, N + V]
            mla_prefill(q, kv, context[:, rank:], segment, batch.qo_indptr, self.mla.scale, out, lse)
        return out.to(q.dtype)


@dataclass(eq=False)
class MLATritonPlan:
    """A batch's segments of the contexts. Or its ``rows``, of a decode step or of one that verifies drafts, and splits
    of sequences up to ``longest`` tokens: the first layer makes these, so that a graph that captures the layers makes
    them in every replay."""

    backend: MLATritonBackend
    batch: ForwardBatch
    workspace: AttentionWorkspace
    rows: ForwardBatch | None = None
    longest: int = 0
    segments: Sequence[Segment] = ()
    splits: DecodePlan | None = None
    verify: Sequence[_VerifyPart] | None = None
    attends_last_tokens: bool = True

    def run(self, layer: int, q: torch.Tensor, latent: torch.Tensor, k_rope: torch.Tensor, up: torch.Tensor,
            cos_sin: torch.Tensor) -> torch.Tensor:
        store(self.backend.pool, self.backend.mla, self.batch, layer, q, latent, k_rope, cos_sin)
        return self.backend.attend(self, layer, q, up)

    def run_last_tokens(self, *inputs: Any) -> torch.Tensor:
        return self.backend.run_last_tokens(self.batch, self.workspace, *inputs)

    def refresh(self, batch: ForwardBatch) -> None:
        """Does nothing: the splits are made on the device."""
