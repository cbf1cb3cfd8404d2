"""Backends of several sliding windows over one pool: each layer runs on the one that is made for its window."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from ...kernels.arguments import HeadNorms
from ..forward.forward_batch import ForwardBatch
from .base import AttentionBackend


class LayersBackend:
    """``windows`` has each layer's of the pool, and ``backends`` one for every such window."""

    def __init__(self, backends: Mapping[int | None, AttentionBackend], windows: Sequence[int | None]):
        self._backends = list(backends.values())
        self._of_layer = [backends[window] for window in windows]

    def plan(self, batch: ForwardBatch, max_length: int | None = None) -> None:
        for backend in self._backends:
            backend.plan(batch, max_length)

    def refresh(self, batch: ForwardBatch) -> None:
        for backend in self._backends:
            backend.refresh(batch)

    @property
    def attends_ends(self) -> bool:
        return all(backend.attends_ends for backend in self._backends)

    def run_ends(self, batch: ForwardBatch, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
                 cos_sin: torch.Tensor | None = None, norms: HeadNorms | None = None,
                 sinks: torch.Tensor | None = None) -> torch.Tensor:
        return self._of_layer[layer].run_ends(batch, layer, q, k, v, cos_sin, norms, sinks)

    def run(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cos_sin: torch.Tensor | None = None,
            norms: HeadNorms | None = None, sinks: torch.Tensor | None = None) -> torch.Tensor:
        return self._of_layer[layer].run(layer, q, k, v, cos_sin, norms, sinks)
