"""Decode steps of multi-head latent attention by FlashInfer's kernels, of DeepSeek's widths (compiled at first use)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ...api.errors import ConfigError
from ...config.mla import MLASpec
from ...config.server.kernels import LATENT_BACKENDS
from ...forward.forward_batch import ForwardBatch
from ...kvcache.pool import KVPool
from ..base import check_gpu
from ..workspace import AttentionWorkspace
from .base import LatentBackend, absorb, store, values_of

_WORKSPACE_BYTES = 128 << 20


@LATENT_BACKENDS.register("flashinfer", needs={"flashinfer": "flashinfer-python"}, traits=("gpu",))
class MLAFlashInferBackend:
    """Decodes in the absorbed form. A captured step has a wrapper of its own, over the graph's page table: its plan is
    made again before each replay."""

    attends_last_tokens = False  # its plan would wait for the last step
    takes_prompts = False
    captures = True

    @staticmethod
    def check(device: torch.device) -> None:
        check_gpu("flashinfer", device)

    @staticmethod
    def check_decode(device: torch.device, mla: MLASpec, dtype: str, stored: str) -> None:
        why = None
        if device.type != "cuda":
            why = "needs a GPU"
        elif (mla.kv_lora_rank, mla.rope_dim) != (512, 64):
            why = f"takes latents of 512 + 64 values, not {mla.kv_lora_rank} + {mla.rope_dim}"
        elif dtype not in ("bfloat16", "float16") or stored != dtype:
            why = f"takes latents in bfloat16 or float16, as the model's, not {stored} in a model in {dtype}"
        if why is not None:
            raise ConfigError(f"--decode-attention-backend flashinfer {why}: leave the flag out.")

    @staticmethod
    def make(pool: KVPool, mla: MLASpec, num_heads: int, dtype: torch.dtype) -> LatentBackend:
        return MLAFlashInferBackend(pool, mla, num_heads, dtype)

    def __init__(self, pool: KVPool, mla: MLASpec, num_heads: int, dtype: torch.dtype):
        """``num_heads`` counts this rank's heads; ``dtype`` is the model's and the pool's."""
        self.pool = pool
        self.mla = mla
        self._num_heads = num_heads
        self._dtype = dtype

    def _wrappers(self, workspace: AttentionWorkspace) -> _Wrappers:
        """Makes the wrapper of a workspace."""
        from flashinfer.mla import BatchMLAPagedAttentionWrapper
        scratch = workspace.scratch(_WORKSPACE_BYTES)
        return _Wrappers(scratch, BatchMLAPagedAttentionWrapper(scratch), torch.cuda.Event())

    def plan(self, batch: ForwardBatch, workspace: AttentionWorkspace, *, max_length: int | None = None,
             out: torch.Tensor | None = None) -> MLAFlashInferPlan:
        assert batch.is_decode
        wrappers = workspace.of(self, lambda: self._wrappers(workspace))
        wrapper = wrappers.plain if max_length is None else self._over_tensors_of(batch, wrappers.scratch)
        plan = MLAFlashInferPlan(self, batch, wrappers, wrapper)
        self.fill(plan, batch)
        return plan

    def verifies(self, batch: ForwardBatch) -> bool:
        return False

    def warm_up(self, compute_prompt: Callable[[], None]) -> None:
        compute_prompt()

    @staticmethod
    def _over_tensors_of(batch: ForwardBatch, scratch: torch.Tensor) -> Any:
        """Makes a wrapper that reads the page indices of the graph."""
        rows = torch.zeros(3, batch.num_reqs + 1, dtype=torch.int32, device=scratch.device)
        from flashinfer.mla import BatchMLAPagedAttentionWrapper
        return BatchMLAPagedAttentionWrapper(
            scratch, use_cuda_graph=True, qo_indptr=rows[0], kv_indptr=rows[1], kv_indices=batch.kv_indices,
            kv_len_arr=rows[2, :batch.num_reqs])

    def fill(self, plan: MLAFlashInferPlan, batch: ForwardBatch) -> None:
        """Plans ``batch`` by the plan's wrapper."""
        # A plan is copied to the device from the wrapper's pinned buffer, which must not change before that has run.
        plan.wrappers.planned.synchronize()
        page_size = self.pool.layout.page_size
        lengths = (np.diff(batch.kv_indptr_cpu) - 1) * page_size + batch.kv_last_page_len_cpu
        plan.wrapper.plan(torch.arange(batch.num_reqs + 1, dtype=torch.int32), torch.from_numpy(batch.kv_indptr_cpu),
                          batch.kv_indices[:int(batch.kv_indptr_cpu[-1])], torch.from_numpy(lengths.astype(np.int32)),
                          self._num_heads, self.mla.kv_lora_rank, self.mla.rope_dim, page_size, False, self.mla.scale,
                          self._dtype, self._dtype)
        plan.wrappers.planned.record()

    def run_last_tokens(self, *args: Any) -> torch.Tensor:
        raise AssertionError("this backend does not attend to ends alone")


@dataclass(eq=False)
class _Wrappers:
    """The library's wrapper in one workspace. ``planned`` is recorded once a plan is enqueued."""

    scratch: torch.Tensor
    plain: Any
    planned: torch.cuda.Event


class MLAFlashInferPlan:
    """A batch that ``wrapper`` has planned."""

    attends_last_tokens = False  # its plan would wait for the last step

    def __init__(self, backend: MLAFlashInferBackend, batch: ForwardBatch, wrappers: _Wrappers, wrapper: Any):
        self.wrappers = wrappers
        self.wrapper = wrapper
        self._backend = backend
        self._batch = batch

    def refresh(self, batch: ForwardBatch) -> None:
        self._backend.fill(self, batch)

    def run(self, layer: int, q: torch.Tensor, latent: torch.Tensor, k_rope: torch.Tensor, up: torch.Tensor,
            cos_sin: torch.Tensor) -> torch.Tensor:
        mla = self._backend.mla
        nope, rank = mla.nope_dim, mla.kv_lora_rank
        pages = store(self._backend.pool, mla, self._batch, layer, q, latent, k_rope, cos_sin)
        queries = absorb(q, up, nope).contiguous()
        latents = self.wrapper.run(queries, q[..., nope:].contiguous(), pages[..., :rank], pages[..., rank:])
        return values_of(latents, up, nope)

    def run_last_tokens(self, *args: Any) -> torch.Tensor:
        raise AssertionError("this backend does not attend to ends alone")
