"""Runs each layer on a backend of its own: of its sliding window, or of its cache group's pool and page tables."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from ..forward.forward_batch import ForwardBatch
from ..forward.step_context import AttentionPlan
from .base import AttentionBackend
from .workspace import AttentionWorkspace


class LayerPlace(NamedTuple):
    """The index of a layer's backend, and the layer's index in that backend's pool."""

    backend: int
    layer: int


class PerLayerBackend:
    """``places`` has the place of each layer. ``cache_groups`` has the cache group of each of ``backends``, whose pool
    and page tables it uses."""

    def __init__(self, backends: Sequence[AttentionBackend], cache_groups: Sequence[int], places: Sequence[LayerPlace]):
        self._backends = backends
        self._cache_groups = cache_groups
        self._places = places

    def plan(self, batch: ForwardBatch, workspace: AttentionWorkspace, *, max_length: int | None = None,
             out: torch.Tensor | None = None) -> PerLayerPlan:
        return PerLayerPlan([backend.plan(batch.in_group(group), workspace, max_length=max_length, out=out)
                             for backend, group in zip(self._backends, self._cache_groups)], self._cache_groups,
                            self._places)

    def verifies(self, batch: ForwardBatch) -> bool:
        return all(backend.verifies(batch) for backend in self._backends)

    def warm_up(self, compute_prompt: Callable[[], None]) -> None:
        for backend in self._backends:
            backend.warm_up(compute_prompt)

    @property
    def attends_last_tokens(self) -> bool:
        return all(backend.attends_last_tokens for backend in self._backends)

    def run_last_tokens(self, batch: ForwardBatch, workspace: AttentionWorkspace, layer: int,
                        *inputs: Any) -> torch.Tensor:
        index, layer = self._places[layer]
        return self._backends[index].run_last_tokens(batch.in_group(self._cache_groups[index]), workspace, layer,
                                                     *inputs)


class PerLayerPlan:
    """The plans of all backends."""

    def __init__(self, plans: list[AttentionPlan], cache_groups: Sequence[int], places: Sequence[LayerPlace]):
        self._plans = plans
        self._cache_groups = cache_groups
        self._places = places
        self.attends_last_tokens = all(plan.attends_last_tokens for plan in plans)

    def run(self, layer: int, *inputs: Any) -> torch.Tensor:
        index, layer = self._places[layer]
        return self._plans[index].run(layer, *inputs)

    def run_last_tokens(self, layer: int, *inputs: Any) -> torch.Tensor:
        index, layer = self._places[layer]
        return self._plans[index].run_last_tokens(layer, *inputs)

    def refresh(self, batch: ForwardBatch) -> None:
        for plan, group in zip(self._plans, self._cache_groups):
            plan.refresh(batch.in_group(group))
