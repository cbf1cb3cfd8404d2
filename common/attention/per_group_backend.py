"""Runs each layer on the backend of its cache group, over the group's pool and page tables."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from ..forward.forward_batch import ForwardBatch
from ..forward.step_context import AttentionPlan
from .base import AttentionBackend
from .workspace import AttentionWorkspace


class LayerPlace(NamedTuple):
    """The cache group of a layer, and the layer's index in the group's pool."""

    group: int
    layer: int


class PerGroupBackend:
    """``backends`` has one backend for each cache group, ``places`` the place of each of the rank's layers."""

    def __init__(self, backends: Sequence[AttentionBackend], places: Sequence[LayerPlace]):
        self._backends = backends
        self._places = places

    def plan(self, batch: ForwardBatch, workspace: AttentionWorkspace, *, max_length: int | None = None,
             out: torch.Tensor | None = None) -> PerGroupPlan:
        return PerGroupPlan([backend.plan(batch.in_group(group), workspace, max_length=max_length, out=out)
                             for group, backend in enumerate(self._backends)], self._places)

    def warm_up(self, compute_prompt: Callable[[], None]) -> None:
        for backend in self._backends:
            backend.warm_up(compute_prompt)

    @property
    def attends_last_tokens(self) -> bool:
        return all(backend.attends_last_tokens for backend in self._backends)

    def run_last_tokens(self, batch: ForwardBatch, workspace: AttentionWorkspace, layer: int,
                        *inputs: Any) -> torch.Tensor:
        group, layer = self._places[layer]
        return self._backends[group].run_last_tokens(batch.in_group(group), workspace, layer, *inputs)


class PerGroupPlan:
    """The plans of all cache groups."""

    def __init__(self, plans: list[AttentionPlan], places: Sequence[LayerPlace]):
        self._plans = plans
        self._places = places
        self.attends_last_tokens = all(plan.attends_last_tokens for plan in plans)

    def run(self, layer: int, *inputs: Any) -> torch.Tensor:
        group, layer = self._places[layer]
        return self._plans[group].run(layer, *inputs)

    def run_last_tokens(self, layer: int, *inputs: Any) -> torch.Tensor:
        group, layer = self._places[layer]
        return self._plans[group].run_last_tokens(layer, *inputs)

    def refresh(self, batch: ForwardBatch) -> None:
        for group, plan in enumerate(self._plans):
            plan.refresh(batch.in_group(group))
