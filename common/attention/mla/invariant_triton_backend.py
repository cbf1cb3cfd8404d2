"""The Triton backend of latent attention in deterministic mode: every row is computed as a decode step's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ...config.mla import MLASpec
from ...forward.forward_batch import ForwardBatch, rows_as_requests, slice_batch
from ...kvcache.pool import KVPool
from ..workspace import AttentionWorkspace
from .base import store

_ROWS_AT_ONCE = 256
"""Rows of a prompt whose splits' results are in memory together: 67 MB for 16 heads."""


class InvariantMLATritonBackend:
    attends_last_tokens = True

    def __init__(self, pool: KVPool, mla: MLASpec, decode: Any):
        """``decode`` is the backend of decode steps, which splits each row by its own length alone."""
        self.pool = pool
        self.mla = mla
        self._decode = decode

    def plan(self, batch: ForwardBatch, workspace: AttentionWorkspace, *, max_length: int | None = None,
             out: torch.Tensor | None = None) -> Any:
        if batch.is_decode:
            return self._decode.plan(batch, workspace, max_length=max_length, out=out)
        rows = rows_as_requests(batch, self.pool.layout.page_size)
        pages = np.diff(rows.kv_indptr_cpu)
        parts = []
        for start in range(0, rows.num_reqs, _ROWS_AT_ONCE):
            stop = min(start + _ROWS_AT_ONCE, rows.num_reqs)
            part = slice_batch(rows, slice(start, stop), np.arange(start, stop),
                               np.arange(stop - start + 1, dtype=np.int32), pages[start:stop],
                               rows.kv_last_page_len_cpu[start:stop])
            part.max_q_len = 1
            parts.append((slice(start, stop), self._decode.plan(part, workspace, max_length=max_length)))
        return InvariantMLATritonPlan(self, batch, workspace, parts)

    def verifies(self, batch: ForwardBatch) -> bool:
        return False

    def warm_up(self, compute_prompt: Callable[[], None]) -> None:
        compute_prompt()

    def run_last_tokens(self, batch: ForwardBatch, workspace: AttentionWorkspace, layer: int, q: torch.Tensor,
                        latent: torch.Tensor, k_rope: torch.Tensor, up: torch.Tensor,
                        cos_sin: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self._decode.run_last_tokens(batch, workspace, layer, q, latent, k_rope, up, cos_sin)
        return found

    def attend(self, plan: InvariantMLATritonPlan, layer: int, q: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        """Attends to the stored latents of the plan's batch."""
        made: list[torch.Tensor] = [self._decode.attend(part, layer, q[rows], up) for rows, part in plan.parts]
        return torch.cat(made)


@dataclass(eq=False)
class InvariantMLATritonPlan:
    """A batch's rows as decode steps."""

    backend: InvariantMLATritonBackend
    batch: ForwardBatch
    workspace: AttentionWorkspace
    parts: Sequence[tuple[slice, Any]]
    attends_last_tokens: bool = True

    def run(self, layer: int, q: torch.Tensor, latent: torch.Tensor, k_rope: torch.Tensor, up: torch.Tensor,
            cos_sin: torch.Tensor) -> torch.Tensor:
        store(self.backend.pool, self.backend.mla, self.batch, layer, q, latent, k_rope, cos_sin)
        return self.backend.attend(self, layer, q, up)

    def run_last_tokens(self, *inputs: Any) -> torch.Tensor:
        return self.backend.run_last_tokens(self.batch, self.workspace, *inputs)

    def refresh(self, batch: ForwardBatch) -> None:
        raise AssertionError("steps of prompts are not captured with their attention")
