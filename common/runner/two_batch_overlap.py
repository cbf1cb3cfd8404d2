"""Two-batch overlap: prefill steps in two micro-batches, one of which computes while the other's rows are exchanged."""

from __future__ import annotations

import numpy as np

from ..api.errors import ConfigError
from ..attention.base import AttentionPlanner
from ..attention.workspace import AttentionWorkspace
from ..config.server import ServerConfig
from ..distributed.parallel import Parallel
from ..distributed.step_rows import pads_groups
from ..distributed.token_exchange import TokenExchange
from ..forward.forward_batch import ForwardBatch, indptr_of, slice_batch
from ..forward.step_context import MicroBatch, StepContext
from ..models.decoder.causal_lm import CausalLM
from .dp_sync import DPStepInfo


class TwoBatchOverlap:
    """Splits a step into micro-batches of equal tokens. A request in the middle is split in two: its second part
    attends to the first, which is stored before. All ranks split the same steps: those in which every attention group
    prefills or is idle; an idle one takes part with a row in each micro-batch."""

    def __init__(self, attention: AttentionPlanner, workspaces: tuple[AttentionWorkspace, AttentionWorkspace],
                 exchange: TokenExchange, page_size: int, dp_rank: int, min_tokens: int):
        """``workspaces``: one for each micro-batch. ``min_tokens``: tokens of every busy attention group from which a
        step is split."""
        self._attention = attention
        self._workspaces = workspaces
        self._exchange = exchange
        self._page_size = page_size
        self._dp_rank = dp_rank
        self._min_tokens = min_tokens

    @classmethod
    def from_config(cls, config: ServerConfig, parallel: Parallel, model: CausalLM,
                    attention: AttentionPlanner, workspace: AttentionWorkspace) -> TwoBatchOverlap:
        """Creates a rank's, whose first micro-batch is planned in ``workspace``. Raises ConfigError."""
        if not model.supports_microbatches:
            raise ConfigError("--enable-two-batch-overlap is for --moe-a2a-backend none, and for MLPs without a bias: "
                              "leave it out.")
        return cls(attention, (workspace, workspace.fork()), parallel.overlap_exchange(), config.cache.page_size,
                   parallel.dp_rank,
                   config.data_parallel.two_batch_min_tokens)

    def split_counts(self, info: DPStepInfo) -> tuple[list[int], list[int]] | None:
        """Returns the rows of both micro-batches in each attention group, where the step is split, else None."""
        if info.min_prefill_tokens < self._min_tokens:
            return None
        # Even, so that pointers to the second micro-batch's rows are aligned as kernels were compiled for.
        first = [max(count // 4 * 2, 1) for count in info.num_tokens]
        second = [max(count - before, 1) for count, before in zip(info.num_tokens, first)]
        return (first, second) if pads_groups(first) and pads_groups(second) else None

    def plan(self, batch: ForwardBatch, counts: tuple[list[int], list[int]]) -> tuple[MicroBatch, ...]:
        """Plans the attentions of a batch that is split by ``split_counts``, and returns its micro-batches."""
        split_row = counts[0][self._dp_rank]
        bounds = ((0, split_row), (split_row, batch.num_tokens))
        steps = []
        for workspace, (start, stop), rows in zip(self._workspaces, bounds, counts):
            part = slice_rows(batch, start, stop, self._page_size)
            steps.append(StepContext(part, self._attention.plan(part, workspace), self._exchange.step(rows)))
        return tuple(MicroBatch(start, stop, step, self._exchange) for (start, stop), step in zip(bounds, steps))


def slice_rows(batch: ForwardBatch, start: int, stop: int, page_size: int) -> ForwardBatch:
    """Returns token rows ``start:stop`` of ``batch`` as a batch of their own, without logits."""
    starts, stops = batch.qo_indptr_cpu[:-1], batch.qo_indptr_cpu[1:]
    requests = np.flatnonzero((starts < stop) & (stops > start))
    starts, stops = starts[requests], stops[requests]
    pages = np.diff(batch.kv_indptr_cpu)[requests]
    lengths = (pages - 1) * page_size + batch.kv_last_page_len_cpu[requests] - np.maximum(stops - stop, 0)
    pages = -(lengths // -page_size)
    part = slice_batch(batch, slice(start, stop), requests,
                       indptr_of(np.minimum(stops, stop) - np.maximum(starts, start)), pages,
                       (lengths - (pages - 1) * page_size).astype(np.int32))
    part.further = tuple(slice_rows(group, start, stop, page_size) for group in batch.further)
    return part
