"""Runs each layer on the backend of its sliding window, over one pool."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from ..forward.forward_batch import ForwardBatch
from ..forward.step_context import AttentionPlan
from .base import AttentionBackend
from .workspace import AttentionWorkspace


class PerWindowBackend:
    """Backends by window: ``windows`` has the window of each of the pool's layers, ``backends`` one for each window."""

    def __init__(self, backends: Mapping[int | None, AttentionBackend], windows: Sequence[int | None]):
        self._backends = list(backends.values())
        indices = {window: index for index, window in enumerate(backends)}
        self._index_of_layer = [indices[window] for window in windows]

    def plan(self, batch: ForwardBatch, workspace: AttentionWorkspace, *, max_length: int | None = None,
             out: torch.Tensor | None = None) -> PerWindowPlan:
        return PerWindowPlan([backend.plan(batch, workspace, max_length=max_length, out=out)
                              for backend in self._backends], self._index_of_layer)

    def warm_up(self, compute_prompt: Callable[[], None]) -> None:
        for backend in self._backends:
            backend.warm_up(compute_prompt)

    @property
    def attends_last_tokens(self) -> bool:
        return all(backend.attends_last_tokens for backend in self._backends)

    def run_last_tokens(self, batch: ForwardBatch, workspace: AttentionWorkspace, layer: int,
                        *inputs: Any) -> torch.Tensor:
        backend = self._backends[self._index_of_layer[layer]]
        return backend.run_last_tokens(batch, workspace, layer, *inputs)


class PerWindowPlan:
    """The plans of all windows, and the index of each layer's."""

    def __init__(self, plans: list[AttentionPlan], index_of_layer: list[int]):
        self._plans = plans
        self._index_of_layer = index_of_layer
        self.attends_last_tokens = all(plan.attends_last_tokens for plan in plans)

    def run(self, layer: int, *inputs: Any) -> torch.Tensor:
        return self._plans[self._index_of_layer[layer]].run(layer, *inputs)

    def run_last_tokens(self, layer: int, *inputs: Any) -> torch.Tensor:
        return self._plans[self._index_of_layer[layer]].run_last_tokens(layer, *inputs)

    def refresh(self, batch: ForwardBatch) -> None:
        for plan in self._plans:
            plan.refresh(batch)
