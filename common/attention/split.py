"""One backend for prompts, another for decode steps, over one pool."""

from __future__ import annotations

from typing import Any

import torch

from ..forward.forward_batch import ForwardBatch


class SplitBackend:
    """Of any kind, both of the same: it hands ``run``'s arguments on."""

    def __init__(self, prefill: Any, decode: Any):
        self._prefill = prefill
        self._decode = decode
        self._chosen = prefill

    def plan(self, batch: ForwardBatch, max_length: int | None = None) -> None:
        self._chosen = self._decode if batch.is_decode else self._prefill
        self._chosen.plan(batch, max_length)

    def refresh(self, batch: ForwardBatch) -> None:
        self._decode.refresh(batch)

    @property
    def attends_ends(self) -> bool:
        return bool(self._decode.attends_ends)

    def run_ends(self, *args: Any) -> torch.Tensor:
        result: torch.Tensor = self._decode.run_ends(*args)  # it stores as the other would
        return result

    def run(self, *args: Any, **named: Any) -> torch.Tensor:
        result: torch.Tensor = self._chosen.run(*args, **named)
        return result
