"""An attention backend that records how heavy the channels of queries and keys are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ...kernels.arguments import HeadNorms
from ...kernels.attention.order_channels import order_channels
from ..forward.forward_batch import ForwardBatch
from ..forward.step_context import AttentionPlan
from ..kvcache.pool import KVPool
from .base import AttentionPlanner
from .workspace import AttentionWorkspace


class ChannelRecorder:
    """Attends by ``exact``, and sums over all rows the magnitudes of queries ``q`` and of products of a row's query and
    its own key ``qk`` [layers, Hq, D], and of keys ``k`` [layers, Hkv, D]; float64. Queries and keys are those that
    attention multiplies: after norms and rope."""

    def __init__(self, exact: AttentionPlanner, pool: KVPool, num_heads: int):
        layout, device = pool.layout, pool.groups[0].device
        self._exact = exact
        self._unordered = torch.arange(layout.head_dim, dtype=torch.int32, device=device).repeat(layout.num_kv_heads, 1)
        shapes = {"q": num_heads, "k": layout.num_kv_heads, "qk": num_heads}
        self.sums = {kind: torch.zeros(layout.num_layers, heads, layout.head_dim, dtype=torch.float64, device=device)
                     for kind, heads in shapes.items()}

    def plan(self, batch: ForwardBatch, workspace: AttentionWorkspace, *, max_length: int | None = None,
             out: torch.Tensor | None = None) -> RecordingPlan:
        return RecordingPlan(self, batch, self._exact.plan(batch, workspace, max_length=max_length, out=out))

    def verifies(self, batch: ForwardBatch) -> bool:
        return self._exact.verifies(batch)

    def warm_up(self, compute_prompt: Callable[[], None]) -> None:
        self._exact.warm_up(compute_prompt)

    @property
    def attends_last_tokens(self) -> bool:
        return False

    def run_last_tokens(self, batch: ForwardBatch, workspace: AttentionWorkspace, *inputs: Any) -> torch.Tensor:
        raise AssertionError("this backend does not attend to ends alone")

    def record(self, batch: ForwardBatch, layer: int, q: torch.Tensor, k: torch.Tensor, cos_sin: torch.Tensor | None,
               norms: HeadNorms | None) -> None:
        """Adds a layer's rows to the sums."""
        q, k = order_channels(q, k, self._unordered, cos_sin, batch.positions, norms)
        q, k = q.double(), k.double()
        products = q * k.repeat_interleave(q.shape[1] // k.shape[1], 1)
        for kind, rows in (("q", q), ("k", k), ("qk", products)):
            self.sums[kind][layer] += rows.abs().sum(0)


class RecordingPlan:
    """The exact backend's plan of a batch, whose rows are recorded."""

    attends_last_tokens = False

    def __init__(self, recorder: ChannelRecorder, batch: ForwardBatch, exact: AttentionPlan):
        self._recorder = recorder
        self._batch = batch
        self._exact = exact

    def run(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cos_sin: torch.Tensor | None = None,
            norms: HeadNorms | None = None, sinks: torch.Tensor | None = None) -> torch.Tensor:
        self._recorder.record(self._batch, layer, q, k, cos_sin, norms)
        return self._exact.run(layer, q, k, v, cos_sin, norms, sinks)

    def run_last_tokens(self, *inputs: Any) -> torch.Tensor:
        raise AssertionError("this backend does not attend to ends alone")

    def refresh(self, batch: ForwardBatch) -> None:
        self._exact.refresh(batch)
