"""Runs prompts on one attention backend and decode steps on another, over one pool."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..forward.forward_batch import ForwardBatch
from ..forward.step_context import AttentionPlan
from .base import AttentionPlanner
from .workspace import AttentionWorkspace


class PrefillDecodeBackend:
    """Two backends of the same kind of attention, whatever it is: ``run``'s arguments are passed on."""

    def __init__(self, prefill: AttentionPlanner, decode: AttentionPlanner):
        self._prefill = prefill
        self._decode = decode

    def plan(self, batch: ForwardBatch, workspace: AttentionWorkspace, *, max_length: int | None = None,
             out: torch.Tensor | None = None) -> AttentionPlan:
        if batch.is_decode or self._decode.verifies(batch):
            return self._decode.plan(batch, workspace, max_length=max_length, out=out)
        return PrefillPlan(self._prefill.plan(batch, workspace, max_length=max_length, out=out), self._decode, batch,
                           workspace)

    def verifies(self, batch: ForwardBatch) -> bool:
        return self._decode.verifies(batch) or self._prefill.verifies(batch)

    def warm_up(self, compute_prompt: Callable[[], None]) -> None:
        self._prefill.warm_up(compute_prompt)

    @property
    def attends_last_tokens(self) -> bool:
        return self._decode.attends_last_tokens

    def run_last_tokens(self, batch: ForwardBatch, workspace: AttentionWorkspace, *inputs: Any) -> torch.Tensor:
        return self._decode.run_last_tokens(batch, workspace, *inputs)


class PrefillPlan:
    """The plan of prompts, whose last tokens ``decode`` attends in the last layer: it stores as the other does."""

    def __init__(self, prefill: AttentionPlan, decode: AttentionPlanner, batch: ForwardBatch,
                 workspace: AttentionWorkspace):
        self.run = prefill.run
        self.attends_last_tokens = decode.attends_last_tokens
        self._decode = decode
        self._batch = batch
        self._workspace = workspace

    def run_last_tokens(self, *inputs: Any) -> torch.Tensor:
        return self._decode.run_last_tokens(self._batch, self._workspace, *inputs)

    def refresh(self, batch: ForwardBatch) -> None:
        raise AssertionError("steps of prompts are not captured with their attention")
