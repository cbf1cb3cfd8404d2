"""Two-batch overlap: prefill steps in two micro-batches, one of which computes while the other's rows are exchanged."""

from __future__ import annotations

import numpy as np

from ..api.errors import ConfigError
from ..attention.base import AttentionPlanner
from ..config.server import ServerConfig
from ..distributed.parallel import Parallel
from ..distributed.token_exchange import TokenExchange
from ..forward.forward_batch import ForwardBatch, indptr_of, slice_batch
from ..models.decoder.causal_lm import CausalLM
from ..models.decoder.micro_batches import MicroBatch
from .dp_sync import DPStepInfo


class TwoBatchOverlap:
    """Splits a step into micro-batches of equal tokens. A request in the middle is split in two: its second part
    attends to the first, which is stored before. All ranks split the same steps: those in which every attention group
    prefills or is idle; an idle one takes part with a row in each micro-batch."""

    def __init__(self, attentions: tuple[AttentionPlanner, AttentionPlanner],
                 exchanges: tuple[TokenExchange, TokenExchange], page_size: int, dp_rank: int, min_tokens: int):
        """``min_tokens``: tokens of every busy attention group from which a step is split."""
        self._attentions = attentions
        self._exchanges = exchanges
        self._page_size = page_size
        self._dp_rank = dp_rank
        self._min_tokens = min_tokens
        self._split_row = 0

    @classmethod
    def from_config(cls, config: ServerConfig, parallel: Parallel, model: CausalLM,
                    attentions: tuple[AttentionPlanner, AttentionPlanner]) -> TwoBatchOverlap:
        """Creates a rank's. Raises ConfigError."""
        if not model.supports_microbatches:
            raise ConfigError("--enable-two-batch-overlap is for --moe-a2a-backend none, and for MLPs without a bias: "
                              "leave it out.")
        return cls(attentions, (parallel.overlap_exchange(), parallel.overlap_exchange()), config.cache.page_size,
                   parallel.dp_rank, config.data_parallel.two_batch_min_tokens)

    def begin_step(self, info: DPStepInfo) -> bool:
        """Prepares the exchanges of a step; returns whether it is split."""
        if info.min_prefill_tokens < self._min_tokens:
            return False
        # Even, so that pointers to the second micro-batch's rows are aligned as kernels were compiled for.
        first = [max(count // 4 * 2, 1) for count in info.num_tokens]
        second = [max(count - before, 1) for count, before in zip(info.num_tokens, first)]
        for exchange, counts in zip(self._exchanges, (first, second)):
            exchange.begin_step(counts)
        self._split_row = first[self._dp_rank]
        return all(exchange.padded for exchange in self._exchanges)

    def plan(self, batch: ForwardBatch) -> list[MicroBatch]:
        """Plans the attentions of a batch that is split, and returns its micro-batches."""
        bounds = ((0, self._split_row), (self._split_row, batch.num_tokens))
        for attention, (start, stop) in zip(self._attentions, bounds):
            attention.plan(slice_rows(batch, start, stop, self._page_size))
        return [MicroBatch(start, stop, attention, exchange)
                for (start, stop), attention, exchange in zip(bounds, self._attentions, self._exchanges)]


def slice_rows(batch: ForwardBatch, start: int, stop: int, page_size: int) -> ForwardBatch:
    """Returns token rows ``start:stop`` of ``batch`` as a batch of their own, without logits."""
    starts, stops = batch.qo_indptr_cpu[:-1], batch.qo_indptr_cpu[1:]
    requests = np.flatnonzero((starts < stop) & (stops > start))
    starts, stops = starts[requests], stops[requests]
    pages = np.diff(batch.kv_indptr_cpu)[requests]
    lengths = (pages - 1) * page_size + batch.kv_last_page_len_cpu[requests] - np.maximum(stops - stop, 0)
    pages = -(lengths // -page_size)
    return slice_batch(batch, slice(start, stop), requests,
                       indptr_of(np.minimum(stops, stop) - np.maximum(starts, start)), pages,
                       (lengths - (pages - 1) * page_size).astype(np.int32))
