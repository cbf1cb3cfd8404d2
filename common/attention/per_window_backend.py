"""Runs each layer on the backend of its sliding window, over one pool."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from ...kernels.arguments import HeadNorms
from ..forward.forward_batch import ForwardBatch
from ..forward.step_context import AttentionPlan
from .base import AttentionBackend


class PerWindowBackend:
    """Backends by window: ``windows`` has the window of each of the pool's layers, ``backends`` one for each window."""

    def __init__(self, backends: Mapping[int | None, AttentionBackend], windows: Sequence[int | None]):
        self._backends = list(backends.values())
        self._of_layer = [backends[window] for window in windows]

    def plan(self, batch: ForwardBatch, max_length: int | None = None) -> AttentionPlan:
        for backend in self._backends:
            backend.plan(batch, max_length)
        return self

    def warm_up(self, compute_prompt: Callable[[], None]) -> None:
        for backend in self._backends:
            backend.warm_up(compute_prompt)

    def refresh(self, batch: ForwardBatch) -> None:
        for backend in self._backends:
            backend.refresh(batch)

    @property
    def attends_last_tokens(self) -> bool:
        return all(backend.attends_last_tokens for backend in self._backends)

    def run_last_tokens(self, batch: ForwardBatch, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
                        cos_sin: torch.Tensor | None = None, norms: HeadNorms | None = None,
                        sinks: torch.Tensor | None = None) -> torch.Tensor:
        return self._of_layer[layer].run_last_tokens(batch, layer, q, k, v, cos_sin, norms, sinks)

    def run(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cos_sin: torch.Tensor | None = None,
            norms: HeadNorms | None = None, sinks: torch.Tensor | None = None) -> torch.Tensor:
        return self._of_layer[layer].run(layer, q, k, v, cos_sin, norms, sinks)
