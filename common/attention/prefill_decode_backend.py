"""Runs prompts on one attention backend and decode steps on another, over one pool."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..forward.forward_batch import ForwardBatch
from ..forward.step_context import AttentionPlan


class PrefillDecodeBackend:
    """Two backends of the same kind of attention, whatever it is: ``run``'s arguments are passed on."""

    def __init__(self, prefill: Any, decode: Any):
        self._prefill = prefill
        self._decode = decode
        self._chosen = prefill

    def plan(self, batch: ForwardBatch, max_length: int | None = None) -> AttentionPlan:
        self._chosen = self._decode if batch.is_decode else self._prefill
        self._chosen.plan(batch, max_length)
        return self

    def warm_up(self, compute_prompt: Callable[[], None]) -> None:
        self._prefill.warm_up(compute_prompt)

    def refresh(self, batch: ForwardBatch) -> None:
        self._decode.refresh(batch)

    @property
    def attends_last_tokens(self) -> bool:
        return bool(self._decode.attends_last_tokens)

    def run_last_tokens(self, *args: Any) -> torch.Tensor:
        result: torch.Tensor = self._decode.run_last_tokens(*args)  # stores as the other backend does
        return result

    def run(self, *args: Any, **named: Any) -> torch.Tensor:
        result: torch.Tensor = self._chosen.run(*args, **named)
        return result
