"""One backend for prompts, another for decode steps, over one pool."""

from __future__ import annotations

import torch

from ..engine.forward_batch import ForwardBatch
from .base import AttentionBackend


class SplitBackend:
    def __init__(self, prefill: AttentionBackend, decode: AttentionBackend):
        self._prefill = prefill
        self._decode = decode
        self._chosen = prefill

    def plan(self, batch: ForwardBatch, max_length: int | None = None) -> None:
        self._chosen = self._decode if batch.is_decode else self._prefill
        self._chosen.plan(batch, max_length)

    def run(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
            cos_sin: torch.Tensor | None = None) -> torch.Tensor:
        return self._chosen.run(layer, q, k, v, cos_sin)
