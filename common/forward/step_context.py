"""The context of one step: what its layers, exchanges and attention read, passed from call to call."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from ..distributed.step_rows import ONE_GROUP, StepRows
from ..distributed.token_exchange import TokenExchange
from .forward_batch import ForwardBatch
from .piecewise import PiecewiseStep


def ignore_layer(layer: int) -> None:
    """Does nothing after a layer."""


class AttentionPlan(Protocol):
    """A batch's attention, as an attention backend has planned it; see common/attention for the arguments."""

    @property
    def attends_last_tokens(self) -> bool:
        """True if there is ``run_last_tokens``."""

    @property
    def run(self) -> Callable[..., torch.Tensor]:
        """The attention of one layer."""

    @property
    def run_last_tokens(self) -> Callable[..., torch.Tensor]:
        """``run`` for a model's last layer: keys and values of all rows are stored, but only the rows of the batch's
        ``last_tokens`` attend."""

    def refresh(self, batch: ForwardBatch) -> None:
        """Does the host's part of a replay of the graph that has captured this plan. ``batch``, of as many requests, is
        in the tensors that were captured."""


@dataclass(frozen=True, slots=True)
class StepContext:
    """One step of a model. The runner makes it once, and nothing that is shared between steps keeps it, so that steps
    of several models, or on several streams, may be in flight in a rank.

    ``attention`` is the plan of ``batch``; ``microbatches``, where there are some, have plans of their own. ``rows``
    are those that the layers exchange between attention groups, ``logits`` those of the LM head. ``after_layer(i)`` is
    called once layer i of this pipeline stage has been enqueued. With ``piecewise``, layers replay its CUDA graphs
    between attentions.
    """

    batch: ForwardBatch
    attention: AttentionPlan
    rows: StepRows = ONE_GROUP
    logits: StepRows = ONE_GROUP
    after_layer: Callable[[int], None] = ignore_layer
    microbatches: tuple[MicroBatch, ...] = ()
    piecewise: PiecewiseStep | None = None


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Rows ``start:stop`` of a step, as a step of their own whose rows are exchanged by ``exchange``."""

    start: int
    stop: int
    step: StepContext
    exchange: TokenExchange
